// What ranks compare on a device before a collective writes anything: 64 bits that a kernel can compare and a host can read.
//
// | bits  | what                                                                             |
// |-------|----------------------------------------------------------------------------------|
// | 60-63 | collective, or one of the kinds below, plus 1: never zero, as numbers of bytes are |
// | 55-59 | dtype                                                                            |
// | 51-54 | op                                                                               |
// | 44-50 | root                                                                             |
// | 0-43  | a hash of sizes, layout, wire format, tag, algorithm, grid and symmetric place   |
#pragma once

#include <cstdint>
#include <string>

#include "collectives/request.h"
#include "device/selection.h"

namespace pycoll::device {

// Beside the collectives.
inline constexpr int kMessageKind = kNumCollectives;  // send and receive
inline constexpr int kRefusalKind =
    kNumCollectives + 1;  // a rank has refused the arguments of its call

// `place`: of a symmetric tensor; 0: none.
uint64_t fingerprint(const Request& request, const Choice& choice, uint64_t place);
uint64_t message_fingerprint(DType dtype, int tag);
// Of a rank that has refused the arguments of its call.
uint64_t refusal_fingerprint();

// "all_reduce of float32, SUM".
std::string describe_fingerprint(uint64_t fingerprint);

}  // namespace pycoll::device
