// New groups out of an existing one: split, merge and shrink of torch's Backend.
#include <algorithm>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "torch/errors.h"
#include "torch/process_group.h"

namespace pycoll::torch_adapter {
namespace {

// What the new group inherits where torch says nothing.
c10::intrusive_ptr<PycollOptions> inherit(const PycollOptions& parent,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& given) {
  auto options = c10::make_intrusive<PycollOptions>(parent);
  options->global_ranks_in_group.clear();
  if (given == nullptr) return options;
  options->timeout = given->timeout;
  options->group_name = given->group_name;
  options->group_desc = given->group_desc;
  if (const auto* own = dynamic_cast<const PycollOptions*>(given.get())) {
    options->algorithm = own->algorithm;
    options->tuning = own->tuning;
    options->device_tuning = own->device_tuning;
  }
  return options;
}

// The ranks of the world that ranks `ranks` of this group are.
std::vector<uint64_t> global_ranks(const PycollOptions& options, const std::vector<int>& ranks) {
  std::vector<uint64_t> global;
  for (const int rank : ranks) {
    const size_t index = static_cast<size_t>(rank);
    global.push_back(index < options.global_ranks_in_group.size()
                         ? options.global_ranks_in_group[index]
                         : static_cast<uint64_t>(rank));
  }
  return global;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> ProcessGroupPycoll::subgroup(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& given) const {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  auto options = inherit(*options_, given);
  options->global_ranks_in_group = global_ranks(*options_, ranks);
  return c10::make_intrusive<ProcessGroupPycoll>(store, static_cast<int>(mine - ranks.begin()),
                                                 static_cast<int>(ranks.size()), std::move(options),
                                                 interpreter_);
}

// One group serves all device types. Making another from the same keys of the store would meet what the first has left there.
template <class Make>
c10::intrusive_ptr<c10d::Backend> ProcessGroupPycoll::once_for_all_devices(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks, const Make& make) {
  if (offspring_.store == store && offspring_.ranks == ranks) {
    if (auto backend = offspring_.backend.lock()) return backend;
  }
  auto backend = make();
  offspring_ = {store, ranks, c10::weak_intrusive_ptr<Backend>(backend)};
  return backend;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupPycoll::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& opts) {
  return once_for_all_devices(store, ranks, [&] { return subgroup(store, ranks, opts); });
}

// `store` is one that all ranks of the merged group reach; who they are, torch has settled.
c10::intrusive_ptr<c10d::Backend> ProcessGroupPycoll::merge(
    const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& opts,
    const int& rank, const int& size) {
  return once_for_all_devices(store, {rank, size}, [&]() -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<ProcessGroupPycoll>(store, rank, size, inherit(*options_, opts),
                                                   interpreter_);
  });
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupPycoll::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<Options>& opts) {
  std::vector<int> ranks;
  translated([&] {
    for (const int64_t rank : ranks_to_exclude) {
      PYCOLL_CHECK_ARG(rank >= 0 && rank < getSize(), "ranks_to_exclude contains ", rank,
                       ", which is not a rank of this group of ", getSize());
      PYCOLL_CHECK_ARG(rank != getRank(), "rank ", rank,
                       " excludes itself; only ranks that stay may shrink a group");
    }
    for (int rank = 0; rank < getSize(); ++rank) {
      const auto& out = ranks_to_exclude;
      if (std::find(out.begin(), out.end(), rank) == out.end()) ranks.push_back(rank);
    }
    constexpr int kAbortFlag = 1;  // SHRINK_ABORT
    if ((shrink_flags & kAbortFlag) != 0) {
      communicator_->abort(concat("rank ", getRank(), " shrinks the group"));
    }
  });
  // Each attempt meets at keys of its own; ranks that stay make the same attempts.
  const std::string prefix = concat("pycoll_shrink/", shrinks_++);
  return subgroup(c10::make_intrusive<c10d::PrefixStore>(prefix, store_), ranks, opts);
}

}  // namespace pycoll::torch_adapter
