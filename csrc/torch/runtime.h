// The one Runtime of this process, shared by its groups; and what happens to groups that are alive at exit.
#pragma once

#include <memory>

#include "engine/communicator.h"

namespace pycoll::torch_adapter {

// The Runtime of the groups that are alive, or a new one. A forked child gets one of its own.
std::shared_ptr<Runtime> process_runtime(const Env& env);

// The same, kept for good: tensors lie in its heap. For a forked child: one of its own.
Runtime* pin_runtime();
// What pin_runtime() gave last, by whatever process (see Endpoint::forked()), or null. Takes no lock.
Runtime* pinned_runtime();

// So that exit can find the communicator while it is alive.
void remember(const std::shared_ptr<Communicator>& communicator);

// At interpreter exit: gives what was issued and not waited for a second to complete, and ends the progress engine's thread.
// Groups stay usable on the calling thread.
void prepare_for_exit();

}  // namespace pycoll::torch_adapter
