// Every rank sends all of its data to every rank, and adds up all that it gets: one trip, (n - 1) S bytes sent and received.
//
// The data is cut into blocks of the wire (wire.cuh: units of 16 bytes, or what shares a scale); a block belongs to the same threads
// from its sending to its result, so others need not wait. A rank
//
//   1. sends its header (fingerprint, factor of PREMUL_SUM) and its blocks to each peer, as LL packets;
//   2. waits for the header of each peer and compares fingerprints; only if all are alike does it go on;
//   3. adds the ranks' blocks in rank order, its own among them, and writes each result, which may be where the input was.
//
// A result goes through the wire's type, though it goes nowhere: one-shot and two-shot have the same bits.
//
// The header is sent even when there is no data, and waited for by every block, because the reuse of packets rests on it (ll.cuh).
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ll.cuh"
#include "kernels/cuda/meeting.cuh"
#include "kernels/cuda/signals.cuh"
#include "kernels/cuda/thread_group.cuh"
#include "kernels/cuda/wire.cuh"
#include "topology/ring.h"

namespace pycoll::cuda {

template <class Wire>
struct AllReduceOneShotKernel {
  using Args = AllReduceOneShotArgs;
  static constexpr int kMaxThreads = Wire::kPacketThreads;
  // Peers whose packets are asked for at once, so that their latencies overlap.
  static constexpr int kBatch = Wire::kPacketBatch;
  static constexpr int kFingerprintHeader = 0;
  static constexpr int kFactorHeader = 1;

  static PYCOLL_DEVICE void run(const Args& args) {
    PYCOLL_SHARED(double, factors, kMaxRanks);
    const BlockGroup block;
    const uint32_t epoch = next_epoch(args.group.epochs);
    if (!block.all(!aborted(args.group.watch))) return;
    const Wire wire(args.wire, args.capacity_units, args.lead_bytes);
    send(args, wire, block, epoch);
    if (!block.all(receive_headers(args, block, epoch, factors))) return;
    if (reduce(args, wire, block, epoch, factors)) end_epoch(block, args.group.epochs, epoch);
  }

 private:
  using Position = typename Wire::Position;
  using Packets = typename Wire::Packets;

  static PYCOLL_DEVICE bool is_peer(const Args& args, int rank) {
    return cuda::is_peer(args.group, args.mailboxes, rank);
  }

  static PYCOLL_DEVICE ll::Stripe stripe(const Args& args, int src, int dst, uint32_t epoch) {
    return {args.mailboxes.of_rank[dst], src, args.group.world_size, args.capacity_units, epoch};
  }

  // Each rank begins with another peer, so that they do not all write to the same one.
  template <class Fn>
  static PYCOLL_DEVICE void for_each_peer(const Args& args, Fn fn) {
    for (int dst = ring::next(args.group.rank, args.group.world_size); dst != args.group.rank;
         dst = ring::next(dst, args.group.world_size)) {
      if (is_peer(args, dst)) fn(dst);
    }
  }

  static PYCOLL_DEVICE void send(const Args& args, const Wire& wire, const BlockGroup& block,
                                 uint32_t epoch) {
    if (block_index() == 0) send_headers(args, block, epoch);
    const Share share = share_of_grid(block);
    const auto input = wire.source(args.input, 0, args.numel);
    const size_t num_blocks = wire.num_blocks(0, args.numel);
    wire.for_each(share, num_blocks, [&](const Position& at) {
      const auto item = wire.load(input, 0, at);
      for_each_peer(
          args, [&](int dst) { wire.send(stripe(args, args.group.rank, dst, epoch), at, item); });
      return true;
    });
    if (!ll::must_sweep(epoch)) return;
    for (size_t unit = wire.units_in_packets(num_blocks) + share.first; unit < args.capacity_units;
         unit += share.stride) {
      for_each_peer(
          args, [&](int dst) { stripe(args, args.group.rank, dst, epoch).send(unit, Vector16{}); });
    }
  }

  static PYCOLL_DEVICE void send_headers(const Args& args, const BlockGroup& block,
                                         uint32_t epoch) {
    for (int dst = block.thread_rank(); dst < args.group.world_size; dst += block.num_threads()) {
      if (!is_peer(args, dst)) continue;
      const ll::Stripe to_peer = stripe(args, args.group.rank, dst, epoch);
      to_peer.send_header(kFingerprintHeader, args.group.fingerprint);
      to_peer.send_header(kFactorHeader, bits_from_double(args.reduction.factor));
    }
  }

  // Each thread takes some peers. False if one of them does not come, or calls something else.
  static PYCOLL_DEVICE bool receive_headers(const Args& args, const BlockGroup& block,
                                            uint32_t epoch, double* factors) {
    for (int src = block.thread_rank(); src < args.group.world_size; src += block.num_threads()) {
      factors[src] = args.reduction.factor;
      if (is_peer(args, src) && !receive_header(args, src, epoch, factors)) return false;
    }
    return true;
  }

  static PYCOLL_DEVICE bool receive_header(const Args& args, int src, uint32_t epoch,
                                           double* factors) {
    constexpr Phase kPhase = Phase::kOneShotHeader;
    const ll::Stripe from_peer = stripe(args, src, args.group.rank, epoch);
    BoundedSpin spin(args.group.watch, kPhase, epoch);
    for (;;) {
      const ll::Packet fingerprint = from_peer.look_at_header(kFingerprintHeader);
      const ll::Packet factor = from_peer.look_at_header(kFactorHeader);
      if (ll::has_arrived(fingerprint, epoch) && ll::has_arrived(factor, epoch)) {
        factors[src] = double_from_bits(ll::data_of(factor));
        if (ll::data_of(fingerprint) == args.group.fingerprint) return true;
        if (block_index() == 0) {  // as in meeting.cuh
          report_failure(args.group.watch, FailureKind::kMismatch, kPhase, src,
                         args.group.fingerprint, ll::data_of(fingerprint));
        }
        return false;
      }
      if (!spin.again(src, ll::late_flag(fingerprint, epoch))) return false;
    }
  }

  static PYCOLL_DEVICE bool reduce(const Args& args, const Wire& wire, const BlockGroup& block,
                                   uint32_t epoch, const double* factors) {
    const auto input = wire.source(args.input, 0, args.numel);
    const auto output = wire.target(args.output, 0, args.numel);
    return wire.for_each(share_of_grid(block), wire.num_blocks(0, args.numel),
                         [&](const Position& at) {
                           RankOrderSum<Wire> sum(args.reduction, factors);
                           if (!add_all(args, wire, epoch, at, wire.load(input, 0, at), sum))
                             return false;
                           wire.store(output, 0, at, wire.narrow(sum.result(), at));
                           return true;
                         });
  }

  static PYCOLL_DEVICE bool add_all(const Args& args, const Wire& wire, uint32_t epoch,
                                    const Position& at, const typename Wire::Item& own,
                                    RankOrderSum<Wire>& sum) {
    for (int begin = 0; begin < args.group.world_size; begin += kBatch) {
      Packets packets[kBatch];
      if (!wire.all(receive_batch(args, wire, epoch, at, begin, packets))) return false;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int src = begin + i;
        if (src != args.group.rank && !is_peer(args, src)) continue;
        sum.add(src, wire.widen(src == args.group.rank ? own : wire.item(packets[i])));
      }
    }
    return true;
  }

  // The packets at a position from the peers `begin` to `begin + kBatch - 1`.
  static PYCOLL_DEVICE bool receive_batch(const Args& args, const Wire& wire, uint32_t epoch,
                                          const Position& at, int begin,
                                          Packets (&packets)[kBatch]) {
    BoundedSpin spin(args.group.watch, Phase::kOneShotData, epoch);
    bool is_missing[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) is_missing[i] = wire.has(at) && is_peer(args, begin + i);
    for (;;) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (is_missing[i])
          packets[i] = wire.look(stripe(args, begin + i, args.group.rank, epoch), at);
      }
      int late_peer = -1;
      uint32_t seen = 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        is_missing[i] = is_missing[i] && !packets[i].have_arrived(epoch);
        if (!is_missing[i]) continue;
        late_peer = begin + i;
        seen = packets[i].late_flag(epoch);
      }
      if (late_peer < 0) return true;
      if (!spin.again(late_peer, seen)) return false;
    }
  }
};

}  // namespace pycoll::cuda
