// reduce, two shots: as all_reduce, but only the root takes the results. Every rank reduces 1 / n of the tensor, so the root is no
// bottleneck. Rank order, hence the bits of all_reduce.
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
  co_await work.run(context.rank() == context.request.root);
}

}  // namespace

const Algorithm kReduceTwoShot{"two_shot", Collective::kReduce, publish, run};

}  // namespace pycoll
