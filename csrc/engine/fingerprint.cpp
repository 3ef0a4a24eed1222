#include "engine/fingerprint.h"

#include <bit>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

namespace pycoll {
namespace {

enum class Status : uint8_t { kAccepted = 0, kRefused };

// The first word of a fingerprint, unpacked.
struct Call {
  Status status;
  Collective collective;
  ReduceOp op;
  DType dtype;
  int root;
  std::optional<cpu::WireFormat> wire;
};

constexpr int kWireDTypeBits = 5;
static_assert(kNumDTypes <= 1 << kWireDTypeBits && cpu::kTileNumel < 1 << (16 - kWireDTypeBits));

// In 16 bits; 0 if elements travel as they are stored (float64, number 0, is no wire type).
uint64_t pack(const std::optional<cpu::WireFormat>& wire) {
  return wire ? static_cast<uint64_t>(wire->dtype) | uint64_t{wire->block} << kWireDTypeBits : 0;
}

uint64_t pack(const Call& call) {
  return uint64_t{static_cast<uint8_t>(call.status)} |
         uint64_t{static_cast<uint8_t>(call.collective)} << 8 |
         uint64_t{static_cast<uint8_t>(call.op)} << 16 |
         uint64_t{static_cast<uint8_t>(call.dtype)} << 24 |
         uint64_t{static_cast<uint16_t>(call.root)} << 32 | pack(call.wire) << 48;
}

// What a peer wrote is not believed: a value out of range reads as the first one.
template <class E>
E enum_at(uint64_t word, int shift, int count) {
  const uint8_t value = static_cast<uint8_t>(word >> shift);
  return static_cast<E>(value < count ? value : 0);
}

Call unpack(uint64_t word) {
  Call call{enum_at<Status>(word, 0, 2),
            enum_at<Collective>(word, 8, kNumCollectives),
            enum_at<ReduceOp>(word, 16, kNumReduceOps),
            enum_at<DType>(word, 24, kNumDTypes),
            static_cast<uint16_t>(word >> 32),
            std::nullopt};
  if (const uint64_t wire = word >> 48) {
    const uint64_t dtype = wire & ((1 << kWireDTypeBits) - 1);
    call.wire = cpu::WireFormat{enum_at<DType>(dtype, 0, kNumDTypes), wire >> kWireDTypeBits};
  }
  return call;
}

std::string describe(const HandshakeLine& line, const char* tag) {
  const Call call = unpack(line.fingerprint[0]);
  const std::string tag_text(tag, strnlen(tag, GroupPage::kTagBytes));
  std::string text = name(call.collective);
  if (call.collective == Collective::kBarrier) {
    text += "()";
  } else {
    text += "(";
    if (call.collective != Collective::kAllToAll) text += concat(line.fingerprint[1], " x ");
    text += name(call.dtype);
    if (reduces(call.collective)) text += concat(", ", name(call.op));
    if (has_root(call.collective)) text += concat(", root ", call.root);
    if (call.wire) {
      text += concat(", sent as ", name(call.wire->dtype));
      if (call.wire->block > 0) text += concat(" in blocks of ", call.wire->block);
    }
    if (line.fingerprint[2] != 0 && tag_text.empty()) {
      char hash[32];
      std::snprintf(hash, sizeof(hash), ", layout %08x",
                    static_cast<unsigned>(line.fingerprint[2]));
      text += hash;
    }
    text += ")";
  }
  return tag_text.empty() ? text : concat(text, " at ", tag_text);
}

// FNV-1a; zero only for the empty text.
uint64_t hash_of(const std::string& text) {
  if (text.empty()) return 0;
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash | 1;
}

std::string refusal_text(HandshakeLine* line, size_t payload_bytes) {
  const auto* text = reinterpret_cast<const char*>(GroupPage::payload(line, payload_bytes));
  return std::string(text, strnlen(text, payload_bytes));
}

}  // namespace

void write_fingerprint(const Group& group, uint64_t sequence, const Request& request) {
  HandshakeLine* line = group.handshake_line(group.rank(), sequence);
  const bool has_op = reduces(request.collective);
  line->fingerprint[0] =
      pack(Call{Status::kAccepted, request.collective, has_op ? request.op : ReduceOp::kSum,
                request.dtype, has_root(request.collective) ? request.root : 0, request.wire});
  // The ranks of an all_to_all may send different numbers of elements, which it compares by itself.
  line->fingerprint[1] = request.collective == Collective::kAllToAll ? 0 : request.numel;
  line->fingerprint[2] = request.layout_hash ^ hash_of(request.tag);
  line->detail = std::bit_cast<uint64_t>(request.factor);
  char* tag = group.tag(group.rank(), sequence);
  if (!request.tag.empty() || tag[0] != '\0') {
    const size_t length = std::min(request.tag.size(), GroupPage::kTagBytes - 1);
    std::memcpy(tag, request.tag.data(), length);
    tag[length] = '\0';
  }
}

void write_refusal(HandshakeLine* line, size_t payload_bytes, const std::string& text) {
  line->fingerprint[0] =
      pack(Call{Status::kRefused, Collective::kBarrier, ReduceOp::kSum, DType::kUInt8, 0, {}});
  line->fingerprint[1] = line->fingerprint[2] = 0;
  auto* out = reinterpret_cast<char*>(GroupPage::payload(line, payload_bytes));
  const size_t length = std::min(text.size(), payload_bytes - 1);
  std::memcpy(out, text.data(), length);
  out[length] = '\0';
}

void compare_fingerprints(const Group& group, uint64_t sequence, const Request* request) {
  if (request == nullptr) return;
  const HandshakeLine& mine = *group.handshake_line(group.rank(), sequence);
  bool equal = true;
  for (int r = 0; r < group.world_size(); ++r) {
    equal &= std::memcmp(group.handshake_line(r, sequence)->fingerprint, mine.fingerprint,
                         sizeof(mine.fingerprint)) == 0;
  }
  if (equal) return;

  std::map<std::string, std::vector<int>> sides;
  std::string refusals;
  for (int r = 0; r < group.world_size(); ++r) {
    HandshakeLine* line = group.handshake_line(r, sequence);
    if (unpack(line->fingerprint[0]).status == Status::kRefused) {
      refusals += concat(" rank ", r, " refused its arguments (",
                         refusal_text(line, group.facts().payload_bytes), ");");
    } else {
      sides[describe(*line, group.tag(r, sequence))].push_back(r);
    }
  }
  std::string text =
      concat("operation ", sequence, " of this group differs between ranks:", refusals);
  for (const auto& [call, ranks] : sides) {
    text += concat(" ", list_ranks(ranks), " called ", call, ";");
  }
  fail(ErrorKind::kMismatch, text,
       " nothing was moved and the group stays usable. All ranks must make the same calls in the "
       "same order");
}

}  // namespace pycoll
