#include "device/failure_text.h"

#include "base/error.h"
#include "device/fingerprint.h"

namespace pycoll::device {

std::string describe_failure(const cuda::FailureRecord& record, int self,
                             std::chrono::milliseconds timeout, const std::string& refusal) {
  const auto phase = static_cast<cuda::Phase>(record.phase);
  const int peer = record.rank < 0 ? -1 - record.rank : record.peer;
  std::string text = concat("pycoll: rank ", self, ", on its device: ");
  if (static_cast<cuda::FailureKind>(record.kind) == cuda::FailureKind::kDeadline) {
    return concat(text, "rank ", peer, " did not come within ", timeout.count(), " ms (",
                  cuda::name(phase), ", waited for ", record.expected, ", saw ", record.seen,
                  "). It may be late, have ended, or have called something that needs "
                  "another kernel; see its own error, or give the group a longer timeout");
  }
  if (record.expected == refusal_fingerprint()) {
    return concat(text, "an operation that other ranks went on with was refused here: ", refusal);
  }
  const bool is_bytes = record.expected >> 60 == 0 && record.seen >> 60 == 0;
  if (is_bytes) {
    return concat(text, "ranks disagree: rank ", peer, " sends ", record.seen, " bytes where rank ",
                  self, " expects ", record.expected, "; pass equal sizes or matching splits");
  }
  const std::string mine = describe_fingerprint(record.expected);
  const std::string theirs = describe_fingerprint(record.seen);
  return concat(text, "ranks disagree about an operation: rank ", self, " called ", mine, ", rank ",
                peer, " ", theirs,
                mine == theirs ? ", with other sizes, splits, wire format or tag, or "
                                 "with symmetric tensors at another place"
                               : "",
                "; all ranks have to make the same calls in the same order");
}

}  // namespace pycoll::device
