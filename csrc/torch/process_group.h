// torch's Backend over a Communicator: names, tensors and options of torch on one side, plain memory on the other.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "engine/communicator.h"
#include "torch/call_tag.h"
#include "torch/device_path.h"
#include "torch/device_work.h"
#include "torch/work.h"

namespace pycoll::torch_adapter {

// What the adapter needs of the interpreter, without knowing it.
struct Interpreter {
  // Called now and then by threads that wait; throws what a signal's handler raised.
  InterruptCheck check_signals;
  // Called by a thread that has waited, before it goes back to the interpreter.
  std::function<void()> before_leaving_wait;
  // Runs a function that may wait for other threads, with the interpreter's lock released if the caller holds it.
  std::function<void(const std::function<void()>&)> without_lock;
  // Where in the program this thread is.
  std::function<std::string()> call_site;
  // An operation has failed and its group is unusable. Called on any thread.
  std::function<void()> on_failure;
};

struct PycollOptions final : c10d::Backend::Options {
  PycollOptions(std::string algorithm, std::string tuning, std::string device_tuning,
                std::chrono::milliseconds timeout)
      : Options("pycoll", timeout),
        algorithm(std::move(algorithm)),
        tuning(std::move(tuning)),
        device_tuning(std::move(device_tuning)) {}
  std::string algorithm;      // empty: what the environment says
  std::string tuning;         // collectives/tuning.h
  std::string device_tuning;  // device/selection.h
};

class ProcessGroupPycoll final : public c10d::Backend {
 public:
  // Collective over the group.
  ProcessGroupPycoll(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                     c10::intrusive_ptr<PycollOptions> options, Interpreter interpreter);
  ~ProcessGroupPycoll() override;

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

  const std::string getBackendName() const override { return "pycoll"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return communicator_->sequence() - 1; }
  c10d::ErrorType getError() override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override;
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& opts, const int& rank,
                                    const int& size) override;
  bool supportsShrinking() const override { return true; }
  // Collective over the ranks that stay, also when the others are dead.
  c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                     const c10::intrusive_ptr<Options>& opts) override;
  void abort() override;
  void shutdown() override;
  // Makes the group ready for a device, which its first operation there does otherwise. Collective.
  void eagerConnectSingleDevice(at::Device device) override;
  // Memory that all ranks of the host map, for FSDP2's buffers among others.
  bool supportsTensorAlloc(c10::DeviceIndex device_index) override { return device_index < 0; }
  at::Tensor allocateTensor(long numel, at::TensorOptions options) override;

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  // As allreduce and a wait, without the work, whose making costs more than a small tensor's exchange.
  void all_reduce_now(at::Tensor& tensor, const c10d::ReduceOp& op);
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;

  // Lets operations on `tensor`, of torch's symmetric memory, and on parts of it copy nothing. Collective.
  void register_symmetric(const at::Tensor& tensor);

  // A collective whose elements travel in another dtype (docs/quantisation.md): all_reduce, all_gather or reduce_scatter.
  struct WireCall {
    std::string collective;
    c10d::ReduceOp op;
    bool lists;  // all_gather's output, or reduce_scatter's input, is a list of one tensor a rank
    at::ScalarType wire_dtype;
    int64_t block;  // elements a scale; of 8-bit types
    bool async;
  };
  WorkPtr on_wire(const WireCall& call, const Tensors& outputs, const Tensors& inputs);

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  // One work for all that is called in between. Calls are not held back: each is as fast by itself.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

 private:
  // One call of a collective, from its arguments to its work.
  struct Call {
    c10d::OpType type;
    Collective collective;
    std::chrono::milliseconds timeout;
    bool async;
    c10::Device device;  // of its tensors
    Tensors inputs;      // for a profiler's eyes; empty without one
  };
  // The last group made by split() or merge(): torch asks once for each device type, with the same store.
  struct Offspring {
    c10::intrusive_ptr<c10d::Store> store;
    std::vector<int> ranks;
    c10::weak_intrusive_ptr<Backend> backend{c10::intrusive_ptr<Backend>()};
  };
  c10::intrusive_ptr<Backend> subgroup(const c10::intrusive_ptr<c10d::Store>& store,
                                       const std::vector<int>& ranks,
                                       const c10::intrusive_ptr<Options>& given) const;
  using BuildRequests = std::function<std::vector<Request>(TensorSet*)>;
  template <class Make>
  c10::intrusive_ptr<Backend> once_for_all_devices(const c10::intrusive_ptr<c10d::Store>& store,
                                                   const std::vector<int>& ranks, const Make& make);
  template <class Build>
  auto built(Collective collective, TensorSet* set, const Build& build);
  // What does not depend on the collective. `set` points to a TensorSet that outlives the operations, or is kept by them.
  template <class Pointer>
  void prepare(const Pointer& set, std::span<Request> requests) {
    if (set->needs_copies()) {
      requests.front().before = [set] { set->fill_stand_ins(); };
      requests.back().after = [set] { set->copy_back(); };
    }
    set->bump_versions();
    std::string tag = thread_tag();
    if (tag.empty() && communicator_->compares_call_sites()) tag = interpreter_.call_site();
    if (tag.empty()) return;
    for (Request& request : requests) request.tag = tag;
  }
  template <class Build>
  WorkPtr launch(const Call& call, Tensors outputs, const Build& build);
  WorkPtr all_reduce_sparse_now(Tensors& tensors, const c10d::AllreduceOptions& opts);
  WorkPtr receive(Tensors& tensors, int src, int tag, c10d::OpType type);
  // The same on a device (device_calls.cpp).
  WorkPtr launch_on_device(const Call& call, Tensors outputs, const BuildRequests& build);
  WorkPtr message_on_device(Tensors& tensors, int peer, int tag, c10d::OpType type);
  WorkPtr launched_on_device(c10::intrusive_ptr<DeviceWork> work);
  WorkPtr end_device_coalescing();  // null if nothing ran there
  std::shared_ptr<device::DeviceGroup> device_group(c10::Device device);
  c10::Device device_of_barrier(const c10d::BarrierOptions& opts) const;
  // The last step of every call.
  WorkPtr launched(c10::intrusive_ptr<PycollWork> work);
  std::chrono::milliseconds effective(std::chrono::milliseconds timeout) const;

  c10::intrusive_ptr<PycollOptions> options_;
  const Interpreter interpreter_;
  const c10::intrusive_ptr<c10d::Store> store_;
  int shrinks_ = 0;
  Offspring offspring_;
  std::optional<std::vector<c10::intrusive_ptr<PycollWork>>> coalesced_;
  std::optional<std::vector<c10::intrusive_ptr<DeviceWork>>> device_coalesced_;
  std::shared_ptr<Communicator> communicator_;
  DevicePath device_path_;
  std::shared_ptr<InFlight> in_flight_ = std::make_shared<InFlight>();
};

}  // namespace pycoll::torch_adapter
