#include "device/watchdog.h"

#include "base/log.h"

namespace pycoll::device {

void Watchdog::add(const std::shared_ptr<DeviceGroup>& group) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return;
  groups_.push_back(group);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void Watchdog::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

void Watchdog::watch(DeviceGroup& group) {
  try {
    group.watch();
  } catch (const std::exception& error) {
    PYCOLL_LOG(LogLevel::kWarn, "a device's operations cannot be watched: ", error.what());
    try {
      // The others hear of it, and it is not watched again.
      group.abort(concat("a device is in trouble: ", error.what()));
    } catch (const std::exception&) {  // its kernels cannot be ended either
    }
  }
}

void Watchdog::run() {
  block_signals();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!wake_.wait_for(lock, kInterval, [this] { return stopping_; })) {
    std::erase_if(groups_, [](const auto& weak) { return weak.expired(); });
    const std::vector<std::weak_ptr<DeviceGroup>> groups = groups_;
    lock.unlock();
    for (const auto& weak : groups) {
      if (const auto group = weak.lock()) watch(*group);
    }
    lock.lock();
  }
}

}  // namespace pycoll::device
