// How many cores this process may really use.
#pragma once

namespace pycoll {

// The smallest of: the affinity mask, and the CPU quota of the process's cgroup (version 1 or 2), rounded up. At least 1.
int usable_cores();

}  // namespace pycoll
