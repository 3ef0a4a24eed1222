// Tensors of other ranks, reached without staging. docs/memory_model.md, "Tensors that peers reach directly".
#pragma once

#include <vector>

#include "collectives/algorithm.h"
#include "kernels/cpu/copy.h"

namespace pycoll {

// How peers reach the tensors of one rank in one operation.
enum class MemoryPath : uint64_t { kStaged, kMapped, kReadv };

// What a rank shows of its tensors beside its signal: its path, then an address for each place. Which places there are (the input,
// chunk 3 of it, the output) is up to the collective, and the same on all ranks.
class Announcement {
 public:
  explicit Announcement(const Context& context) : context_(context) {}

  // The next place: a chunk of this rank's input or output.
  Announcement& add(const ChunkView& view, size_t chunk);
  // A place that this rank does not have.
  Announcement& add_nothing();
  // `area`: nbytes(places added) bytes beside this rank's signal.
  void write(std::byte* area) const;

  static size_t nbytes(size_t num_places) { return sizeof(uint64_t) * (1 + num_places); }
  // Where the announcement of `rank` lies if nothing else travels beside the signal.
  static std::byte* area(const Context& context, int rank, size_t num_places) {
    return GroupPage::payload(context.group.handshake_line(rank, context.sequence),
                              nbytes(num_places));
  }

 private:
  struct Span {
    std::byte* data;
    size_t nbytes;
  };
  MemoryPath path() const;

  const Context& context_;
  std::vector<Span> spans_;
  bool is_contiguous_ = true;
};

// Whether the tensors of all ranks together are larger than the cache, as far as one rank can tell.
inline bool goes_past_cache(const Context& context) {
  const Request& request = context.request;
  const size_t numel = request.input.total_numel() + request.output.total_numel();
  return cpu::exceeds_cache(numel * request.itemsize() * static_cast<size_t>(context.world_size()));
}

// The tensors of all ranks, as they have announced them; after the handshake.
class PeerTensors {
 public:
  // Notes in the event how the tensors are reached. `area_of(rank)` is where that rank's announcement lies; null: it has made none,
  // since nothing of it is to be reached.
  template <class AreaOf>
  PeerTensors(const Context& context, size_t num_places, const AreaOf& area_of)
      : context_(context), num_places_(num_places), past_cache_(goes_past_cache(context)) {
    for (int r = 0; r < context.world_size(); ++r) read_announcement(area_of(r));
    note_path();
  }
  PeerTensors(const Context& context, size_t num_places)
      : PeerTensors(context, num_places,
                    [&](int r) { return Announcement::area(context, r, num_places); }) {}

  // Whether no rank is staged. All ranks get the same answer. What follows needs it.
  bool are_reachable() const { return are_reachable_; }
  // Whether the tensors of `rank` have an address here: this rank's own, and those that are mapped.
  bool has_address(int rank) const {
    return rank == context_.rank() || path(rank) == MemoryPath::kMapped;
  }
  std::byte* address(int rank, size_t place, size_t offset, size_t nbytes) const;
  // Between this rank's memory and `nbytes` from byte `offset` of a place on, in blocks: raises when a member gives up meanwhile.
  void read(const Group::Touching& touching, int rank, size_t place, size_t offset, void* dst,
            size_t nbytes) const;
  void write(const Group::Touching& touching, int rank, size_t place, size_t offset,
             const void* src, size_t nbytes) const;

  // This rank accesses nothing more. Complete when no rank does.
  static Task finish(Context context);

 private:
  MemoryPath path(int rank) const { return paths_[static_cast<size_t>(rank)]; }
  uint64_t announced(int rank, size_t place) const {
    return addresses_[static_cast<size_t>(rank) * num_places_ + place];
  }
  void read_announcement(const std::byte* area);
  void note_path();
  int pid_of(int rank) const;
  template <class Copy, class Transfer>
  void in_blocks(const Group::Touching& touching, int rank, size_t place, size_t offset,
                 size_t nbytes, const Copy& copy, const Transfer& transfer) const;

  const Context& context_;
  const size_t num_places_;
  const bool past_cache_;
  bool are_reachable_ = true;
  std::vector<MemoryPath> paths_;
  std::vector<uint64_t> addresses_;
};

}  // namespace pycoll
