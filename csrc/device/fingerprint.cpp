#include "device/fingerprint.h"

#include "base/error.h"

namespace pycoll::device {
namespace {

constexpr int kHashBits = 44;

uint64_t mix(uint64_t hash, uint64_t number) {
  for (int i = 0; i < 8; ++i) hash = (hash ^ ((number >> (8 * i)) & 0xff)) * 0x100000001b3;
  return hash;
}

uint64_t mix(uint64_t hash, const std::string& text) {
  for (const char c : text) hash = mix(hash, static_cast<uint8_t>(c));
  return mix(hash, text.size());
}

uint64_t pack(int kind, DType dtype, ReduceOp op, int root, uint64_t hash) {
  // The upper bits of the hash count as well.
  const uint64_t folded = (hash ^ hash >> kHashBits) & ((uint64_t{1} << kHashBits) - 1);
  return static_cast<uint64_t>(kind + 1) << 60 | static_cast<uint64_t>(dtype) << 55 |
         static_cast<uint64_t>(op) << 51 | static_cast<uint64_t>(root) << kHashBits | folded;
}

constexpr uint64_t kHashBasis = 0xcbf29ce484222325;

}  // namespace

uint64_t fingerprint(const Request& request, const Choice& choice, uint64_t place) {
  uint64_t hash = mix(kHashBasis, request.layout_hash);
  // Of an all_to_all each pair compares what goes between the two.
  if (request.collective != Collective::kAllToAll) hash = mix(hash, request.numel);
  if (request.wire) {
    hash = mix(hash, 1 + static_cast<uint64_t>(request.wire->dtype));
    hash = mix(hash, request.wire->block);
  }
  hash = mix(hash, request.tag);
  hash = mix(hash, static_cast<uint64_t>(choice.algorithm));
  hash = mix(hash, static_cast<uint64_t>(choice.num_blocks));
  hash = mix(hash, place);
  const ReduceOp op = reduces(request.collective) ? request.op : ReduceOp::kSum;
  const int root = has_root(request.collective) ? request.root : 0;
  return pack(static_cast<int>(request.collective), request.dtype, op, root, hash);
}

uint64_t message_fingerprint(DType dtype, int tag) {
  return pack(kMessageKind, dtype, ReduceOp::kSum, 0,
              mix(kHashBasis, static_cast<uint64_t>(static_cast<uint32_t>(tag))));
}

uint64_t refusal_fingerprint() {
  return pack(kRefusalKind, DType::kUInt8, ReduceOp::kSum, 0, kHashBasis);
}

std::string describe_fingerprint(uint64_t fingerprint) {
  const int kind = static_cast<int>(fingerprint >> 60) - 1;
  const auto dtype = static_cast<DType>(fingerprint >> 55 & 31);
  if (kind == kRefusalKind) return "a call whose arguments it refused";
  if (kind == kMessageKind) return concat("a message of ", name(dtype));
  if (kind < 0 || kind > kMessageKind || static_cast<int>(dtype) >= kNumDTypes)
    return "an unknown operation";
  const auto collective = static_cast<Collective>(kind);
  if (collective == Collective::kBarrier) return name(collective);
  std::string text = concat(name(collective), " of ", name(dtype));
  if (reduces(collective)) {
    text += concat(", ", name(static_cast<ReduceOp>(fingerprint >> 51 & 15)));
  }
  if (has_root(collective)) text += concat(", root ", fingerprint >> kHashBits & 127);
  return text;
}

}  // namespace pycoll::device
