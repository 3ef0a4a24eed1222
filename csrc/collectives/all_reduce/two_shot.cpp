// all_reduce, two shots: each rank reduces one part of the tensor and then shows the result to all.
//
// The tensor is cut into blocks, and each block into one part a rank. First shot: all ranks show their block, rank r reduces
// part r of all of them. Second shot: rank r shows the result, all copy it. Reads and writes 2 (n - 1) / n of the tensor a
// rank, the least that is possible. Part r is added up in rank order, so the fixed bracketing is kept, however the tensor is cut.
//
// Where peers reach the tensors themselves, no block is shown: rank r reads part r of all inputs and writes it to all outputs.
// Reads and writes S a rank, in one step.
#include "collectives/two_shot.h"

#include "collectives/direct_reduction.h"

namespace pycoll {
namespace {

bool publish(const Context& context) {
  DirectReduction::announce(context);
  return false;
}

Task run(Context context) {
  const DirectReduction direct(context);
  if (direct.is_possible()) {
    co_await direct.run(context);
    co_return;
  }
  TwoShot work(context);
  co_await work.run(true);
}

}  // namespace

const Algorithm kAllReduceTwoShot{"two_shot", Collective::kAllReduce, publish, run, true};

}  // namespace pycoll
