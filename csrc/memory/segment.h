// Memory that several processes map. docs/memory_model.md, "Segments".
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "bootstrap/unix_socket.h"

namespace pycoll {

// Maps `reserved` bytes of address space; only the first `committed()` of them have memory behind them.
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
  size_t committed() const { return committed_; }
  int fd() const { return fd_.get(); }

  // Puts zeroed memory behind the first `nbytes` bytes. Raises kSystem, naming needed bytes and remedy, and leaves
  // everything as it was, when the system has none. Only the owner's arena calls it, under its lock.
  void commit(size_t nbytes);
  // Whether bytes [offset, offset + nbytes), within `reserved`, have memory behind them; else an access would end the process.
  // What a kernel before 5.14 cannot tell is believed.
  bool is_backed(size_t offset, size_t nbytes) const;

 private:
  Segment(UniqueFd fd, std::byte* base, size_t reserved, size_t committed)
      : fd_(std::move(fd)), base_(base), reserved_(reserved), committed_(committed) {}

  UniqueFd fd_;
  std::byte* const base_;
  const size_t reserved_;
  size_t committed_;
};

}  // namespace pycoll
