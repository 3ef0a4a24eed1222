#include "collectives/selector.h"

#include <algorithm>
#include <cstring>

namespace pycoll {
namespace {

struct Row {
  Collective collective;
  const Algorithm* algorithm;
  // The largest this rank's tensor may be; 0: as much as fits beside the handshake's signal; SIZE_MAX: any.
  size_t most_nbytes;
};

constexpr size_t kPayload = 0;

const std::vector<Row>& table() {
  static const std::vector<Row> kRows = {
      {Collective::kAllReduce, &kAllReduceOneShot, kPayload},
      {Collective::kAllReduce, &kAllReduceTwoShot, SIZE_MAX},
      {Collective::kAllGather, &kAllGatherDirect, SIZE_MAX},
      {Collective::kReduceScatter, &kReduceScatterDirect, SIZE_MAX},
      {Collective::kBroadcast, &kBroadcastDirect, SIZE_MAX},
      {Collective::kReduce, &kReduceOneShot, kPayload},
      {Collective::kReduce, &kReduceTwoShot, SIZE_MAX},
      {Collective::kGather, &kGatherDirect, SIZE_MAX},
      {Collective::kScatter, &kScatterDirect, SIZE_MAX},
      {Collective::kAllToAll, &kAllToAllDirect, SIZE_MAX},
      {Collective::kBarrier, &kBarrierDirect, SIZE_MAX},
  };
  return kRows;
}

}  // namespace

const std::vector<const Algorithm*>& algorithms() {
  static const std::vector<const Algorithm*> kAll = {
      &kAllReduceOneShot, &kAllReduceTwoShot,    &kAllReduceRing,     &kAllGatherDirect,
      &kAllGatherRing,    &kReduceScatterDirect, &kReduceScatterRing, &kBroadcastDirect,
      &kReduceOneShot,    &kReduceTwoShot,       &kGatherDirect,      &kScatterDirect,
      &kAllToAllDirect,   &kBarrierDirect,
  };
  return kAll;
}

std::vector<std::string> algorithm_names() {
  std::vector<std::string> names = {"auto"};
  for (const Algorithm* algorithm : algorithms()) {
    if (std::find(names.begin(), names.end(), algorithm->name) == names.end()) {
      names.push_back(algorithm->name);
    }
  }
  return names;
}

bool keeps_bracketing(const Algorithm& algorithm) {
  return &algorithm != &kAllReduceRing && &algorithm != &kReduceScatterRing;
}

const Algorithm& select(const Request& request, const Facts& facts) {
  const Collective collective = request.collective;
  const size_t nbytes = request.wire_nbytes(request.numel);
  if (facts.algorithm != "auto") {
    for (const Algorithm* algorithm : algorithms()) {
      if (algorithm->collective == collective && facts.algorithm == algorithm->name &&
          (algorithm->takes_wire_format || !request.wire))
        return *algorithm;
    }
  }
  for (const TunedRow& row : facts.tuned) {
    if (row.collective == collective && nbytes <= row.most_nbytes &&
        (row.algorithm->takes_wire_format || !request.wire))
      return *row.algorithm;
  }
  for (const Row& row : table()) {
    if (row.collective != collective) continue;
    if (nbytes <= (row.most_nbytes == kPayload ? facts.payload_bytes : row.most_nbytes))
      return *row.algorithm;
  }
  fail(ErrorKind::kSystem, "no algorithm for ", name(collective), "; please report this");
}

}  // namespace pycoll
