// The thread that drives operations nobody waits for. One for all groups of an endpoint, started when first needed.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/driver.h"
#include "memory/endpoint.h"

namespace pycoll {

class ProgressEngine {
 public:
  explicit ProgressEngine(std::shared_ptr<Endpoint> endpoint) : endpoint_(std::move(endpoint)) {}
  ~ProgressEngine() { stop(); }

  // `driver` has operations that somebody has to drive. Raises kSystem if the thread cannot be started.
  void activate(const std::shared_ptr<Driver>& driver);
  // Does not drive `driver` any more when this returns. Not from within the engine's own thread.
  void remove(const Driver* driver);
  // Ends the thread; a later activate() starts it again.
  void stop();

 private:
  void start_thread();
  void loop();

  const std::shared_ptr<Endpoint> endpoint_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Driver>> active_;
  const Driver* driving_ = nullptr;
  bool stopping_ = false;
  std::atomic<bool> news_{false};  // activate() or stop() was called
  std::thread thread_;
};

}  // namespace pycoll
