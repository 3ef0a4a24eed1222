// Rings: each rank receives from the previous one and sends to the next. 2 (n - 1) steps and 2 (n - 1) / n S bytes each way for
// all_reduce, half of both for reduce_scatter and all_gather.
//
// There is one chunk a rank, and topology/ring.h says which one a rank handles in which step. A chunk is cut into segments as large
// as a slot; a block takes its segments (segments.cuh) one after another, all steps of one before the next, and runs ahead of its
// neighbours by the slots of its lanes. A step may receive the segment from the previous rank, add the rank's own input to it
// (*reduce*) or take it as it is, write it to the output, and send it to the next rank.
//
// Partial results of floats travel in the accumulate type and are rounded once, by the rank that completes the chunk: n - 1 roundings
// instead would be what a ring in bfloat16 is known for. Integers and truth values travel as they are, since nothing is lost when they
// wrap on the way, but for averages, which need the exact sum. Lanes (ring_simple.cuh, ring_ll128.cuh) know how data gets from rank to
// rank, and nothing else.
//
// Every rank goes through all steps even where its segment is empty, so that the lanes' counters agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/edges.cuh"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/ring_ll128.cuh"
#include "kernels/cuda/ring_simple.cuh"
#include "kernels/cuda/segments.cuh"
#include "topology/ring.h"

namespace pycoll::cuda {

// Partial results, as they travel and as they are added up.
template <class Element>
struct RingReduction {
  // In the accumulate type; in the elements' own a unit is one vector.
  static constexpr int kVectors = static_cast<int>(sizeof(Accumulator<Element>) / kUnitBytes);
  static_assert(kVectors <= static_cast<int>(kMaxWireVectors));
  static constexpr DTypeClass kClass = info(Element::kDType).dtype_class;
  static constexpr bool kIsExact = kClass == DTypeClass::kInteger || kClass == DTypeClass::kBool;
  const Reduction& reduction;

  PYCOLL_DEVICE bool is_narrow() const { return kIsExact && reduction.op != ReduceOp::kAvg; }
  PYCOLL_DEVICE int num_vectors() const { return is_narrow() ? 1 : kVectors; }

  PYCOLL_DEVICE Accumulator<Element> own_term(const Vector16& input) const {
    Accumulator<Element> term = widen<Element>(input);
    if (reduction.op == ReduceOp::kPremulSum) scale(term, reduction.factor);
    return term;
  }
  PYCOLL_DEVICE Accumulator<Element> add(const Vector16 (&wire)[kVectors],
                                         const Accumulator<Element>& own) const {
    Accumulator<Element> sum;
    if (is_narrow()) {
      sum = widen<Element>(wire[0]);
    } else {
      std::memcpy(&sum, wire, sizeof(sum));
    }
    combine(reduction.op, sum, own);
    return sum;
  }
  PYCOLL_DEVICE void to_wire(const Accumulator<Element>& sum, Vector16 (&wire)[kVectors]) const {
    if (is_narrow()) {
      wire[0] = narrow<Element>(sum);
    } else {
      std::memcpy(wire, &sum, sizeof(sum));
    }
  }
  PYCOLL_DEVICE Vector16 complete(Accumulator<Element> sum) const {
    if (reduction.op == ReduceOp::kAvg) divide(sum, reduction.divisor);
    return narrow<Element>(sum);
  }
};

// What a rank does in the steps of a reduce-scatter, and in those of the all-gather that may follow. `Input` and `Output` are the
// units of the step's chunk.
template <class Element, class Lanes>
class RingSteps {
 public:
  PYCOLL_DEVICE RingSteps(Lanes& lanes, const Reduction& reduction)
      : lanes_(lanes), reduction_{reduction} {}

  // One step on the way to the sum of a chunk. `completes`: this rank is the last to add; the result goes to the output.
  template <class Input, class Output>
  PYCOLL_DEVICE bool reduce(const Input& input, const Output& output, Range segment, bool receives,
                            bool completes, bool sends) {
    if (!lanes_.begin_step(receives, sends)) return false;
    const bool goes_on = lanes_.for_each_unit(segment.numel, [&](const auto& position) {
      Vector16 wire[kVectors] = {};
      if (receives && !lanes_.receive(position, wire, reduction_.num_vectors())) return false;
      if (position.has_unit) {
        const size_t unit = segment.begin + position.unit;
        Accumulator<Element> sum = reduction_.own_term(input.load(unit));
        if (receives) sum = reduction_.add(wire, sum);
        if (completes) {
          wire[0] = reduction_.complete(sum);
          output.store(unit, wire[0]);
        } else {
          reduction_.to_wire(sum, wire);
        }
      }
      if (sends) lanes_.send(position, wire, completes ? 1 : reduction_.num_vectors());
      return true;
    });
    return lanes_.end_step(receives, sends, goes_on);
  }

 private:
  static constexpr int kVectors = RingReduction<Element>::kVectors;
  Lanes& lanes_;
  const RingReduction<Element> reduction_;
};

// A step that hands a finished chunk on: every rank writes it to its output.
template <class Lanes, class Output>
PYCOLL_DEVICE bool hand_on(Lanes& lanes, const Output& output, Range segment, bool sends) {
  if (!lanes.begin_step(true, sends)) return false;
  const bool goes_on = lanes.for_each_unit(segment.numel, [&](const auto& position) {
    Vector16 wire[1];
    if (!lanes.receive(position, wire, 1)) return false;
    if (position.has_unit) output.store(segment.begin + position.unit, wire[0]);
    if (sends) lanes.send(position, wire, 1);
    return true;
  });
  return lanes.end_step(true, sends, goes_on);
}

// The step that sends a rank's own chunk on its way around.
template <class Lanes, class Input, class Output>
PYCOLL_DEVICE bool send_own(Lanes& lanes, const Input& input, const Output& output, Range segment,
                            bool copies, bool sends) {
  if (!lanes.begin_step(false, sends)) return false;
  const bool goes_on = lanes.for_each_unit(segment.numel, [&](const auto& position) {
    Vector16 wire[1] = {};
    if (position.has_unit) {
      wire[0] = input.load(segment.begin + position.unit);
      if (copies) output.store(segment.begin + position.unit, wire[0]);
    }
    if (sends) lanes.send(position, wire, 1);
    return true;
  });
  return lanes.end_step(false, sends, goes_on);
}

}  // namespace pycoll::cuda
