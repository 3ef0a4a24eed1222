#include "torch/runtime.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace pycoll::torch_adapter {
namespace {

constexpr std::chrono::milliseconds kExitPatience{1000};

std::atomic<Runtime*> g_pinned{nullptr};

struct Registry {
  std::mutex mutex;
  std::weak_ptr<Runtime> runtime;
  std::vector<std::weak_ptr<Communicator>> communicators;
  bool exit_handler_installed = false;
};

// Never destroyed: used by exit handlers.
Registry& registry() {
  static Registry* const instance = new Registry();
  return *instance;
}

std::vector<std::shared_ptr<Communicator>> living() {
  Registry& r = registry();
  std::vector<std::shared_ptr<Communicator>> found;
  std::lock_guard<std::mutex> lock(r.mutex);
  for (const auto& weak : r.communicators) {
    if (auto communicator = weak.lock()) found.push_back(std::move(communicator));
  }
  return found;
}

// Runs after Python is gone: only tells the peers that this process ends in good order.
void leave_all() {
  for (const auto& communicator : living()) communicator->leave();
}

}  // namespace

std::shared_ptr<Runtime> process_runtime(const Env& env) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  std::shared_ptr<Runtime> runtime = r.runtime.lock();
  if (runtime != nullptr && runtime->endpoint->forked()) {
    // The parent's. Its threads and locks do not exist here, so it is not destroyed either.
    new std::shared_ptr<Runtime>(std::move(runtime));
    runtime = nullptr;
  }
  if (runtime == nullptr) {
    runtime = Runtime::create(env);
    r.runtime = runtime;
  }
  return runtime;
}

Runtime* pinned_runtime() { return g_pinned.load(std::memory_order_acquire); }

Runtime* pin_runtime() {
  Runtime* pinned = pinned_runtime();
  if (pinned != nullptr && !pinned->endpoint->forked()) return pinned;
  auto* held = new std::shared_ptr<Runtime>(process_runtime(Env::read()));
  // Whoever comes second gets the same one, since it lives.
  g_pinned.store(held->get(), std::memory_order_release);
  return held->get();
}

void remember(const std::shared_ptr<Communicator>& communicator) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  std::erase_if(r.communicators, [](const auto& weak) { return weak.expired(); });
  r.communicators.push_back(communicator);
  if (!std::exchange(r.exit_handler_installed, true)) std::atexit(leave_all);
}

void prepare_for_exit() {
  const Deadline deadline = Deadline::after(kExitPatience);
  for (const auto& communicator : living()) communicator->prepare_for_exit(deadline);
}

}  // namespace pycoll::torch_adapter
