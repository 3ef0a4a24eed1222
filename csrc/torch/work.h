// What a collective call returns: torch's Work over one or several operations of the core.
#pragma once

#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "engine/communicator.h"
#include "torch/tensors.h"

namespace pycoll::torch_adapter {

class InFlight;
struct FutureCompletion;

class PycollWork final : public c10d::Work {
 public:
  // `title` names the profiler's range, null without a profiler; `inputs` are what it shows of it.
  PycollWork(std::shared_ptr<Communicator> communicator, std::shared_ptr<InFlight> in_flight,
             c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor> outputs);

  // Before the operations are started: their hooks refer to it.
  TensorSet& tensors() { return tensors_; }
  void add(std::shared_ptr<Operation> operation) { operations_.push_back(std::move(operation)); }
  // The operations of another work, which keeps their tensors.
  void include(const PycollWork& other);
  // After the last add(): ends the profiler's range with the last operation.
  void started();

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  // Zero or less: as long as the operation's own deadline allows. A wait that times out may be repeated.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

  bool finished() const;

 private:
  std::shared_ptr<FutureCompletion> completion() const;
  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<InFlight> in_flight_;
  TensorSet tensors_;
  std::vector<at::Tensor> outputs_;
  std::vector<std::shared_ptr<Operation>> operations_;
  mutable std::mutex future_mutex_;
  std::shared_ptr<FutureCompletion> completion_;  // null until getFuture()
};

// Works that nobody may hold any more, kept until their operations have ended: the engine's thread never drops the last
// reference to a tensor, which could need Python's lock.
class InFlight {
 public:
  void add(c10::intrusive_ptr<PycollWork> work);
  void remove(const PycollWork* work);

 private:
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<PycollWork>> works_;
};

}  // namespace pycoll::torch_adapter
