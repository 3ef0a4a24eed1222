// The wire of codes of 8 bits under a common scale (docs/quantisation.md): an eighth to a half of the bytes. See wire.cuh for what a
// wire is.
//
// Sixteen elements are a thread's work, so block_numel / 16 neighbouring lanes share a block and a warp handles several at once; all its
// lanes go through the same positions, some of which hold nothing. A slot holds the codes of its blocks, then their scales; by
// packets a scale is a unit of its own, behind its block's codes.
//
// Every rank's elements are seen as they have travelled, one's own too: nobody has better numbers than the rest, so all ranks have the
// same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/block_scale.cuh"
#include "kernels/cuda/float_io.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/wire.cuh"

namespace pycoll::cuda {

// Codes, as elements of a reduction: what they stand for is added up in float32.
template <class Code>
struct CodeElement {
  static constexpr DType kDType = DType::kFloat32;  // which operators there are
  using Storage = typename Code::Storage;
  using Accumulate = float;
  using Arithmetic = FloatArithmetic<float>;
  static PYCOLL_DEVICE float widen(Storage code) { return Code::widen(code); }
  static PYCOLL_DEVICE Storage narrow(float x) { return Code::narrow(x); }
};

template <class Data, class Code>
class QuantisedWire {
 public:
  using Element = CodeElement<Code>;
  using Sum = Accumulator<Element>;
  static constexpr int kRun = Sum::kNumel;
  struct Item {
    Vector16 codes;
    float scale;
  };
  struct Position {
    size_t block;  // of the segment
    int run;       // of 16 elements, in the block
    bool is_there;
  };
  struct Packets {
    ll::UnitPackets codes, scale;
    PYCOLL_DEVICE bool have_arrived(uint32_t flag) const {
      return codes.have_arrived(flag) && scale.have_arrived(flag);
    }
    PYCOLL_DEVICE uint32_t late_flag(uint32_t flag) const {
      return codes.have_arrived(flag) ? scale.late_flag(flag) : codes.late_flag(flag);
    }
  };
  struct Source {
    const std::byte* data;
    size_t numel;
  };
  struct Target {
    std::byte* data;
    size_t numel;
  };
  static constexpr int kPacketBatch = 2;
  static constexpr int kPacketThreads = 256;

  PYCOLL_DEVICE QuantisedWire(const WireFormat& format, size_t slot_units, size_t)
      : block_numel_(format.block_numel),
        lanes_(static_cast<int>(format.block_numel) / kRun),
        slot_blocks_(quantised_slot_blocks(slot_units, format.block_numel)) {}

  PYCOLL_DEVICE size_t num_blocks(size_t, size_t numel) const {
    return ceil_div(numel, block_numel_);
  }
  PYCOLL_DEVICE size_t blocks_in_slot() const { return slot_blocks_; }
  PYCOLL_DEVICE size_t units_in_packets(size_t num_blocks) const {
    return num_blocks * (static_cast<size_t>(lanes_) + 1);
  }

  template <class Fn>
  PYCOLL_DEVICE bool for_each(Share threads, size_t num_blocks, Fn fn) const {
    const auto lanes = static_cast<size_t>(lanes_);
    const int run = static_cast<int>(threads.first % lanes);
    // Whole warps go on until their first block is beyond the end.
    for (size_t first = threads.first / kWarpThreads * kWarpThreads; first < num_blocks * lanes;
         first += threads.stride) {
      const size_t block = (first + threads.first % kWarpThreads) / lanes;
      if (!fn(Position{block, run, block < num_blocks})) return false;
    }
    return true;
  }
  PYCOLL_DEVICE bool has(const Position& at) const { return at.is_there; }
  PYCOLL_DEVICE bool all(bool condition) const { return WarpGroup{}.all(condition); }

  PYCOLL_DEVICE Source source(const void* chunk, size_t, size_t numel) const {
    return {static_cast<const std::byte*>(chunk), numel};
  }
  PYCOLL_DEVICE Target target(void* chunk, size_t, size_t numel) const {
    return {static_cast<std::byte*>(chunk), numel};
  }
  static PYCOLL_DEVICE const void* at(const void* data, size_t index) {
    return element_at<Data>(data, index);
  }
  PYCOLL_DEVICE Item load(const Source& source, size_t begin, const Position& at) const {
    float x[kRun] = {};
    const size_t first = first_element(begin, at);
    load_run<Data>(source.data + first * kItem, available(at, first, source.numel), x);
    return encode(x);
  }
  PYCOLL_DEVICE void store(const Target& target, size_t begin, const Position& at,
                           const Item& item) const {
    store_sum(target, begin, at, widen(item));
  }
  PYCOLL_DEVICE void store_sum(const Target& target, size_t begin, const Position& at,
                               const Sum& sum) const {
    const size_t first = first_element(begin, at);
    store_run<Data>(target.data + first * kItem, available(at, first, target.numel), sum.element);
  }

  PYCOLL_DEVICE void put(Vector16* slot, const Position& at, const Item& item) const {
    if (!at.is_there) return;
    peer::store_plain(slot + unit(at), item.codes);
    if (at.run == 0) store_scale(scales(slot) + at.block, item.scale);
  }
  PYCOLL_DEVICE Item get(Vector16* slot, const Position& at) const {
    if (!at.is_there) return {};
    return {peer::load_plain(slot + unit(at)), load_scale(scales(slot) + at.block)};
  }
  PYCOLL_DEVICE void send(const ll::Stripe& stripe, const Position& at, const Item& item) const {
    if (!at.is_there) return;
    const size_t first = units_in_packets(at.block);
    stripe.send(first + static_cast<size_t>(at.run), item.codes);
    if (at.run == 0)
      stripe.send(first + static_cast<size_t>(lanes_), {{bits_from_float(item.scale), 0, 0, 0}});
  }
  PYCOLL_DEVICE Packets look(const ll::Stripe& stripe, const Position& at) const {
    const size_t first = units_in_packets(at.block);
    return {stripe.look(first + static_cast<size_t>(at.run)),
            stripe.look(first + static_cast<size_t>(lanes_))};
  }
  PYCOLL_DEVICE Item item(const Packets& packets) const {
    return {packets.codes.data(), float_from_bits(packets.scale.data().word[0])};
  }

  PYCOLL_DEVICE Sum widen(const Item& item) const {
    Sum sum = cuda::widen<Element>(item.codes);
#pragma unroll
    for (int i = 0; i < kRun; ++i) sum.element[i] = rounded_product(sum.element[i], item.scale);
    return sum;
  }
  PYCOLL_DEVICE Item narrow(const Sum& sum, const Position&) const { return encode(sum.element); }

 private:
  static constexpr size_t kItem = sizeof(typename Data::Storage);

  PYCOLL_DEVICE size_t first_element(size_t begin, const Position& at) const {
    return (begin + at.block) * block_numel_ + static_cast<size_t>(at.run * kRun);
  }
  static PYCOLL_DEVICE size_t available(const Position& at, size_t first, size_t numel) {
    return at.is_there && first < numel ? numel - first : 0;
  }
  PYCOLL_DEVICE size_t unit(const Position& at) const {
    return at.block * static_cast<size_t>(lanes_) + static_cast<size_t>(at.run);
  }
  PYCOLL_DEVICE float* scales(Vector16* slot) const {
    return reinterpret_cast<float*>(slot + slot_blocks_ * static_cast<size_t>(lanes_));
  }

  // With the scale of the block, for which its lanes look at one another's elements.
  PYCOLL_DEVICE Item encode(const float (&x)[kRun]) const {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const uint32_t bits = magnitude_bits(x[i]);
      if (bits > amax) amax = bits;
    }
    for (int lanes = lanes_ / 2; lanes > 0; lanes /= 2) {
      const uint32_t other = __shfl_xor_sync(kWholeWarp, amax, lanes);
      if (other > amax) amax = other;
    }
    Item item;
    item.scale = block_scale<Code>(amax);
    Sum quotients;
#pragma unroll
    for (int i = 0; i < kRun; ++i) quotients.element[i] = scaled_down(x[i], item.scale);
    item.codes = cuda::narrow<Element>(quotients);
    return item;
  }

  const size_t block_numel_;
  const int lanes_;  // that share a block
  const size_t slot_blocks_;
};

}  // namespace pycoll::cuda
