#include "device/collectives.h"

#include <algorithm>

#include "base/error.h"

namespace pycoll::device {
namespace {

using Piece = ChunkView::Piece;

cuda::WireFormat wire_of(const Request& request) {
  if (!request.wire) return {};
  return {request.wire->dtype, request.wire->block};
}

// A view of chunks as one array, which kernels index: where they already are one, themselves; else a copy of them.
class Flat {
 public:
  Flat(const Place& place, const ChunkView& view, size_t index, size_t itemsize)
      : place_(place), itemsize_(itemsize) {
    size_t begin = 0;
    for (size_t chunk = 0; chunk < view.num_chunks(); ++chunk) {
      const Piece piece = view.piece(chunk, index);
      pieces_.push_back(piece);
      table.begin[chunk] = begin;
      table.numel[chunk] = piece.numel;
      begin += piece.numel;
    }
    for (size_t chunk = 0; chunk < pieces_.size(); ++chunk) {
      if (pieces_[chunk].numel == 0) continue;
      std::byte* const whole = pieces_[chunk].data - table.begin[chunk] * itemsize;
      if (data == nullptr) data = whole;
      is_one_ &= data == whole;
    }
    if (is_one_) return;
    scratch_ = place.device->scratch(begin * itemsize, place.stream);
    data = scratch_.get();
  }

  // Chunks into the array, and back.
  void pack() const {
    for_each([&](const Piece& piece, std::byte* at) {
      place_.device->copy(at, piece.data, piece.numel * itemsize_, place_.stream);
    });
  }
  void unpack() const {
    for_each([&](const Piece& piece, std::byte* at) {
      place_.device->copy(piece.data, at, piece.numel * itemsize_, place_.stream);
    });
  }
  // The table, in bytes.
  cuda::ChunkTable bytes() const {
    cuda::ChunkTable bytes = table;
    for (size_t chunk = 0; chunk < pieces_.size(); ++chunk) {
      bytes.begin[chunk] *= itemsize_;
      bytes.numel[chunk] *= itemsize_;
    }
    return bytes;
  }

  std::byte* data = nullptr;
  cuda::ChunkTable table;  // of elements

 private:
  template <class Fn>
  void for_each(Fn fn) const {
    if (is_one_) return;
    for (size_t chunk = 0; chunk < pieces_.size(); ++chunk) {
      if (pieces_[chunk].numel > 0) fn(pieces_[chunk], data + table.begin[chunk] * itemsize_);
    }
  }

  const Place& place_;
  const size_t itemsize_;
  std::vector<Piece> pieces_;
  bool is_one_ = true;
  std::shared_ptr<std::byte> scratch_;
};

// The launches for tensor `index` of a request.
class Launch {
 public:
  Launch(const Place& place, const Request& request, const Choice& choice, size_t index)
      : place_(place),
        request_(request),
        choice_(choice),
        index_(index),
        space_(*place.workspace),
        launchers_(place.device->launchers()) {}

  void run() {
    switch (request_.collective) {
      case Collective::kAllReduce:
        return all_reduce();
      case Collective::kReduceScatter:
        return reduce_scatter();
      case Collective::kReduce:
        return reduce();
      case Collective::kAllGather:
        return all_gather();
      case Collective::kBroadcast:
      case Collective::kGather:
      case Collective::kScatter:
      case Collective::kAllToAll:
        return exchange();
      case Collective::kBarrier:
        return launchers_.barrier({group()}, config(1), place_.stream.handle);
    }
  }

 private:
  int rank() const { return space_.shape().rank; }
  int world_size() const { return space_.shape().world_size; }
  size_t itemsize() const { return request_.itemsize(); }
  cuda::Group group() const { return space_.meeting_group(place_.fingerprint, place_.timeout_ns); }
  cuda::LaunchConfig config(int num_blocks) const {
    return {num_blocks, space_.shape().sizes.threads_per_block};
  }
  cuda::LaunchConfig config() const { return config(choice_.num_blocks); }
  cuda::Reduction reduction() const {
    return {request_.dtype, request_.op, world_size(), request_.factor};
  }
  bool is_ring() const {
    return choice_.algorithm == Algorithm::kRing || choice_.algorithm == Algorithm::kRingLL128;
  }
  cuda::Protocol protocol() const {
    return choice_.algorithm == Algorithm::kRing ? cuda::Protocol::kSimple : cuda::Protocol::kLL128;
  }
  template <class Args>
  void set_ring(Args* args) const {
    args->protocol = protocol();
    args->staging = space_.ring(args->protocol);
  }

  void all_reduce() {
    const Piece input = request_.input.piece(0, index_), output = request_.output.piece(0, index_);
    const auto set = [&](auto* args) {
      args->input = input.data;
      args->output = output.data;
      args->numel = input.numel;
      args->reduction = reduction();
    };
    if (choice_.algorithm == Algorithm::kOneShot) {
      cuda::AllReduceOneShotArgs args;
      set(&args);
      args.group = space_.one_shot_group(place_.fingerprint, place_.timeout_ns);
      args.wire = wire_of(request_);
      args.mailboxes = space_.mailboxes();
      args.capacity_units = space_.capacity_units();
      return launchers_.all_reduce_one_shot(args, config(), place_.stream.handle);
    }
    if (is_ring()) {
      cuda::AllReduceRingArgs args;
      set(&args);
      args.group = group();
      set_ring(&args);
      return launchers_.all_reduce_ring(args, config(), place_.stream.handle);
    }
    cuda::AllReduceTwoShotArgs args;
    set(&args);
    args.group = group();
    args.wire = wire_of(request_);
    args.staging = space_.direct();
    launchers_.all_reduce_two_shot(args, config(), place_.stream.handle);
  }

  void reduce_scatter() {
    const Flat input(place_, request_.input, index_, itemsize());
    input.pack();
    if (is_ring()) {
      cuda::ReduceScatterRingArgs args;
      set_ring(&args);
      return reduce_scatter(&args, input, launchers_.reduce_scatter_ring);
    }
    cuda::ReduceScatterDirectArgs args;
    args.wire = wire_of(request_);
    args.staging = space_.direct();
    reduce_scatter(&args, input, launchers_.reduce_scatter_direct);
  }
  template <class Args, class Launcher>
  void reduce_scatter(Args* args, const Flat& input, Launcher launcher) {
    args->group = group();
    args->input = input.data;
    args->output = request_.output.piece(0, index_).data;
    args->chunks = input.table;
    args->reduction = reduction();
    launcher(*args, config(), place_.stream.handle);
  }

  // As a reduce_scatter of which the root gets all.
  void reduce() {
    const Piece input = request_.input.piece(0, index_);
    cuda::ReduceScatterDirectArgs args;
    args.group = group();
    args.input = input.data;
    if (rank() == request_.root) args.output = request_.output.piece(0, index_).data;
    args.chunks.numel[request_.root] = input.numel;
    args.reduction = reduction();
    args.staging = space_.direct();
    launchers_.reduce_scatter_direct(args, config(), place_.stream.handle);
  }

  void all_gather() {
    const Piece input = request_.input.piece(0, index_);
    if (!request_.wire && !is_ring()) return exchange();
    const Flat output(place_, request_.output, index_, itemsize());
    if (is_ring()) {
      cuda::AllGatherRingArgs args;
      args.chunks = output.bytes();
      set_ring(&args);
      all_gather(&args, input, output, launchers_.all_gather_ring);
    } else {
      cuda::AllGatherQuantisedArgs args;
      args.chunks = output.table;
      args.dtype = request_.dtype;
      args.wire = wire_of(request_);
      args.staging = space_.direct();
      all_gather(&args, input, output, launchers_.all_gather_quantised);
    }
    output.unpack();
  }
  template <class Args, class Launcher>
  void all_gather(Args* args, const Piece& input, const Flat& output, Launcher launcher) {
    args->group = group();
    args->input = input.data;
    args->output = output.data;
    launcher(*args, config(), place_.stream.handle);
  }

  // ---- what only moves: this rank sends a piece to each rank, and gets one from each

  Piece sent_to(int dst) const {
    const bool is_root = rank() == request_.root;
    switch (request_.collective) {
      case Collective::kBroadcast:  // the root has it already
        return is_root && dst != rank() ? request_.input.piece(0, index_) : Piece{};
      case Collective::kGather:
        return dst == request_.root ? request_.input.piece(0, index_) : Piece{};
      case Collective::kScatter:
        return is_root ? request_.input.piece(static_cast<size_t>(dst), index_) : Piece{};
      case Collective::kAllToAll:
        return request_.input.piece(static_cast<size_t>(dst), index_);
      default:
        return request_.input.piece(0, index_);
    }
  }
  Piece received_from(int src) const {
    const bool is_root = rank() == request_.root;
    switch (request_.collective) {
      case Collective::kBroadcast:
        return !is_root && src == request_.root ? request_.output.piece(0, index_) : Piece{};
      case Collective::kGather:
        return is_root ? request_.output.piece(static_cast<size_t>(src), index_) : Piece{};
      case Collective::kScatter:
        return src == request_.root ? request_.output.piece(0, index_) : Piece{};
      default:
        return request_.output.piece(static_cast<size_t>(src), index_);
    }
  }

  void exchange() {
    cuda::ExchangeDirectArgs args;
    args.group = group();
    args.staging = space_.direct();
    for (int peer = 0; peer < world_size(); ++peer) {
      const Piece out = sent_to(peer), in = received_from(peer);
      args.send[peer] = out.data;
      args.send_bytes[peer] = out.numel * itemsize();
      args.receive[peer] = in.data;
      args.receive_bytes[peer] = in.numel * itemsize();
    }
    launchers_.exchange_direct(args, config(), place_.stream.handle);
  }

  const Place& place_;
  const Request& request_;
  const Choice& choice_;
  const size_t index_;
  const Workspace& space_;
  const cuda::Launchers& launchers_;
};

}  // namespace

void launch_collective(const Place& place, const Request& request, const Choice& choice) {
  const size_t tensors = std::max(request.input.most_pieces(), request.output.most_pieces());
  for (size_t index = 0; index < std::max<size_t>(tensors, 1); ++index) {
    Launch(place, request, choice, index).run();
  }
}

void launch_message(const Place& place, const Message& message) {
  const Workspace& space = *place.workspace;
  cuda::ExchangeDirectArgs args;
  args.group =
      space.message_group(message.peer, message.sends, place.fingerprint, place.timeout_ns);
  args.staging = space.message_staging(message.peer, message.sends);
  if (message.sends) {
    args.send[1] = message.data;
    args.send_bytes[1] = message.nbytes;
  } else {
    args.receive[0] = message.data;
    args.receive_bytes[0] = message.nbytes;
  }
  const cuda::LaunchConfig config{Workspace::kMessageBlocks, space.shape().sizes.threads_per_block};
  place.device->launchers().exchange_direct(args, config, place.stream.handle);
}

void launch_refusal(const Place& place, const Stream& other_stream) {
  const Workspace& space = *place.workspace;
  const cuda::LaunchConfig config{1, space.shape().sizes.threads_per_block};
  const cuda::Launchers& launchers = place.device->launchers();
  launchers.barrier({space.meeting_group(place.fingerprint, place.timeout_ns)}, config,
                    place.stream.handle);
  cuda::AllReduceOneShotArgs args;
  args.group = space.one_shot_group(place.fingerprint, place.timeout_ns);
  args.reduction.dtype = DType::kUInt8;
  args.mailboxes = space.mailboxes();
  args.capacity_units = space.capacity_units();
  launchers.all_reduce_one_shot(args, config, other_stream.handle);
}

void check_supported(const Request& request) {
  PYCOLL_CHECK_ARG(
      !request.wire || request.wire->block != 0, "wire_dtype is ",
      pycoll::name(request.wire ? request.wire->dtype : request.dtype),
      ", but on a GPU elements travel as they are, or as float8_e4m3fn, float8_e5m2 or int8; "
      "choose one of these, or convert the tensor");
  if (request.wire) {
    const size_t block = request.wire->block;
    PYCOLL_CHECK_ARG(block >= 32 && block <= 512 && (block & (block - 1)) == 0, "block is ", block,
                     " elements; GPUs take a power of two from 32 to 512");
  }
  const bool is_foreign =
      request.dtype == DType::kFloat8E4M3FNUZ || request.dtype == DType::kFloat8E5M2FNUZ;
  PYCOLL_CHECK_ARG(!reduces(request.collective) || !is_foreign, "the tensor is ",
                   pycoll::name(request.dtype), ", which no CUDA kernel reduces; convert it first");
}

}  // namespace pycoll::device
