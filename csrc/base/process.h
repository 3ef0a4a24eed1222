// The identity of this process, and whether an object was made before a fork.
#pragma once

#include <array>
#include <cstdint>

namespace pycoll {

using Token = std::array<uint8_t, 16>;

// 16 random bytes from the kernel.
Token random_token();

// Equal for two callers only if they share an address space; a forked child has another one.
Token address_space_token();

// Counts the forks that lie between the first process and this one: an object that remembers another value
// belongs to the parent, and its threads and locks do not exist here.
uint32_t fork_epoch();

// For the library's own threads: signals belong to the program's.
void block_signals();

}  // namespace pycoll
