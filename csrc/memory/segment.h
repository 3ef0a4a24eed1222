// Memory that several processes map. docs/memory_model.md, "Segments".
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "bootstrap/unix_socket.h"

namespace pycoll {

// Maps `reserved` bytes of address space. Memory is behind the first `committed()` of them, which the arena hands out, and behind
// pieces between `ceiling()` and the end, which the shared heap hands out.
class Segment {
 public:
  // A new one, with no memory yet. Reserves less address space than asked for where a limit (ulimit -v) forces it.
  static std::shared_ptr<Segment> create(size_t reserved);
  // A peer's, from the descriptor that it passed. The peer grows it; all of `reserved` is mapped here at once.
  static std::shared_ptr<Segment> map_peer(const UniqueFd& fd, size_t reserved);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  std::byte* base() const { return base_; }
  size_t reserved() const { return reserved_; }
  size_t committed() const { return committed_.load(std::memory_order_acquire); }
  int fd() const { return fd_.get(); }

  // Puts zeroed memory behind the first `nbytes` bytes. Raises kSystem, naming needed bytes and remedy, and leaves
  // everything as it was, when the system has none. Only the owner's arena calls it, under its lock.
  void commit(size_t nbytes);
  // Lowers the ceiling by `nbytes` (whole pages), without memory, and returns it. Raises kSystem where it would meet what is
  // committed. Only the owner's heap calls it, under its lock.
  size_t lower_ceiling(size_t nbytes);
  size_t ceiling() const { return ceiling_.load(std::memory_order_acquire); }
  // Puts zeroed memory behind a range of whole pages above the ceiling, mapped here at once; raises kSystem, leaving
  // everything as it was. And takes it away again.
  void back(size_t offset, size_t nbytes);
  void give_back(size_t offset, size_t nbytes);

  // Whether bytes [offset, offset + nbytes), within `reserved`, have memory behind them; else an access would end the process.
  // What a kernel before 5.14 cannot tell is believed.
  bool is_backed(size_t offset, size_t nbytes) const;

 private:
  Segment(UniqueFd fd, std::byte* base, size_t reserved, size_t committed)
      : fd_(std::move(fd)),
        base_(base),
        reserved_(reserved),
        committed_(committed),
        ceiling_(reserved) {}
  void allocate_file(size_t offset, size_t nbytes, size_t have);

  UniqueFd fd_;
  std::byte* const base_;
  const size_t reserved_;
  std::atomic<size_t> committed_;
  std::atomic<size_t> ceiling_;
};

}  // namespace pycoll
