#include "device/uploads.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace pycoll::device {
namespace {

constexpr size_t kLeastBytes = 4096;

}  // namespace

std::shared_ptr<std::byte> Uploads::upload(const void* data, size_t nbytes, const Stream& stream) {
  const bool is_captured = device_->capture_id(stream) != 0;
  std::shared_ptr<std::byte> on_device = device_->scratch(nbytes, stream);
  std::lock_guard<std::mutex> lock(mutex_);
  const Block block = take(nbytes, !is_captured);
  std::memcpy(block.data, data, nbytes);
  device_->copy(on_device.get(), block.data, nbytes, stream);
  if (is_captured) {
    const auto give_back = [returned = returned_, block](void*) {
      std::lock_guard<std::mutex> returned_lock(returned->mutex);
      returned->blocks.push_back(block);
    };
    device_->keep_in_graph(std::shared_ptr<void>(block.data, give_back), stream);
  } else {
    copying_[stream.id].emplace_back(block, device_->record(stream));
  }
  return on_device;
}

Uploads::Block Uploads::take(size_t nbytes, bool may_ask_events) {
  Block* found = find_free(nbytes);
  if (found == nullptr) {
    collect(may_ask_events);
    found = find_free(nbytes);
  }
  if (found == nullptr) {
    const size_t rounded = std::bit_ceil(std::max(nbytes, kLeastBytes));
    free_.push_back({device_->allocate_host(rounded), rounded});
    found = &free_.back();
  }
  const Block block = *found;
  *found = free_.back();
  free_.pop_back();
  return block;
}

// The smallest that is large enough, or null.
Uploads::Block* Uploads::find_free(size_t nbytes) {
  Block* best = nullptr;
  for (Block& block : free_) {
    if (block.nbytes >= nbytes && (best == nullptr || block.nbytes < best->nbytes)) best = &block;
  }
  return best;
}

// Copies of one stream pass in order, so the first that has not is enough to know.
void Uploads::collect(bool may_ask_events) {
  {
    std::lock_guard<std::mutex> lock(returned_->mutex);
    free_.insert(free_.end(), returned_->blocks.begin(), returned_->blocks.end());
    returned_->blocks.clear();
  }
  if (!may_ask_events) return;
  for (auto& [stream, copies] : copying_) {
    while (!copies.empty() && device_->has_passed(*copies.front().second)) {
      free_.push_back(copies.front().first);
      copies.pop_front();
    }
  }
}

}  // namespace pycoll::device
