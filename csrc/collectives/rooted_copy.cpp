#include "collectives/rooted_copy.h"

namespace pycoll {
namespace {

constexpr size_t kAtPeer = 0;
// What the root copies to all before it goes on, so that it reads from memory once.
constexpr size_t kBlockBytes = size_t{128} << 10;

bool has_chunks(const Context& context) {
  return context.request.collective != Collective::kBroadcast;
}

bool is_root(const Context& context) { return context.rank() == context.request.root; }

}  // namespace

size_t RootedCopy::num_places(const Context& context) {
  return 1 + (has_chunks(context) ? static_cast<size_t>(context.world_size()) : 1);
}

size_t RootedCopy::place_at_root(const Context& context, int rank) {
  return 1 + (has_chunks(context) ? static_cast<size_t>(rank) : 0);
}

void RootedCopy::announce(const Context& context) {
  const Request& request = context.request;
  const bool gathers = request.collective == Collective::kGather;
  Announcement announcement(context);
  if (is_root(context)) {
    announcement.add_nothing();
    const ChunkView& view = gathers ? request.output : request.input;
    for (size_t chunk = 0; chunk < view.num_chunks(); ++chunk) announcement.add(view, chunk);
  } else {
    announcement.add(gathers ? request.input : request.output, 0);
    for (size_t place = 1; place < num_places(context); ++place) announcement.add_nothing();
  }
  announcement.write(Announcement::area(context, context.rank(), num_places(context)));
}

// By the root or by `rank`, whichever this is: elements `range` of the tensor of `rank`.
void RootedCopy::copy(const Context& context, const Group::Touching& touching, int rank,
                      Range range) const {
  const size_t itemsize = context.request.itemsize();
  const size_t offset = range.begin * itemsize, nbytes = range.numel * itemsize;
  const bool at_root = is_root(context);
  const bool to_root = context.request.collective == Collective::kGather;
  const size_t root_place = place_at_root(context, rank);
  std::byte* mine =
      tensors_.address(context.rank(), at_root ? root_place : kAtPeer, offset, nbytes);
  const int other = at_root ? rank : context.request.root;
  const size_t other_place = at_root ? kAtPeer : root_place;
  if (at_root == to_root) {
    tensors_.read(touching, other, other_place, offset, mine, nbytes);
  } else {
    tensors_.write(touching, other, other_place, offset, mine, nbytes);
  }
}

Task RootedCopy::run(Context context) const {
  {
    const Group::Touching touching(context.group);
    const size_t numel = context.request.numel;
    const size_t of_root = numel / static_cast<size_t>(context.world_size());
    if (is_root(context)) {
      const size_t block_numel = kBlockBytes / context.request.itemsize();
      for (size_t begin = numel - of_root; begin < numel; begin += block_numel) {
        touching.check();
        for (int r = 0; r < context.world_size(); ++r) {
          if (r != context.rank()) {
            copy(context, touching, r, {begin, std::min(block_numel, numel - begin)});
          }
        }
      }
    } else {
      copy(context, touching, context.rank(), {0, numel - of_root});
    }
  }
  co_await PeerTensors::finish(context);
}

}  // namespace pycoll
