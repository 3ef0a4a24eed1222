#include "memory/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/process.h"
#include "topology/partition.h"

namespace pycoll {
namespace {

constexpr size_t kLeastReserved = size_t{16} << 20;

// Large blocks begin at multiples of it, in the file and in every mapping, so that one entry of a page table can hold it.
constexpr size_t kHugePage = size_t{2} << 20;
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

// Begins at a multiple of kHugePage. MAP_FAILED, with errno set, when there is no room.
void* map_shared(int fd, size_t nbytes) {
  void* room = mmap(nullptr, nbytes + kHugePage, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return MAP_FAILED;
  auto* const begin = static_cast<std::byte*>(room);
  const size_t before =
      round_up(reinterpret_cast<size_t>(begin), kHugePage) - reinterpret_cast<size_t>(begin);
  void* base = mmap(begin + before, nbytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
  const int code = errno;
  if (before > 0) munmap(begin, before);
  if (base == MAP_FAILED) {
    munmap(begin + before, nbytes + kHugePage - before);
  } else if (before < kHugePage) {
    munmap(begin + before + nbytes, kHugePage - before);
  }
  errno = code;
  return base;
}

}  // namespace

std::shared_ptr<Segment> Segment::create(size_t reserved) {
  UniqueFd fd(memfd_create("pycoll", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    fail(ErrorKind::kSystem, "cannot make shared memory (memfd_create): ", errno_text(errno),
         errno == EMFILE ? "; raise the limit of open files (ulimit -n)" : "");
  }
  // Peers rely on it: what is committed once never goes away under them.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    fail(ErrorKind::kSystem, "cannot seal shared memory: ", errno_text(errno));
  }
  void* base = map_shared(fd.get(), reserved);
  while (base == MAP_FAILED && reserved / 2 >= kLeastReserved) {
    reserved /= 2;
    base = map_shared(fd.get(), reserved);
  }
  if (base == MAP_FAILED) {
    fail(ErrorKind::kSystem, "cannot reserve ", reserved,
         " bytes of address space: ", errno_text(errno),
         "; raise the limit (ulimit -v) or lower PYCOLL_SEGMENT_BYTES");
  }
  // Where the system has huge pages for shared memory, tensors profit from them.
  madvise(base, reserved, MADV_HUGEPAGE);
  return std::shared_ptr<Segment>(
      new Segment(std::move(fd), static_cast<std::byte*>(base), reserved, 0));
}

std::shared_ptr<Segment> Segment::map_peer(const UniqueFd& fd, size_t reserved) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    fail(ErrorKind::kSystem, "a peer passed something that is not a sealed pycoll segment");
  }
  void* base = map_shared(fd.get(), reserved);
  if (base == MAP_FAILED) {
    fail(ErrorKind::kSystem, "cannot map ", reserved,
         " bytes of a peer's segment: ", errno_text(errno),
         "; raise the limit (ulimit -v) or lower PYCOLL_SEGMENT_BYTES on all ranks");
  }
  return std::shared_ptr<Segment>(
      new Segment(UniqueFd(), static_cast<std::byte*>(base), reserved, 0));
}

Segment::~Segment() { munmap(base_, reserved_); }

void Segment::allocate_file(size_t offset, size_t nbytes, size_t have) {
  int result;
  do {
    result = fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    fail(ErrorKind::kSystem, "cannot add ", nbytes, " bytes to the ", have,
         " bytes of shared memory of this process: ", errno_text(errno),
         errno == EFBIG ? "; raise the limit of file sizes (ulimit -f)"
                        : "; free memory or raise the memory limit of the container");
  }
}

// Arena and heap each have a lock of their own. Each publishes its mark before it looks at the other's, so that of two that
// would meet at least one gives way.
void Segment::commit(size_t nbytes) {
  const size_t before = committed();
  if (nbytes <= before) return;
  committed_.store(nbytes, std::memory_order_seq_cst);
  const size_t most = ceiling_.load(std::memory_order_seq_cst);
  try {
    if (nbytes > most) {
      fail(ErrorKind::kSystem, "needs ", nbytes, " bytes of shared memory, but only ", most,
           " are reserved", most < reserved_ ? " and not taken by tensors" : "",
           "; raise PYCOLL_SEGMENT_BYTES (or ulimit -v) on all ranks");
    }
    allocate_file(before, nbytes - before, before);
  } catch (...) {
    committed_.store(before, std::memory_order_seq_cst);
    throw;
  }
}

size_t Segment::lower_ceiling(size_t nbytes) {
  const size_t before = ceiling();
  if (nbytes <= before) {
    ceiling_.store(before - nbytes, std::memory_order_seq_cst);
    if (committed_.load(std::memory_order_seq_cst) <= before - nbytes) return before - nbytes;
    ceiling_.store(before, std::memory_order_seq_cst);
  }
  fail(ErrorKind::kSystem, "needs ", nbytes, " bytes of shared memory for a tensor, but of the ",
       reserved_, " that are reserved only ", before - committed(),
       " are left; raise PYCOLL_SEGMENT_BYTES (or ulimit -v) on all ranks");
}

void Segment::back(size_t offset, size_t nbytes) {
  const size_t have = committed() + (reserved_ - ceiling()) - nbytes;
  allocate_file(offset + nbytes - 1, 1, have);  // the file now reaches that far
  // Huge pages where the kernel has some, whatever its setting for shared memory is: a copy between large tensors is bound by what
  // the translation of addresses costs. Where it has none, nothing happens.
  const size_t begin = round_up(offset, kHugePage);
  const size_t end = (offset + nbytes) / kHugePage * kHugePage;
  // The kernel wants a page of each to be there.
  for (size_t at = begin; at < end; at += kHugePage) allocate_file(at, 1, have);
  if (begin < end) madvise(base_ + begin, end - begin, MADV_COLLAPSE);
  allocate_file(offset, nbytes, have);
  // One call instead of a fault a page. An older kernel faults.
  madvise(base_ + offset, nbytes, MADV_POPULATE_WRITE);
}

void Segment::give_back(size_t offset, size_t nbytes) {
  // Where the kernel refuses, the memory stays: it is only not returned.
  (void)fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(nbytes));
}

bool Segment::is_backed(size_t offset, size_t nbytes) const {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = offset / page * page;
  const size_t end = (offset + nbytes + page - 1) / page * page;
  int result;
  do {
    result = madvise(base_ + begin, end - begin, MADV_POPULATE_READ);
  } while (result != 0 && errno == EINTR);
  return result == 0 || errno == EINVAL;
}

}  // namespace pycoll
