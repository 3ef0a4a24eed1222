// barrier: the handshake that every collective begins with, and nothing else.
#include "collectives/algorithm.h"

namespace pycoll {
namespace {

void publish(const Context&) {}

Task run(Context) { co_return; }

}  // namespace

const Algorithm kBarrierDirect{"direct", Collective::kBarrier, publish, run};

}  // namespace pycoll
