#include "collectives/peer_tensors.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/env.h"
#include "memory/process_memory.h"

namespace pycoll {
namespace {

// Between two looks at the state of the members.
constexpr size_t kBlockBytes = size_t{1} << 20;
// Below, a system call costs more than the copies it saves.
constexpr size_t kLeastReadvBytes = size_t{24} << 10;
// Of a reduction, which reads into a buffer and from there.
constexpr size_t kLeastReducedBytes = size_t{64} << 10;

}  // namespace

Announcement& Announcement::add(const ChunkView& view, size_t chunk) {
  const size_t itemsize = context_.request.itemsize();
  Span span{nullptr, view.numel(chunk) * itemsize};
  is_contiguous_ &= view.is_contiguous(chunk, itemsize, &span.data);
  spans_.push_back(span);
  return *this;
}

Announcement& Announcement::add_nothing() {
  spans_.push_back(Span{nullptr, 0});
  return *this;
}

MemoryPath Announcement::path() const {
  const Request& request = context_.request;
  const Facts& facts = context_.group.facts();
  const auto allows = [&](DirectAccess least) {
    return facts.direct_access >= static_cast<uint64_t>(least);
  };
  if (!is_contiguous_ || request.wire || !allows(DirectAccess::kMapped)) return MemoryPath::kStaged;
  const SharedHeap& heap = context_.group.endpoint().heap();
  const bool all_mapped = std::all_of(spans_.begin(), spans_.end(), [&](const Span& span) {
    return span.nbytes == 0 || heap.contains(span.data, span.nbytes);
  });
  if (all_mapped) return MemoryPath::kMapped;
  // The kernel's copies are slower than a program's. They pay where they save one; a reduce_scatter makes as many either way.
  const size_t least = reduces(request.collective) ? kLeastReducedBytes : kLeastReadvBytes;
  if (allows(DirectAccess::kReadv) && request.nbytes() >= least &&
      request.collective != Collective::kReduceScatter) {
    return MemoryPath::kReadv;
  }
  return MemoryPath::kStaged;
}

void Announcement::write(std::byte* area) const {
  const MemoryPath path = this->path();
  std::vector<uint64_t> words{static_cast<uint64_t>(path)};
  const SharedHeap& heap = context_.group.endpoint().heap();
  for (const Span& span : spans_) {
    uint64_t address = 0;
    if (span.nbytes > 0 && path == MemoryPath::kMapped) address = heap.offset_of(span.data);
    if (span.nbytes > 0 && path == MemoryPath::kReadv) {
      address = reinterpret_cast<uint64_t>(span.data);
    }
    words.push_back(address);
  }
  std::memcpy(area, words.data(), nbytes(spans_.size()));
}

void PeerTensors::read_announcement(const std::byte* area) {
  std::vector<uint64_t> words(1 + num_places_);
  words[0] = static_cast<uint64_t>(MemoryPath::kMapped);
  if (area != nullptr) std::memcpy(words.data(), area, Announcement::nbytes(num_places_));
  // What a peer wrote is not believed.
  const bool is_direct = words[0] == static_cast<uint64_t>(MemoryPath::kMapped) ||
                         words[0] == static_cast<uint64_t>(MemoryPath::kReadv);
  are_reachable_ &= is_direct;
  paths_.push_back(is_direct ? static_cast<MemoryPath>(words[0]) : MemoryPath::kStaged);
  addresses_.insert(addresses_.end(), words.begin() + 1, words.end());
}

void PeerTensors::note_path() {
  const bool any_readv =
      std::find(paths_.begin(), paths_.end(), MemoryPath::kReadv) != paths_.end();
  context_.event.memory_path = !are_reachable_ ? "staged" : any_readv ? "readv" : "mapped";
}

int PeerTensors::pid_of(int rank) const {
  const Member& member = context_.group.member(rank);
  return member.peer == nullptr || member.peer->liveness == nullptr ? getpid()
                                                                    : member.peer->liveness->pid();
}

std::byte* PeerTensors::address(int rank, size_t place, size_t offset, size_t nbytes) const {
  const uint64_t begin = announced(rank, place);
  if (path(rank) == MemoryPath::kReadv) return reinterpret_cast<std::byte*>(begin) + offset;
  if (rank == context_.rank()) return context_.group.endpoint().base() + begin + offset;
  const Segment& segment = *context_.group.member(rank).segment;
  if (begin > segment.reserved() || offset + nbytes > segment.reserved() - begin) {
    fail(ErrorKind::kSystem, "the tensor of rank ", rank, " lies outside its segment");
  }
  return segment.base() + begin + offset;
}

template <class Copy, class Transfer>
void PeerTensors::in_blocks(const Group::Touching& touching, int rank, size_t place, size_t offset,
                            size_t nbytes, const Copy& copy, const Transfer& transfer) const {
  for (size_t done = 0; done < nbytes; done += kBlockBytes) {
    const size_t here = std::min(kBlockBytes, nbytes - done);
    if (done > 0) touching.check();
    if (has_address(rank)) {
      copy(address(rank, place, offset + done, here), done, here);
      continue;
    }
    try {
      transfer(pid_of(rank), announced(rank, place) + offset + done, done, here);
    } catch (const Error& error) {
      context_.group.check_member(rank);
      fail(error.kind(), "the tensor of rank ", rank, ": ", error.what());
    }
  }
}

void PeerTensors::read(const Group::Touching& touching, int rank, size_t place, size_t offset,
                       void* dst, size_t nbytes) const {
  auto* to = static_cast<std::byte*>(dst);
  in_blocks(
      touching, rank, place, offset, nbytes,
      [&](const std::byte* from, size_t done, size_t here) {
        if (from != to + done) cpu::copy(to + done, from, here, past_cache_);
      },
      [&](int pid, uint64_t from, size_t done, size_t here) {
        read_process(pid, from, to + done, here);
      });
  if (rank != context_.rank()) context_.count_read(nbytes);
}

void PeerTensors::write(const Group::Touching& touching, int rank, size_t place, size_t offset,
                        const void* src, size_t nbytes) const {
  const auto* from = static_cast<const std::byte*>(src);
  in_blocks(
      touching, rank, place, offset, nbytes,
      [&](std::byte* to, size_t done, size_t here) {
        if (to != from + done) cpu::copy(to, from + done, here, past_cache_);
      },
      [&](int pid, uint64_t to, size_t done, size_t here) {
        write_process(pid, to, from + done, here);
      });
  if (rank != context_.rank()) context_.count_written(nbytes);
}

Task PeerTensors::finish(Context context) {
  context.group.post_round(Wake::kIfLast);
  const uint64_t last = context.group.rounds_posted();
  for (int r = 0; r < context.world_size(); ++r) {
    if (r != context.rank()) co_await context.reached(context.group.round(r, last));
  }
}

}  // namespace pycoll
