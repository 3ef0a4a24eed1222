// all_reduce, two shots: each rank reduces one part of the tensor and then shows the result to all.
//
// The tensor is cut into blocks, and each block into one part a rank. First shot: all ranks show their block, rank r reduces
// part r of all of them. Second shot: rank r shows the result, all copy it. Reads and writes 2 (n - 1) / n of the tensor a
// rank, the least that is possible. Part r is added up in rank order, so the fixed bracketing is kept, however the tensor is cut.
#include "collectives/two_shot.h"

namespace pycoll {
namespace {

bool publish(const Context&) { return false; }

Task run(Context context) {
  TwoShot work(context);
  co_await work.run(true);
}

}  // namespace

const Algorithm kAllReduceTwoShot{"two_shot", Collective::kAllReduce, publish, run, true};

}  // namespace pycoll
