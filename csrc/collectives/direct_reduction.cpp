#include "collectives/direct_reduction.h"

#include "collectives/reduction.h"

namespace pycoll {
namespace {

constexpr size_t kInput = 0, kOutput = 1;
constexpr size_t kLeastBlockBytes = size_t{16} << 10;
// Parts begin at multiples of so many elements, so that few cache lines have two writers.
constexpr size_t kUnit = 256;

Range part_of_tensor(const Context& context) {
  const size_t numel = context.request.numel;
  const Range units = part(ceil_div(numel, kUnit), static_cast<size_t>(context.world_size()),
                           static_cast<size_t>(context.rank()));
  const size_t begin = std::min(numel, units.begin * kUnit);
  return {begin, std::min(numel, (units.begin + units.numel) * kUnit) - begin};
}

}  // namespace

// Where contributions and results without an address here are kept meanwhile.
struct DirectReduction::Buffers {
  explicit Buffers(const Context& context, const PeerTensors& tensors) {
    const size_t n = static_cast<size_t>(context.world_size());
    block_bytes = std::max(kLeastBlockBytes, context.group.facts().staging_bytes / n);
    contributions.resize(n);
    for (int r = 0; r < context.world_size(); ++r) {
      if (!tensors.has_address(r)) contributions[static_cast<size_t>(r)].resize(block_bytes);
    }
    const bool all = context.request.collective == Collective::kAllReduce;
    for (int r = 0; r < context.world_size(); ++r) {
      if (!all && r != context.request.root) continue;
      (tensors.has_address(r) ? near : far).push_back(r);
    }
    if (near.empty()) result.resize(block_bytes);
  }

  size_t block_bytes;
  std::vector<std::vector<std::byte>> contributions;
  std::vector<std::byte> result;
  std::vector<int> near, far;  // the ranks that take the result: with an address here, and without
};

void DirectReduction::announce(const Context& context) {
  Announcement announcement(context);
  announcement.add(context.request.input, 0);
  if (context.request.output.num_chunks() > 0) {
    announcement.add(context.request.output, 0);
  } else {
    announcement.add_nothing();
  }
  announcement.write(Announcement::area(context, context.rank(), kPlaces));
}

void DirectReduction::reduce_block(const Context& context, const Group::Touching& touching,
                                   Range range, Buffers* buffers) const {
  const size_t itemsize = context.request.itemsize();
  const size_t offset = range.begin * itemsize;
  const size_t nbytes = range.numel * itemsize;
  std::vector<cpu::Operand> operands(static_cast<size_t>(context.world_size()));
  for (int r = 0; r < context.world_size(); ++r) {
    cpu::Operand& operand = operands[static_cast<size_t>(r)];
    operand.factor = context.factor(r);
    if (tensors_.has_address(r)) {
      operand.data = tensors_.address(r, kInput, offset, nbytes);
      if (r != context.rank()) context.count_read(nbytes);
    } else {
      std::byte* buffer = buffers->contributions[static_cast<size_t>(r)].data();
      tensors_.read(touching, r, kInput, offset, buffer, nbytes);
      operand.data = buffer;
    }
  }
  std::vector<void*> results;
  for (const int r : buffers->near) {
    results.push_back(tensors_.address(r, kOutput, offset, nbytes));
    if (r != context.rank()) context.count_written(nbytes);
  }
  if (results.empty()) results.push_back(buffers->result.data());
  cpu::ReduceArgs args = reduce_args(context.request, context.world_size());
  args.operands = operands.data();
  args.num_operands = context.world_size();
  args.numel = range.numel;
  args.dst = results[0];
  args.copies = results.data() + 1;
  args.num_copies = static_cast<int>(results.size()) - 1;
  cpu::reduce(args);
  for (const int r : buffers->far) {
    tensors_.write(touching, r, kOutput, offset, results[0], nbytes);
  }
}

Task DirectReduction::run(Context context) const {
  {
    const Group::Touching touching(context.group);
    Buffers buffers(context, tensors_);
    const Range mine = part_of_tensor(context);
    const size_t block_numel = buffers.block_bytes / context.request.itemsize();
    for (size_t done = 0; done < mine.numel; done += block_numel) {
      if (done > 0) touching.check();
      const Range block{mine.begin + done, std::min(block_numel, mine.numel - done)};
      reduce_block(context, touching, block, &buffers);
    }
  }
  co_await PeerTensors::finish(context);
}

}  // namespace pycoll
