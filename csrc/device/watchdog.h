// One thread a process that looks after kernels which wait for other ranks: nobody on the host does while they run.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/device_group.h"

namespace pycoll::device {

class Watchdog {
 public:
  static constexpr std::chrono::milliseconds kInterval{20};

  ~Watchdog() { stop(); }

  // Starts the thread if need be. The group is forgotten when it has gone.
  void add(const std::shared_ptr<DeviceGroup>& group);
  // Ends the thread, for good.
  void stop();

 private:
  static void watch(DeviceGroup& group);
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::weak_ptr<DeviceGroup>> groups_;
  std::thread thread_;
  bool stopping_ = false;
};

}  // namespace pycoll::device
