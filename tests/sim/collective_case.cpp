#include "collective_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "reference.h"
#include "sim_group.h"
#include "test_data.h"
#include "wire_reference.h"

namespace pycoll::sim {

const char* name(Kernel kernel) {
  constexpr const char* kNames[kNumKernels] = {
      "all_reduce_one_shot",   "all_reduce_two_shot", "all_reduce_ring",
      "reduce_scatter_direct", "reduce_scatter_ring", "all_gather_direct",
      "all_gather_ring",       "all_to_all_direct",   "broadcast_direct"};
  return kNames[static_cast<int>(kernel)];
}

std::string CollectiveCase::text() const {
  return std::string(name(kernel)) + (protocol == cuda::Protocol::kLL128 ? " LL128 " : " ") +
         pycoll::name(dtype) + " " + pycoll::name(op) + " ranks=" + std::to_string(world_size) +
         (wire.is_quantised() ? std::string(" as ") + pycoll::name(wire.dtype) + " in blocks of " +
                                    std::to_string(wire.block_numel)
                              : "") +
         " numel=" + std::to_string(numel) + " shift=" + std::to_string(shift) +
         (tells_lead ? " told" : "") + (in_place ? " in place" : "") +
         " blocks=" + std::to_string(num_blocks) + " threads=" + std::to_string(threads_per_block);
}

namespace {

using cuda::ChunkTable;

size_t at(int rank) { return static_cast<size_t>(rank); }

// What each rank has, must get, and gets. Ranks' buffers differ in alignment where that is free.
class CaseRun {
 public:
  CaseRun(const CollectiveCase& what, const Options& options)
      : what_(what),
        item_(itemsize(what.dtype)),
        group_({.world_size = what.world_size,
                .num_blocks = what.num_blocks,
                .threads_per_block = what.threads_per_block,
                .slot_units = what.slot_units,
                .capacity_units =
                    round_up(cuda::packet_units(what.numel, what.dtype, what.wire) + 2, 8),
                .protocol = what.protocol},
               options) {
    group_.set_epochs(what.first_epoch);
    cut_chunks();
  }

  std::string run(uint64_t* accesses) {
    for (int call = 0; call < what_.num_calls; ++call) prepare(call);
    const Report report = group_.simulation.run();
    if (accesses != nullptr) *accesses = report.accesses;
    if (!report.done()) return report.text;
    for (int call = 0; call < what_.num_calls; ++call) {
      for (int rank = 0; rank < what_.world_size; ++rank) {
        const std::string complaint = compare(calls_[at(call)], rank);
        if (!complaint.empty()) return "call " + std::to_string(call) + ", " + complaint;
      }
    }
    return check_epochs();
  }

 private:
  struct Call {
    std::vector<Bytes> inputs, expected;
    std::vector<std::unique_ptr<Tensor>> in, out;   // out is null when it is in
    std::vector<size_t> out_begin;                  // of the result within its tensor
    std::vector<std::vector<double>> exact, bound;  // on a quantised wire
  };

  int n() const { return what_.world_size; }

  // Uneven: rank r has numel - r, at least 0; the second one none.
  void cut_chunks() {
    size_t begin = 0;
    for (int rank = 0; rank < n(); ++rank) {
      const size_t less = at(rank) * 3;
      const size_t numel = rank == 1 && n() > 2 ? 0 : what_.numel > less ? what_.numel - less : 0;
      elements_.begin[rank] = begin;
      elements_.numel[rank] = numel;
      bytes_.begin[rank] = begin * item_;
      bytes_.numel[rank] = numel * item_;
      begin += numel;
    }
    total_ = begin;
  }
  // all_to_all: elements from src to dst.
  size_t piece(int src, int dst) const {
    return (what_.numel * (at(src) + 1) + at(dst) * 5) % (what_.numel + 1);
  }
  size_t piece_begin(int src, int dst, bool at_source) const {
    size_t begin = 0;
    for (int i = 0; i < (at_source ? dst : src); ++i)
      begin += at_source ? piece(src, i) : piece(i, dst);
    return begin;
  }

  size_t input_numel(int rank) const {
    switch (what_.kernel) {
      case Kernel::kReduceScatterDirect:
      case Kernel::kReduceScatterRing:
        return total_;
      case Kernel::kAllGatherDirect:
      case Kernel::kAllGatherRing:
        return elements_.numel[rank];
      case Kernel::kAllToAll:
        return piece_begin(rank, n(), true);
      default:
        return what_.numel;
    }
  }

  size_t lead() const {
    const size_t bytes = what_.shift * item_ % 16;
    return what_.tells_lead && bytes % item_ == 0 ? bytes : 0;
  }
  int divisor() const { return what_.op == ReduceOp::kAvg ? n() : 0; }
  static double factor(int rank) { return 0.5 + 0.37 * rank; }
  int root() const { return n() - 1; }

  // ---- on a quantised wire

  bool is_quantised() const { return what_.wire.is_quantised() && n() > 1; }

  WireValues arrived(const Bytes& input, size_t begin, size_t numel) const {
    WireValues values = wire_values(what_.dtype, input.data() + begin * item_, numel);
    values.pass(what_.wire);
    return values;
  }
  // The result of `rank`.
  WireValues quantised_result(const std::vector<Bytes>& inputs, int rank) const {
    if (what_.kernel == Kernel::kAllGatherDirect) {
      WireValues all;
      for (int src = 0; src < n(); ++src) {
        const WireValues one = arrived(inputs[at(src)], 0, elements_.numel[src]);
        all.x.insert(all.x.end(), one.x.begin(), one.x.end());
        all.exact.insert(all.exact.end(), one.exact.begin(), one.exact.end());
        all.bound.insert(all.bound.end(), one.bound.begin(), one.bound.end());
      }
      return all;
    }
    const size_t begin = scatters() ? elements_.begin[rank] : 0;
    const size_t numel = scatters() ? elements_.numel[rank] : what_.numel;
    std::vector<WireValues> terms;
    std::vector<double> factors;
    for (int src = 0; src < n(); ++src) {
      terms.push_back(arrived(inputs[at(src)], begin, numel));
      factors.push_back(factor(src));
    }
    WireValues sum = combine_on_wire(what_.op, divisor(), terms, factors);
    if (!scatters()) sum.pass(what_.wire);
    return sum;
  }
  void expect_quantised(Call& call, int rank) const {
    WireValues result = quantised_result(call.inputs, rank);
    Bytes bytes(result.x.size() * item_);
    for (size_t i = 0; i < result.x.size(); ++i)
      store_float(what_.dtype, bytes.data() + i * item_, result.x[i]);
    call.expected.push_back(bytes);
    call.exact.push_back(result.exact);
    call.bound.push_back(result.bound);
  }
  // Of SUM and AVG, and of what is only moved. The rounding to the data's type comes on top.
  std::string check_bound(const Call& call, int rank, const Bytes& got) const {
    if (what_.op != ReduceOp::kSum && what_.op != ReduceOp::kAvg) return "";
    const double own = what_.dtype == DType::kFloat32 ? 0 : 0x1p-8;
    for (size_t i = 0; i < call.exact[at(rank)].size(); ++i) {
      const auto y = static_cast<double>(load_float(what_.dtype, got.data() + i * item_));
      const double exact = call.exact[at(rank)][i];
      const double bound = call.bound[at(rank)][i] * (1 + own) + own * std::fabs(exact) + 0x1p-24;
      if (std::isfinite(y) && std::isfinite(exact) && std::fabs(y - exact) > bound)
        return "element " + std::to_string(i) + " is " + std::to_string(y) + ", exactly " +
               std::to_string(exact) + ", beyond the bound of " + std::to_string(bound);
    }
    return "";
  }

  // From all ranks' inputs, the result of `rank`.
  Bytes result(const std::vector<Bytes>& inputs, int rank) const {
    switch (what_.kernel) {
      case Kernel::kAllReduceOneShot:
      case Kernel::kAllReduceTwoShot:
        return reduced(inputs, 0, what_.numel, 0);
      case Kernel::kAllReduceRing: {
        Bytes all;
        const size_t per_unit = 16 / item_;
        for (int chunk = 0; chunk < n(); ++chunk) {
          const size_t head = lead() / item_;  // elements that unit 0 lacks
          const size_t num_units = what_.numel == 0 ? 0 : ceil_div(head + what_.numel, per_unit);
          const Range units = part(num_units, at(n()), at(chunk));
          const auto place = [&](size_t unit) {
            return std::min(what_.numel, std::max(head, unit * per_unit) - head);
          };
          const size_t begin = place(units.begin), end = place(units.begin + units.numel);
          const Bytes one = reduced(inputs, begin, end - begin, (chunk + 1) % n());
          all.insert(all.end(), one.begin(), one.end());
        }
        return all;
      }
      case Kernel::kReduceScatterDirect:
        return reduced(inputs, elements_.begin[rank], elements_.numel[rank], 0);
      case Kernel::kReduceScatterRing:
        return reduced(inputs, elements_.begin[rank], elements_.numel[rank], (rank + 1) % n());
      case Kernel::kAllGatherDirect:
      case Kernel::kAllGatherRing: {
        Bytes all;
        for (const Bytes& input : inputs) all.insert(all.end(), input.begin(), input.end());
        return all;
      }
      case Kernel::kAllToAll: {
        Bytes all;
        for (int src = 0; src < n(); ++src) {
          const auto begin =
              inputs[at(src)].begin() + static_cast<long>(piece_begin(src, rank, true) * item_);
          all.insert(all.end(), begin, begin + static_cast<long>(piece(src, rank) * item_));
        }
        return all;
      }
      case Kernel::kBroadcast:
        return inputs[at(root())];
    }
    return {};
  }

  // Elements begin to begin + numel of all ranks, added from rank `first` on.
  Bytes reduced(const std::vector<Bytes>& inputs, size_t begin, size_t numel, int first) const {
    std::vector<Bytes> parts;
    parts.reserve(at(n()));
    std::vector<Term> terms;
    for (int i = 0; i < n(); ++i) {
      const int rank = (first + i) % n();
      const auto from = inputs[at(rank)].begin() + static_cast<long>(begin * item_);
      parts.emplace_back(from, from + static_cast<long>(numel * item_));
      terms.push_back({&parts.back(), factor(rank)});
    }
    return reduce_plainly(what_.dtype, what_.op, divisor(), terms);
  }

  void prepare(int number) {
    Call& call = calls_.emplace_back();
    for (int rank = 0; rank < n(); ++rank)
      call.inputs.push_back(
          make_data(what_.dtype, input_numel(rank), rank, number,
                    what_.wire.is_quantised() ? Specials::kFew : Specials::kMany));
    for (int rank = 0; rank < n(); ++rank) {
      if (is_quantised()) {
        expect_quantised(call, rank);
      } else {
        call.expected.push_back(result(call.inputs, rank));
      }
      make_tensors(call, rank);
      launch(call, rank);
    }
  }

  bool is_in_place() const { return what_.in_place && what_.kernel != Kernel::kAllToAll; }
  bool gathers() const {
    return what_.kernel == Kernel::kAllGatherDirect || what_.kernel == Kernel::kAllGatherRing;
  }
  bool scatters() const {
    return what_.kernel == Kernel::kReduceScatterDirect ||
           what_.kernel == Kernel::kReduceScatterRing;
  }

  void make_tensors(Call& call, int rank) {
    const size_t shift = what_.shift * item_;
    const Bytes& input = call.inputs[at(rank)];
    const size_t out_bytes = call.expected[at(rank)].size();
    size_t out_begin = 0;
    if (is_in_place() && gathers()) {
      // The input is this rank's chunk of the output.
      call.in.push_back(std::make_unique<Tensor>(group_, out_bytes, shift));
      std::copy(input.begin(), input.end(), call.in.back()->data() + bytes_.begin[rank]);
      call.out.push_back(nullptr);
    } else {
      call.in.push_back(std::make_unique<Tensor>(group_, input.size(), shift));
      call.in.back()->assign(input);
      const size_t out_shift = (what_.shift + at(rank)) % 3 * item_;
      call.out.push_back(is_in_place() ? nullptr
                                       : std::make_unique<Tensor>(group_, out_bytes, out_shift));
      if (is_in_place() && scatters()) out_begin = bytes_.begin[rank];
    }
    call.out_begin.push_back(out_begin);
  }

  uint8_t* input_of(Call& call, int rank) {
    const size_t begin = is_in_place() && gathers() ? bytes_.begin[rank] : 0;
    return call.in[at(rank)]->data() + begin;
  }
  Tensor& output_tensor(Call& call, int rank) {
    return call.out[at(rank)] ? *call.out[at(rank)] : *call.in[at(rank)];
  }
  uint8_t* output_of(Call& call, int rank) {
    return output_tensor(call, rank).data() + call.out_begin[at(rank)];
  }

  template <class Args>
  void fill(Args& args, Call& call, int rank) {
    args.group = group_.group(rank, what_.kernel == Kernel::kAllReduceOneShot);
    args.input = input_of(call, rank);
    args.output = output_of(call, rank);
    if constexpr (requires { args.numel; }) args.numel = what_.numel;
    if constexpr (requires { args.reduction; })
      args.reduction = {what_.dtype, what_.op, divisor(), factor(rank)};
    if constexpr (requires { args.protocol; }) {
      args.protocol = what_.protocol;
      args.staging = group_.ring(rank);
    } else if constexpr (requires { args.staging; }) {
      args.staging = group_.direct();
    }
    if constexpr (requires { args.chunks; })
      args.chunks =
          requires { args.protocol; } && !requires { args.reduction; } ? bytes_ : elements_;
    if constexpr (requires { args.lead_bytes; }) args.lead_bytes = lead();
    if constexpr (requires { args.wire; }) args.wire = what_.wire;
    if constexpr (requires { args.dtype; }) args.dtype = what_.dtype;
  }

  template <class Args, class Launch>
  void launch_with(Launch launch, Call& call, int rank) {
    Args args;
    fill(args, call, rank);
    launch(args, group_.config(), group_.simulation.stream(rank));
  }

  void launch(Call& call, int rank) {
    void* const stream = group_.simulation.stream(rank);
    switch (what_.kernel) {
      case Kernel::kAllReduceOneShot: {
        cuda::AllReduceOneShotArgs args;
        fill(args, call, rank);
        args.mailboxes = group_.mailboxes();
        args.capacity_units = group_.sizes.capacity_units;
        return cuda::launch_all_reduce_one_shot(args, group_.config(), stream);
      }
      case Kernel::kAllReduceTwoShot:
        return launch_with<cuda::AllReduceTwoShotArgs>(cuda::launch_all_reduce_two_shot, call,
                                                       rank);
      case Kernel::kAllReduceRing:
        return launch_with<cuda::AllReduceRingArgs>(cuda::launch_all_reduce_ring, call, rank);
      case Kernel::kReduceScatterDirect:
        return launch_with<cuda::ReduceScatterDirectArgs>(cuda::launch_reduce_scatter_direct, call,
                                                          rank);
      case Kernel::kReduceScatterRing:
        return launch_with<cuda::ReduceScatterRingArgs>(cuda::launch_reduce_scatter_ring, call,
                                                        rank);
      case Kernel::kAllGatherRing:
        return launch_with<cuda::AllGatherRingArgs>(cuda::launch_all_gather_ring, call, rank);
      default:
        return launch_exchange(call, rank);
    }
  }

  void launch_exchange(Call& call, int rank) {
    if (what_.wire.is_quantised())
      return launch_with<cuda::AllGatherQuantisedArgs>(cuda::launch_all_gather_quantised, call,
                                                       rank);
    cuda::ExchangeDirectArgs args;
    args.group = group_.group(rank);
    args.staging = group_.direct();
    const uint8_t* const input = input_of(call, rank);
    uint8_t* const output = output_of(call, rank);
    if (what_.kernel == Kernel::kAllGatherDirect) {
      cuda::fill_all_gather(args, input, output, bytes_);
    } else if (what_.kernel == Kernel::kBroadcast) {
      cuda::fill_broadcast(args, input, output, what_.numel * item_, root());
    } else {
      for (int peer = 0; peer < n(); ++peer) {
        args.send[peer] = input + piece_begin(rank, peer, true) * item_;
        args.send_bytes[peer] = piece(rank, peer) * item_;
        args.receive[peer] = output + piece_begin(peer, rank, false) * item_;
        args.receive_bytes[peer] = piece(peer, rank) * item_;
      }
    }
    cuda::launch_exchange_direct(args, group_.config(), group_.simulation.stream(rank));
  }

  std::string compare(Call& call, int rank) {
    const std::string who = "rank " + std::to_string(rank) + ": ";
    const Bytes& expected = call.expected[at(rank)];
    const uint8_t* const output = output_of(call, rank);
    const Bytes got(output, output + expected.size());
    const long different = first_difference(what_.dtype, got, expected);
    if (different >= 0)
      return who + "element " + std::to_string(different) + " of " +
             std::to_string(expected.size() / item_) + " is wrong";
    if (is_quantised()) {
      const std::string complaint = check_bound(call, rank, got);
      if (!complaint.empty()) return who + complaint;
    }
    if (!call.in[at(rank)]->guards_are_intact() || !output_tensor(call, rank).guards_are_intact())
      return who + "wrote beside its buffers";
    if (call.out[at(rank)] && call.in[at(rank)]->copy() != call.inputs[at(rank)])
      return who + "its input has changed";
    return "";
  }

  std::string check_epochs() {
    const auto expected = what_.first_epoch + static_cast<uint32_t>(what_.num_calls);
    const bool of_one_shot = what_.kernel == Kernel::kAllReduceOneShot;
    for (int rank = 0; rank < n(); ++rank)
      for (int i = 0; i < cuda::kMaxBlocks; ++i)
        if (group_.epochs(rank, of_one_shot)[i] != expected) return "an epoch is wrong";
    return "";
  }

  const CollectiveCase what_;
  const size_t item_;
  SimGroup group_;
  ChunkTable elements_, bytes_;
  size_t total_ = 0;
  std::vector<Call> calls_;
};

}  // namespace

std::string run_case(const CollectiveCase& what, const Options& options, uint64_t* accesses) {
  const std::string complaint = CaseRun(what, options).run(accesses);
  return complaint.empty() ? "" : what.text() + ": " + complaint;
}

}  // namespace pycoll::sim
