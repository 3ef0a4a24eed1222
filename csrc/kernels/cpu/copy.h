// Copies of tensors, past the caches where it pays.
#pragma once

#include <cstddef>

namespace pycoll::cpu {

// Whether data of `nbytes` is pushed out of the last-level cache before it could be read again. Stores that go past the cache then save
// reading the lines that are overwritten.
bool exceeds_cache(size_t nbytes);

// As memcpy; `past_cache`: with such stores. Complete, for other threads too, when it returns.
void copy(void* dst, const void* src, size_t nbytes, bool past_cache);

}  // namespace pycoll::cpu
