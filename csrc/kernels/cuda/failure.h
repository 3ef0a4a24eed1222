// How a kernel that cannot go on says why.
#pragma once

#include <cstdint>

namespace pycoll::cuda {

// Where a kernel was when a wait failed.
enum class Phase : uint32_t {
  kNone,
  kMeeting,        // at the start of every kernel but one-shot
  kOneShotHeader,  // the same of all_reduce_one_shot
  kOneShotData,
  kDirectIn,      // data, or the parts of two-shot
  kDirectOut,     // results of two-shot
  kRingReceive,   // data from the previous rank
  kRingSend,      // a free slot of the next rank
  kMultimemDone,  // the others' results
};

inline constexpr const char* name(Phase phase) {
  switch (phase) {
    case Phase::kNone:
      return "none";
    case Phase::kMeeting:
      return "meeting";
    case Phase::kOneShotHeader:
      return "one-shot header";
    case Phase::kOneShotData:
      return "one-shot data";
    case Phase::kDirectIn:
      return "direct, in";
    case Phase::kDirectOut:
      return "direct, out";
    case Phase::kRingReceive:
      return "ring, receive";
    case Phase::kRingSend:
      return "ring, send";
    case Phase::kMultimemDone:
      return "multimem, done";
  }
  return "unknown";
}

enum class FailureKind : uint32_t {
  kNone,
  kDeadline,  // `peer` did not come in time: `expected` is the value waited for, `seen` the last one read
  kMismatch,  // `peer` called something else: its fingerprint, or the number of bytes it sends, is `seen`
};

// Written once, by the first thread that gives up; `kind` last (release), so that a host that polls it finds the rest. Zero at
// rest.
struct FailureRecord {
  uint32_t kind = 0;  // FailureKind
  uint32_t phase = 0;
  int32_t rank = 0;  // who waited
  int32_t peer = 0;
  uint64_t expected = 0;
  uint64_t seen = 0;
};

inline constexpr uint64_t kNoTimeout = UINT64_MAX;

// What bounds the waits of a kernel. When one of them expires, its thread writes the record and sets the abort word, and all
// threads of the grid return. Nothing is written to outputs after that, but some of it may have been written before.
struct Watch {
  int rank = 0;
  uint64_t timeout_ns = kNoTimeout;  // of each wait
  // In this rank's own memory; kernels that find it set return at once. Not zero: a wait has failed, or the host aborts.
  uint32_t* abort = nullptr;
  FailureRecord* record = nullptr;  // the host's memory, mapped
};

}  // namespace pycoll::cuda
