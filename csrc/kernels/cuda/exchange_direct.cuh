// Every rank sends something to every rank: all_to_all, all_gather, broadcast, by what is put into the arguments. One trip.
//
// As reduce_scatter_direct, with copies for additions. Only the two ranks of a pair know how much they send one another, so each
// pair counts iterations by the larger of its two pieces; both know it, and two slots suffice by the same argument.
#pragma once

#include "kernels/cuda/direct.cuh"
#include "kernels/cuda/edges.cuh"

namespace pycoll::cuda {

// `Part`: what all addresses and sizes of this rank are multiples of.
template <class Part>
struct ExchangeDirectKernel {
  using Args = ExchangeDirectArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    size_t most_bytes = 0;
    for (int rank = 0; rank < args.group.world_size; ++rank)
      if (bytes_with(args, rank) > most_bytes) most_bytes = bytes_with(args, rank);
    const auto iterate = [&](const DirectLanes& lanes, size_t j) {
      const int area = static_cast<int>(j % kDirectAreas);
      const auto done = static_cast<uint32_t>(j + 1);
      const auto is_active = [&](int rank) {
        return segments_of(args, bytes_with(args, rank)).has(j);
      };
      lanes.for_each_peer([&](int dst) { send(args, lanes, dst, j, area); });
      lanes.post(area, done, is_active);
      copy_own(args, lanes.block(), j);
      if (!lanes.wait(area, done, Phase::kDirectIn, is_active)) return false;
      lanes.for_each_peer([&](int src) { receive(args, lanes, src, j, area); });
      return true;
    };
    run_iterations<DirectLanes>(args, {1.0, args.send_bytes, args.receive_bytes}, nullptr,
                                segments_of(args, most_bytes), iterate);
  }

 private:
  using Source = Units<Part, const std::byte>;
  using Target = Units<Part, std::byte>;

  static PYCOLL_DEVICE BlockSegments segments_of(const Args& args, size_t nbytes) {
    return {ceil_div(nbytes, kUnitBytes), args.staging.slot_units};
  }
  // What decides how many iterations this rank goes through with another one.
  static PYCOLL_DEVICE size_t bytes_with(const Args& args, int rank) {
    const size_t sent = args.send_bytes[rank];
    const size_t received = args.receive_bytes[rank];
    return sent > received ? sent : received;
  }
  static PYCOLL_DEVICE Source source(const Args& args, int rank) {
    return {static_cast<const std::byte*>(args.send[rank]), args.send_bytes[rank], 0};
  }
  static PYCOLL_DEVICE Target target(const Args& args, int rank) {
    return {static_cast<std::byte*>(args.receive[rank]), args.receive_bytes[rank], 0};
  }

  static PYCOLL_DEVICE void send(const Args& args, const DirectLanes& lanes, int dst,
                                 size_t iteration, int area) {
    const Share share = share_of_thread(lanes.block());
    const Source from = source(args, dst);
    const Range segment = segments_of(args, args.send_bytes[dst]).segment(iteration);
    Vector16* const slot = lanes.slot(area, dst, args.group.rank);
    for (size_t i = share.first; i < segment.numel; i += share.stride)
      peer::store_plain(slot + i, from.load(segment.begin + i));
  }

  static PYCOLL_DEVICE void copy_own(const Args& args, const BlockGroup& block, size_t iteration) {
    const int self = args.group.rank;
    if (args.send[self] == args.receive[self]) return;
    const Source from = source(args, self);
    const Target to = target(args, self);
    const Range segment = segments_of(args, args.send_bytes[self]).segment(iteration);
    const Share share = share_of_thread(block);
    for (size_t i = share.first; i < segment.numel; i += share.stride)
      to.store(segment.begin + i, from.load(segment.begin + i));
  }

  static PYCOLL_DEVICE void receive(const Args& args, const DirectLanes& lanes, int src,
                                    size_t iteration, int area) {
    const Share share = share_of_thread(lanes.block());
    const Target to = target(args, src);
    const Range segment = segments_of(args, args.receive_bytes[src]).segment(iteration);
    const Vector16* const slot = lanes.slot(area, args.group.rank, src);
    for (size_t i = share.first; i < segment.numel; i += share.stride)
      to.store(segment.begin + i, peer::load_plain(slot + i));
  }
};

}  // namespace pycoll::cuda
