// LL: packets that carry their own flags, for small messages (NCCL's "low latency" protocol).
//
// A packet has 16 bytes: two atoms of 4 bytes of data and 4 bytes of flag. The flag is the number of the operation, so a packet
// whose two flags are right holds that operation's data, and no fence or other signal is needed: one trip, half the bandwidth.
//
// Every rank has a mailbox: for each parity of the epoch, for each source, a stripe of packets: headers, then the two planes of
// the units' packets (unit u has packet u of each plane, so that the lanes of a warp write whole lines). Sources write into it,
// its owner reads.
//
// Why two parities suffice, without acknowledgement: a rank writes packets of epoch k + 2 over those of k in a kernel that comes
// after its kernel of k + 1, which ended only after it had read the header that each peer sent in k + 1; a peer sends that in its
// kernel of k + 1, which began after its kernel of k had ended and so had read all packets of k.
//
// Why an old packet is never taken for a new one: a flag comes again after 2^32 operations. Twice in every 2^30 operations, once
// for each parity, all packets of the stripes are written, wanted or not (must_sweep), so none carries a flag of a round before.
// The memory is zero at first and the first epoch is 1; epoch 0 comes after a sweep.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/peer_access.cuh"
#include "kernels/cuda/signals.cuh"

namespace pycoll::cuda::ll {

static_assert(sizeof(Vector16) == kPacketBytes && sizeof(Vector16) == kUnitBytes);

using Packet = Vector16;  // data, flag, data, flag

PYCOLL_DEVICE Packet make_packet(uint32_t low, uint32_t high, uint32_t flag) {
  return {{low, flag, high, flag}};
}
PYCOLL_DEVICE uint64_t data_of(const Packet& packet) {
  return packet.word[0] | uint64_t{packet.word[2]} << 32;
}
PYCOLL_DEVICE bool has_arrived(const Packet& packet, uint32_t flag) {
  return packet.word[1] == flag && packet.word[3] == flag;
}
// For reports: a flag that is not of this epoch, if there is one.
PYCOLL_DEVICE uint32_t late_flag(const Packet& packet, uint32_t flag) {
  return packet.word[1] != flag ? packet.word[1] : packet.word[3];
}

PYCOLL_HOST_DEVICE constexpr bool must_sweep(uint32_t epoch) {
  constexpr uint32_t kPeriod = 1u << 30;
  return epoch % kPeriod >= kPeriod - 2;
}

// The packets of a unit.
struct UnitPackets {
  Packet low, high;

  PYCOLL_DEVICE bool have_arrived(uint32_t flag) const {
    return has_arrived(low, flag) && has_arrived(high, flag);
  }
  PYCOLL_DEVICE uint32_t late_flag(uint32_t flag) const {
    return has_arrived(low, flag) ? ll::late_flag(high, flag) : ll::late_flag(low, flag);
  }
  PYCOLL_DEVICE Vector16 data() const {
    return {{low.word[0], low.word[2], high.word[0], high.word[2]}};
  }
};

// What one rank sends to another in one epoch.
class Stripe {
 public:
  PYCOLL_DEVICE Stripe(void* mailbox_of_dst, int src, int world_size, size_t capacity_units,
                       uint32_t epoch)
      : packets_(static_cast<Packet*>(mailbox_of_dst) +
                 (epoch % 2 * static_cast<size_t>(world_size) + static_cast<size_t>(src)) *
                     ll_stripe_packets(capacity_units)),
        capacity_units_(capacity_units),
        flag_(epoch) {}

  PYCOLL_DEVICE void send_header(int index, uint64_t value) const {
    const auto low = static_cast<uint32_t>(value);
    const auto high = static_cast<uint32_t>(value >> 32);
    peer::store_two_atoms(packets_ + index, make_packet(low, high, flag_));
  }
  PYCOLL_DEVICE void send(size_t unit, const Vector16& data) const {
    peer::store_two_atoms(low_half(unit), make_packet(data.word[0], data.word[1], flag_));
    peer::store_two_atoms(high_half(unit), make_packet(data.word[2], data.word[3], flag_));
  }

  // One look, which may find packets of an epoch before.
  PYCOLL_DEVICE Packet look_at_header(int index) const {
    return peer::load_two_atoms(packets_ + index);
  }
  PYCOLL_DEVICE UnitPackets look(size_t unit) const {
    return {peer::load_two_atoms(low_half(unit)), peer::load_two_atoms(high_half(unit))};
  }

 private:
  PYCOLL_DEVICE Packet* low_half(size_t unit) const { return packets_ + kHeaderPackets + unit; }
  PYCOLL_DEVICE Packet* high_half(size_t unit) const { return low_half(unit) + capacity_units_; }

  Packet* const packets_;
  const size_t capacity_units_;
  const uint32_t flag_;
};

}  // namespace pycoll::cuda::ll
