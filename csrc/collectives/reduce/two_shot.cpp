// reduce, two shots: as all_reduce, but only the root takes the results. Every rank reduces 1 / n of the tensor, so the root is no
// bottleneck. Rank order, hence the bits of all_reduce.
#include "collectives/two_shot.h"

namespace pycoll {
namespace {

bool publish(const Context&) { return false; }

Task run(Context context) {
  TwoShot work(context);
  co_await work.run(context.rank() == context.request.root);
}

}  // namespace

const Algorithm kReduceTwoShot{"two_shot", Collective::kReduce, publish, run};

}  // namespace pycoll
