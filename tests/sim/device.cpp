#include "device.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/error.h"

namespace pycoll::sim {
namespace {

class SimulatedEvent final : public device::Event {
 public:
  explicit SimulatedEvent(std::shared_ptr<EventState> state) : state(std::move(state)) {}
  const std::shared_ptr<EventState> state;
};

const std::shared_ptr<EventState>& state_of(const device::Event& event) {
  return static_cast<const SimulatedEvent&>(event).state;
}

[[noreturn]] void misuse(const std::string& what) {
  fail(ErrorKind::kSystem, "a simulated device was misused: ", what);
}

}  // namespace

SimulatedDevice::SimulatedDevice(uint64_t seed, int num_multiprocessors)
    : num_multiprocessors_(num_multiprocessors), random_(seed), seed_(seed) {
  const uint64_t parts[2] = {reinterpret_cast<uint64_t>(this), static_cast<uint64_t>(getpid())};
  std::memcpy(identity_.data(), parts, sizeof(identity_));
  new_stream();
}

SimulatedDevice::~SimulatedDevice() {
  for (const auto& [data, nbytes] : memory_) std::free(data);
}

// ---- memory

std::byte* SimulatedDevice::allocate(size_t nbytes) {
  std::lock_guard lock(mutex_);
  check_not_capturing("memory is made");
  return new_memory(nbytes);
}

std::byte* SimulatedDevice::new_memory(size_t nbytes) {
  std::lock_guard lock(mutex_);
  check_room(nbytes);
  auto* const data = static_cast<std::byte*>(std::aligned_alloc(256, (nbytes + 255) / 256 * 256));
  std::memset(data, 0, nbytes);
  memory_[data] = nbytes;
  return data;
}

void SimulatedDevice::release(std::byte* data) {
  std::lock_guard lock(mutex_);
  const auto it = memory_.find(data);
  if (it == memory_.end()) misuse("memory is given back that it has not");
  std::memset(data, 0xDD, it->second);
  std::free(data);
  memory_.erase(it);
}

void SimulatedDevice::limit_memory(size_t nbytes) { most_bytes_ = nbytes; }

void SimulatedDevice::check_room(size_t nbytes) const {
  if (nbytes > most_bytes_)
    fail(ErrorKind::kSystem, "a simulated device has no room for ", nbytes, " bytes");
}

void SimulatedDevice::clear(std::byte* data, size_t nbytes) { std::memset(data, 0, nbytes); }

void SimulatedDevice::set_word(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

std::shared_ptr<std::byte> SimulatedDevice::scratch(size_t nbytes, const device::Stream& stream) {
  check_room(nbytes);
  auto* const data = static_cast<std::byte*>(std::malloc(nbytes + 1));
  // Given back behind what is in the stream by then; a graph keeps it.
  return {data, [this, stream, nbytes](std::byte* p) {
            std::lock_guard lock(mutex_);
            if (queue(stream).capture != 0) return;
            run_on(stream, [p, nbytes] {
              std::memset(p, 0xDD, nbytes);
              std::free(p);
            });
          }};
}

// ---- streams

device::Stream SimulatedDevice::current_stream() {
  std::lock_guard lock(mutex_);
  return {current_, &queues_[static_cast<size_t>(current_)].inbox};
}

void SimulatedDevice::set_current_stream(int64_t id) {
  std::lock_guard lock(mutex_);
  current_ = id;
}

device::Stream SimulatedDevice::new_stream() {
  std::lock_guard lock(mutex_);
  Queue& queue = queues_.emplace_back();
  queue.id = static_cast<int64_t>(queues_.size()) - 1;
  return {queue.id, &queue.inbox};
}

uint64_t SimulatedDevice::capture_id(const device::Stream& stream) {
  std::lock_guard lock(mutex_);
  return queue(stream).capture;
}

void SimulatedDevice::take_launches(Queue& queue) {
  for (Launch& launch : queue.inbox.take()) {
    StreamItem item;
    item.launch = std::move(launch);
    if (queue.capture != 0) {
      graph_.items.push_back({queue.id, std::move(item)});
    } else {
      queue.items.push_back(std::move(item));
    }
  }
}

void SimulatedDevice::put(Queue& queue, StreamItem item) {
  take_launches(queue);
  if (queue.capture != 0) {
    graph_.items.push_back({queue.id, std::move(item)});
  } else {
    queue.items.push_back(std::move(item));
  }
}

std::shared_ptr<device::Event> SimulatedDevice::record(const device::Stream& stream) {
  std::lock_guard lock(mutex_);
  auto state = std::make_shared<EventState>();
  state->capture = queue(stream).capture;
  StreamItem item;
  item.record = state;
  put(queue(stream), std::move(item));
  return std::make_shared<SimulatedEvent>(std::move(state));
}

void SimulatedDevice::wait(const device::Stream& stream, const device::Event& event) {
  std::lock_guard lock(mutex_);
  Queue& waiting = queue(stream);
  const std::shared_ptr<EventState>& state = state_of(event);
  if (state->capture != waiting.capture) {
    const bool is_now = is_capturing_ && state->capture == captures_;
    if (waiting.capture != 0 || !is_now)
      misuse("a stream waits for an event of another capture, or from outside of its own");
    take_launches(waiting);
    waiting.capture = state->capture;  // it becomes part of the capture
  }
  StreamItem item;
  item.wait = state;
  put(waiting, std::move(item));
}

bool SimulatedDevice::has_passed(const device::Event& event) {
  const std::shared_ptr<EventState>& state = state_of(event);
  if (state->capture != 0) misuse("an event of a capture is asked whether it has passed");
  {
    std::lock_guard lock(mutex_);
    check_not_capturing("an event is asked whether it has passed");
  }
  return state->passed.load();
}

void SimulatedDevice::run_on(const device::Stream& stream, const std::function<void()>& fn) {
  std::lock_guard lock(mutex_);
  StreamItem item;
  item.call = fn;
  put(queue(stream), std::move(item));
}

void SimulatedDevice::copy(void* dst, const void* src, size_t nbytes,
                           const device::Stream& stream) {
  run_on(stream, [=] { std::memcpy(dst, src, nbytes); });
}

// ---- what is in the streams runs

void SimulatedDevice::synchronise(const device::Event& event, const std::function<void()>& poll) {
  const std::shared_ptr<EventState>& state = state_of(event);
  if (state->capture != 0) misuse("the host waits for an event of a capture");
  while (!state->passed.load()) {
    poll();
    std::unique_lock running(running_, std::try_to_lock);
    if (!running) {
      std::this_thread::yield();
    } else if (!step() && !state->passed.load()) {
      misuse("streams wait for events that nobody records");
    }
  }
}

void SimulatedDevice::synchronise_all() {
  std::lock_guard running(running_);
  {
    std::lock_guard lock(mutex_);
    check_not_capturing("the host synchronises");
  }
  while (step()) continue;
  std::lock_guard lock(mutex_);
  for (const Queue& queue : queues_) {
    if (!queue.items.empty()) misuse("streams wait for events that nobody records");
  }
}

void SimulatedDevice::run_a_little() {
  std::lock_guard running(running_);
  step();
}

// Events that can pass or be recorded, which do nothing else.
void SimulatedDevice::pass_events() {
  for (bool has_passed = true; has_passed;) {
    has_passed = false;
    for (Queue& queue : queues_) {
      while (!queue.items.empty()) {
        const StreamItem& first = queue.items.front();
        const bool can_pass = first.record || (first.wait && first.wait->passed.load());
        if (!can_pass) break;
        if (first.record) first.record->passed.store(true);
        queue.items.pop_front();
        has_passed = true;
      }
    }
  }
}

bool SimulatedDevice::step() {
  std::vector<Queue*> calls, kernels;
  std::function<void()> call;
  {
    std::lock_guard lock(mutex_);
    for (Queue& queue : queues_) {
      if (queue.capture == 0) take_launches(queue);
    }
    pass_events();
    for (Queue& queue : queues_) {
      if (queue.items.empty()) continue;
      const StreamItem& first = queue.items.front();
      if (first.launch) kernels.push_back(&queue);
      if (first.call) calls.push_back(&queue);
    }
    if (calls.empty() && kernels.empty()) return false;
    const size_t choice = random_.below(calls.size() + (kernels.empty() ? 0 : 1));
    if (choice < calls.size()) {
      call = std::move(calls[choice]->items.front().call);
      calls[choice]->items.pop_front();
    }
  }
  if (call) {
    call();
  } else {
    run_kernels(kernels);
  }
  return true;
}

// The next kernel of each stream, together: kernels of several groups may need one another. Events pass before kernels
// are gathered, so that two ranks do not begin with kernels of different groups and wait for one another.
void SimulatedDevice::run_kernels(const std::vector<Queue*>& ready) {
  Options options;
  options.seed = seed_ + ++num_launches_;
  options.alone = false;
  options.max_steps = UINT64_MAX;
  Simulation simulation(static_cast<int>(ready.size()), options);
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < ready.size(); ++i) {
      simulation.stream(static_cast<int>(i))->launch(std::move(*ready[i]->items.front().launch));
      ready[i]->items.pop_front();
    }
  }
  const Report report = simulation.run();
  if (!report.done()) misuse(report.text);
}

// ---- captures

void SimulatedDevice::check_not_capturing(const char* what) const {
  if (is_capturing_) misuse(std::string(what) + " while a stream is captured");
}

void SimulatedDevice::begin_capture() {
  std::lock_guard lock(mutex_);
  check_not_capturing("a capture begins");
  Queue& origin = queues_[static_cast<size_t>(current_)];
  take_launches(origin);
  is_capturing_ = true;
  capture_origin_ = current_;
  origin.capture = ++captures_;
  graph_ = {};
}

// Every stream's last event has been waited for by another one; only the origin's end is the graph's.
void SimulatedDevice::check_joined() const {
  for (const Queue& queue : queues_) {
    if (queue.capture == 0 || queue.id == capture_origin_) continue;
    bool is_joined = false;
    const EventState* last = nullptr;
    for (const CapturedItem& captured : graph_.items) {
      if (captured.queue != queue.id) {
        is_joined |= last != nullptr && captured.item.wait.get() == last;
        continue;
      }
      if (captured.item.record) last = captured.item.record.get();
      if (captured.item.launch || captured.item.call) {
        last = nullptr;
        is_joined = false;
      }
    }
    if (!is_joined) misuse("a capture ends with a stream that was not joined");
  }
}

size_t SimulatedDevice::end_capture() {
  std::lock_guard lock(mutex_);
  for (Queue& queue : queues_) take_launches(queue);
  check_joined();
  for (Queue& queue : queues_) queue.capture = 0;
  is_capturing_ = false;
  graphs_.push_back(std::move(graph_));
  graph_ = {};
  return graphs_.size() - 1;
}

void SimulatedDevice::keep_in_graph(std::shared_ptr<void> used, const device::Stream& stream) {
  std::lock_guard lock(mutex_);
  if (queue(stream).capture == 0) misuse("a stream that is not captured has no graph");
  graph_.kept.push_back(std::move(used));
}

void SimulatedDevice::delete_graph(size_t graph) {
  Graph deleted;  // outside the lock
  std::lock_guard lock(mutex_);
  deleted = std::exchange(graphs_[graph], {});
}

// In the order of the capture, which is one that its events allow.
void SimulatedDevice::replay(size_t graph) {
  std::lock_guard lock(mutex_);
  for (const CapturedItem& captured : graphs_[graph].items) {
    if (captured.item.launch || captured.item.call)
      put(queues_[static_cast<size_t>(current_)], captured.item);
  }
  run_on(current_stream(), [kept = graphs_[graph].kept] {});
}

}  // namespace pycoll::sim

// ---- for Python (tests/simulated_device.py); functions that can fail return null or a text that holds until the next one.

namespace {

using pycoll::sim::SimulatedDevice;

thread_local std::string error_text;

template <class Fn>
const char* text_of_error(Fn fn) {
  try {
    fn();
    return nullptr;
  } catch (const std::exception& error) {
    error_text = error.what();
    return error_text.c_str();
  }
}

}  // namespace

extern "C" {

SimulatedDevice* pycoll_sim_device_new(uint64_t seed, int num_multiprocessors) {
  return new SimulatedDevice(seed, num_multiprocessors);
}
void pycoll_sim_device_delete(SimulatedDevice* device) { delete device; }
// For set_simulated_device.
void* pycoll_sim_device_base(SimulatedDevice* device) {
  return static_cast<pycoll::device::Device*>(device);
}
int64_t pycoll_sim_device_new_stream(SimulatedDevice* device) { return device->new_stream().id; }
void pycoll_sim_device_set_stream(SimulatedDevice* device, int64_t id) {
  device->set_current_stream(id);
}
void pycoll_sim_device_call(SimulatedDevice* device, void (*fn)(int64_t), int64_t argument) {
  device->run_on(device->current_stream(), [=] { fn(argument); });
}
const char* pycoll_sim_device_synchronise(SimulatedDevice* device) {
  return text_of_error([&] { device->synchronise_all(); });
}
const char* pycoll_sim_device_run_a_little(SimulatedDevice* device) {
  return text_of_error([&] { device->run_a_little(); });
}
const char* pycoll_sim_device_begin_capture(SimulatedDevice* device) {
  return text_of_error([&] { device->begin_capture(); });
}
const char* pycoll_sim_device_end_capture(SimulatedDevice* device, size_t* graph) {
  return text_of_error([&] { *graph = device->end_capture(); });
}
void pycoll_sim_device_replay(SimulatedDevice* device, size_t graph) { device->replay(graph); }
void pycoll_sim_device_delete_graph(SimulatedDevice* device, size_t graph) {
  device->delete_graph(graph);
}
void pycoll_sim_device_limit_memory(SimulatedDevice* device, size_t nbytes) {
  device->limit_memory(nbytes);
}
size_t pycoll_sim_device_num_allocations(SimulatedDevice* device) {
  return device->num_allocations();
}
uint64_t pycoll_sim_device_num_launches(SimulatedDevice* device) { return device->num_launches(); }

}  // extern "C"

// Compiled for GPUs only.
namespace pycoll::cuda {

bool has_multimem() { return false; }
void launch_all_reduce_multimem(const AllReduceMultimemArgs&, LaunchConfig, void*) {
  PYCOLL_CHECK(false);
}
void launch_reduce_scatter_multimem(const ReduceScatterMultimemArgs&, LaunchConfig, void*) {
  PYCOLL_CHECK(false);
}
void launch_all_gather_multimem(const AllGatherMultimemArgs&, LaunchConfig, void*) {
  PYCOLL_CHECK(false);
}

}  // namespace pycoll::cuda
