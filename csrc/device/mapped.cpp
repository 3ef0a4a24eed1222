#include "device/mapped.h"

#include <algorithm>

#include "topology/partition.h"

namespace pycoll::device {
namespace {

struct Span {
  std::byte* data = nullptr;
  size_t numel = 0;
};

// All chunks of a view as one run of elements; nothing if they are not one, or have several tensors.
Span whole(const ChunkView& view, size_t itemsize) {
  Span span;
  if (view.most_pieces() != 1) return span;
  for (size_t chunk = 0; chunk < view.num_chunks(); ++chunk) {
    const ChunkView::Piece piece = view.piece(chunk, 0);
    if (piece.numel == 0) continue;
    if (span.data == nullptr) span.data = piece.data;
    if (piece.data != span.data + span.numel * itemsize) return {};
    span.numel += piece.numel;
  }
  return span;
}

const ChunkView& seen_by_peers(const Request& request) {
  const bool is_output =
      request.collective == Collective::kAllGather ||
      (request.collective == Collective::kBroadcast && request.output.num_chunks() > 0);
  return is_output ? request.output : request.input;
}

bool has_kernel(const Request& request) {
  if (request.wire) return false;
  return request.collective == Collective::kAllReduce ||
         request.collective == Collective::kReduceScatter ||
         request.collective == Collective::kAllGather ||
         request.collective == Collective::kBroadcast;
}

cuda::PeerTable shifted(const cuda::PeerTable& table, int world_size, size_t nbytes) {
  cuda::PeerTable moved;
  for (int rank = 0; rank < world_size; ++rank)
    moved.of_rank[rank] = static_cast<std::byte*>(table.of_rank[rank]) + nbytes;
  return moved;
}

class MappedLaunch {
 public:
  MappedLaunch(const Place& place, const Request& request, const Choice& choice,
               const MappedTensor& tensor)
      : place_(place),
        request_(request),
        tensor_(tensor),
        space_(*place.workspace),
        launchers_(place.device->launchers()),
        config_{choice.num_blocks, space_.shape().sizes.threads_per_block},
        rank_(space_.shape().rank),
        world_size_(space_.shape().world_size) {}

  void run_mapped() const {
    if (reduces(request_.collective)) {
      reduce();
    } else {
      send();
    }
  }

  void run_multimem() const {
    const size_t item = request_.itemsize();
    const auto set = [&](auto* args) {
      args->group = space_.meeting_group(place_.fingerprint, place_.timeout_ns);
      args->multicast_data = tensor_.multicast;
      args->staging = space_.direct();
    };
    if (request_.collective == Collective::kAllReduce) {
      cuda::AllReduceMultimemArgs args;
      set(&args);
      args.numel = request_.numel;
      args.dtype = request_.dtype;
      return launchers_.all_reduce_multimem(args, config_, place_.stream.handle);
    }
    if (request_.collective == Collective::kReduceScatter) {
      cuda::ReduceScatterMultimemArgs args;
      set(&args);
      args.output = request_.output.piece(0, 0).data;
      args.chunk_numel = request_.numel;
      args.dtype = request_.dtype;
      return launchers_.reduce_scatter_multimem(args, config_, place_.stream.handle);
    }
    cuda::AllGatherMultimemArgs args;
    set(&args);
    args.input = request_.input.piece(0, 0).data;
    args.chunk_bytes = request_.numel * item;
    launchers_.all_gather_multimem(args, config_, place_.stream.handle);
  }

 private:
  size_t self() const { return static_cast<size_t>(rank_); }

  // Of the view's chunks, where this rank's begins.
  Range own_chunk(const ChunkView& view) const {
    size_t begin = 0;
    for (size_t chunk = 0; chunk < self(); ++chunk) begin += view.numel(chunk);
    return {begin, view.numel(self())};
  }

  // all_reduce: whole units, so that no two ranks write to one.
  Range own_units() const {
    const size_t in_unit = cuda::kUnitBytes / request_.itemsize();
    const Range units = part(ceil_div(request_.numel, in_unit), static_cast<size_t>(world_size_),
                             static_cast<size_t>(rank_));
    const size_t begin = std::min(units.begin * in_unit, request_.numel);
    const size_t end = std::min((units.begin + units.numel) * in_unit, request_.numel);
    return {begin, end - begin};
  }

  void reduce() const {
    cuda::ReduceMappedArgs args;
    args.group = space_.meeting_group(place_.fingerprint, place_.timeout_ns);
    args.input = tensor_.of_rank;
    args.reduction = {request_.dtype, request_.op, world_size_, request_.factor};
    args.staging = space_.direct();
    if (request_.collective == Collective::kAllReduce) {
      const Range own = own_units();
      args.begin = own.begin;
      args.numel = own.numel;
      args.output = shifted(tensor_.of_rank, world_size_, own.begin * request_.itemsize());
    } else {
      const Range own = own_chunk(request_.input);
      args.begin = own.begin;
      args.numel = own.numel;
      args.output.of_rank[rank_] = request_.output.piece(0, 0).data;
    }
    launchers_.reduce_mapped(args, config_, place_.stream.handle);
  }

  void send() const {
    cuda::SendMappedArgs args;
    args.group = space_.meeting_group(place_.fingerprint, place_.timeout_ns);
    args.staging = space_.direct();
    const bool is_gather = request_.collective == Collective::kAllGather;
    if (is_gather || rank_ == request_.root) {
      const ChunkView::Piece input = request_.input.piece(0, 0);
      const size_t begin = is_gather ? own_chunk(request_.output).begin : 0;
      args.input = input.data;
      args.nbytes = input.numel * request_.itemsize();
      args.output = shifted(tensor_.of_rank, world_size_, begin * request_.itemsize());
      if (args.output.of_rank[rank_] == input.data) args.output.of_rank[rank_] = nullptr;
    }
    launchers_.send_mapped(args, config_, place_.stream.handle);
  }

  const Place& place_;
  const Request& request_;
  const MappedTensor& tensor_;
  const Workspace& space_;
  const cuda::Launchers& launchers_;
  const cuda::LaunchConfig config_;
  const int rank_, world_size_;
};

}  // namespace

void Windows::add(PeerMemory memory, size_t nbytes, int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::byte* const base = memory.of_rank[static_cast<size_t>(rank)];
  windows_.push_back({std::move(memory), base, nbytes});
}

std::optional<MappedTensor> Windows::find(const std::byte* data, size_t nbytes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = windows_.size(); i-- > 0;) {
    const Window& window = windows_[i];
    if (data < window.base || data + nbytes > window.base + window.nbytes) continue;
    const auto offset = static_cast<size_t>(data - window.base);
    MappedTensor tensor;
    for (size_t rank = 0; rank < window.memory.of_rank.size(); ++rank)
      tensor.of_rank.of_rank[rank] = window.memory.of_rank[rank] + offset;
    if (window.memory.multicast != nullptr) tensor.multicast = window.memory.multicast + offset;
    tensor.place = uint64_t{i + 1} << 48 | offset;
    return tensor;
  }
  return std::nullopt;
}

std::optional<MappedTensor> find_mapped(const Request& request, const Windows& windows) {
  if (!has_kernel(request)) return std::nullopt;
  const Span span = whole(seen_by_peers(request), request.itemsize());
  if (span.numel == 0) return std::nullopt;
  return windows.find(span.data, span.numel * request.itemsize());
}

bool fits_multimem(const Request& request, const MappedTensor& tensor,
                   const cuda::Launchers& launchers, int world_size) {
  const bool is_equal =
      request.collective == Collective::kAllReduce ||
      seen_by_peers(request).total_numel() == request.numel * static_cast<size_t>(world_size);
  const bool is_added = !reduces(request.collective) ||
                        (request.op == ReduceOp::kSum &&
                         (request.dtype == DType::kFloat32 || request.dtype == DType::kFloat16 ||
                          request.dtype == DType::kBFloat16));
  const auto bits = reinterpret_cast<uintptr_t>(tensor.multicast) | request.nbytes() |
                    reinterpret_cast<uintptr_t>(request.input.piece(0, 0).data) |
                    reinterpret_cast<uintptr_t>(request.output.piece(0, 0).data);
  return tensor.multicast != nullptr && request.collective != Collective::kBroadcast && is_equal &&
         is_added && bits % cuda::kUnitBytes == 0 && launchers.has_multimem();
}

void launch_mapped(const Place& place, const Request& request, const Choice& choice,
                   const MappedTensor& tensor) {
  const MappedLaunch launch(place, request, choice, tensor);
  if (choice.algorithm == Algorithm::kMultimem) {
    launch.run_multimem();
  } else {
    launch.run_mapped();
  }
}

}  // namespace pycoll::device
