// A simulated device: csrc/device/device.h over the simulator. What is put into its streams runs when the host synchronises, in a
// random order that the events allow, so that a missing event is found; kernels of several streams run together. Each rank has
// a device of its own, and its kernels meet those of other threads or processes in memory that they share.
//
// Captures are as strict as CUDA's: waiting for an event from outside, asking for one inside, or making memory meanwhile is an error,
// and so is a stream that has not been joined at the end.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <optional>

#include "device/device.h"
#include "random.h"
#include "simulation.h"

namespace pycoll::sim {

struct EventState {
  std::atomic<bool> passed{false};
  uint64_t capture = 0;
};

// What stands in a stream: one of a launch, a call of the host, an event to record, an event to wait for.
struct StreamItem {
  std::optional<Launch> launch;
  std::function<void()> call;
  std::shared_ptr<EventState> record, wait;
};

class SimulatedDevice final : public device::Device {
 public:
  explicit SimulatedDevice(uint64_t seed, int num_multiprocessors);
  ~SimulatedDevice() override;

  // ---- device::Device

  const cuda::Launchers& launchers() const override { return launchers_; }
  int architecture() const override { return 0; }
  int num_multiprocessors() const override { return num_multiprocessors_; }
  Token identity() const override { return identity_; }
  std::byte* allocate(size_t nbytes) override;
  void release(std::byte* data) override;
  void clear(std::byte* data, size_t nbytes) override;
  std::byte* allocate_host(size_t nbytes) override { return new_memory(nbytes); }
  void release_host(std::byte* data) override { release(data); }
  void set_word(uint32_t* word, uint32_t value) override;
  device::Stream current_stream() override;
  device::Stream new_stream() override;
  uint64_t capture_id(const device::Stream& stream) override;
  std::shared_ptr<device::Event> record(const device::Stream& stream) override;
  void wait(const device::Stream& stream, const device::Event& event) override;
  bool has_passed(const device::Event& event) override;
  void synchronise(const device::Event& event, const std::function<void()>& poll) override;
  void run_on(const device::Stream& stream, const std::function<void()>& fn) override;
  void hold(std::shared_ptr<void> used, const device::Stream& stream) override {
    run_on(stream, [used] {});
  }
  std::shared_ptr<std::byte> scratch(size_t nbytes, const device::Stream& stream) override;
  void copy(void* dst, const void* src, size_t nbytes, const device::Stream& stream) override;
  void keep_in_graph(std::shared_ptr<void> used, const device::Stream& stream) override;

  // ---- what a test does with it

  void set_current_stream(int64_t id);
  void synchronise_all();
  // Runs the next thing in some stream, and passes the events that can pass.
  void run_a_little();
  void begin_capture();
  // The graph's number.
  size_t end_capture();
  // Into the current stream.
  void replay(size_t graph);
  // What stands in streams of it already still runs.
  void delete_graph(size_t graph);
  uint64_t num_launches() const { return num_launches_; }
  // Of memory that was not given back.
  // What asks for more than this at once is refused from now on.
  void limit_memory(size_t nbytes);
  size_t num_allocations() const { return memory_.size(); }

 private:
  struct Queue {
    int64_t id;
    Stream inbox;  // where launchers put kernels
    std::deque<StreamItem> items;
    uint64_t capture = 0;
  };
  struct CapturedItem {
    int64_t queue;
    StreamItem item;
  };
  struct Graph {
    std::vector<CapturedItem> items;
    std::vector<std::shared_ptr<void>> kept;
  };

  std::byte* new_memory(size_t nbytes);
  void check_room(size_t nbytes) const;
  Queue& queue(const device::Stream& stream) { return queues_[static_cast<size_t>(stream.id)]; }
  void put(Queue& queue, StreamItem item);
  void take_launches(Queue& queue);
  void check_not_capturing(const char* what) const;
  void check_joined() const;
  void pass_events();
  // One step of what can go on; false if nothing can.
  bool step();
  void run_kernels(const std::vector<Queue*>& ready);

  const cuda::Launchers launchers_;
  const int num_multiprocessors_;
  size_t most_bytes_ = SIZE_MAX;
  Token identity_;
  Random random_;
  uint64_t seed_;
  std::recursive_mutex mutex_;
  std::mutex running_;  // one thread runs what is in the streams
  std::deque<Queue> queues_;
  int64_t current_ = 0;
  uint64_t captures_ = 0;
  int64_t capture_origin_ = 0;
  bool is_capturing_ = false;
  Graph graph_;  // the one that is being captured
  std::deque<Graph> graphs_;
  std::map<std::byte*, size_t> memory_;
  uint64_t num_launches_ = 0;
};

}  // namespace pycoll::sim
