// reduce, one shot: every rank shows its tensor beside its signal, the root reduces them. For tensors that fit there.
#include "collectives/one_shot.h"

#include <vector>

#include "collectives/two_shot.h"

namespace pycoll {
namespace {

Task run(Context context) {
  if (!context.fits_payload(context.request.nbytes())) {
    TwoShot work(context);
    co_await work.run(context.rank() == context.request.root);
  } else if (context.rank() == context.request.root) {
    reduce_payloads(context);
  }
}

}  // namespace

const Algorithm kReduceOneShot{"one_shot", Collective::kReduce, publish_input, run};

}  // namespace pycoll
