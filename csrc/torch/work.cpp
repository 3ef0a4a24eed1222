#include "torch/work.h"

#include <algorithm>

#include "base/log.h"
#include "torch/call_tag.h"
#include "torch/errors.h"

namespace pycoll::torch_adapter {

// The future of a work, which may outlive it.
struct FutureCompletion {
  FutureCompletion(std::vector<std::shared_ptr<Operation>> operations,
                   std::vector<at::Tensor> outputs)
      : future(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))),
        operations(std::move(operations)),
        outputs(std::move(outputs)),
        unfinished(this->operations.size() + 1) {}

  // Once the operations have finished: by the thread that waited for them or by one of the pool, whichever comes first.
  void complete() {
    if (completed.exchange(true)) return;
    const TagScope scope(tag);
    try {
      for (const auto& operation : operations) {
        if (operation->error() == nullptr) continue;
        future->setError(as_torch(operation->error()));
        return;
      }
      future->markCompleted(c10::IValue(std::move(outputs)));
    } catch (const std::exception& error) {
      PYCOLL_LOG(LogLevel::kWarn, "a callback of a future raised: ", error.what());
    }
  }

  const c10::intrusive_ptr<c10::ivalue::Future> future;
  const std::vector<std::shared_ptr<Operation>> operations;
  // Callbacks call collectives under it, whichever thread they run on: ranks must not differ in that.
  const std::string tag = thread_tag();
  std::vector<at::Tensor> outputs;
  std::atomic<size_t> unfinished;  // operations, and the getFuture() that counts them
  std::atomic<bool> completed{false};
};

PycollWork::PycollWork(std::shared_ptr<Communicator> communicator,
                       std::shared_ptr<InFlight> in_flight, c10d::OpType type, const char* title,
                       const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs)
    : Work(communicator->rank(), type, title, inputs),
      communicator_(std::move(communicator)),
      in_flight_(std::move(in_flight)),
      outputs_(std::move(outputs)) {}

void PycollWork::include(const PycollWork& other) {
  operations_.insert(operations_.end(), other.operations_.begin(), other.operations_.end());
  outputs_.insert(outputs_.end(), other.outputs_.begin(), other.outputs_.end());
}

void PycollWork::started() {
  if (!recordFunctionEndCallback_) return;
  if (operations_.empty() || !operations_.back()->add_callback([this] { finish(); })) finish();
}

bool PycollWork::finished() const {
  return std::all_of(operations_.begin(), operations_.end(),
                     [](const auto& o) { return o->finished(); });
}

bool PycollWork::isCompleted() {
  return std::all_of(operations_.begin(), operations_.end(),
                     [this](const auto& o) { return communicator_->poll(o); });
}

bool PycollWork::isSuccess() const { return finished() && exception() == nullptr; }

std::exception_ptr PycollWork::exception() const {
  for (const auto& operation : operations_) {
    if (operation->finished() && operation->error() != nullptr) return as_torch(operation->error());
  }
  return nullptr;
}

int PycollWork::sourceRank() const {
  return operations_.empty() ? -1 : operations_.back()->event.peer;
}

bool PycollWork::wait(std::chrono::milliseconds timeout) {
  const Deadline patience = timeout.count() <= 0 ? Deadline::never() : Deadline::after(timeout);
  for (const auto& operation : operations_) {
    if (translated([&] { return communicator_->wait(operation, patience); })) continue;
    translated([&] {
      fail(ErrorKind::kTimeout, "rank ", communicator_->rank(), ": Timed out waiting ",
           timeout.count(), " ms for ", operation->event.operation, ", operation ",
           operation->event.sequence, "; it goes on, and may be waited for again");
    });
  }
  in_flight_->remove(this);
  // A program that has waited finds the future done.
  if (const auto known = completion()) {
    known->complete();
    known->future->wait();
  }
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  return true;
}

void PycollWork::abort() {
  communicator_->abort(concat("rank ", communicator_->rank(), " aborted an operation"));
}

std::shared_ptr<FutureCompletion> PycollWork::completion() const {
  std::lock_guard<std::mutex> lock(future_mutex_);
  return completion_;
}

c10::intrusive_ptr<c10::ivalue::Future> PycollWork::getFuture() {
  if (const auto known = completion()) return known->future;
  auto completion = std::make_shared<FutureCompletion>(operations_, outputs_);
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (completion_ != nullptr) return completion_->future;
    completion_ = completion;
  }
  // The thread that ends an operation does not wait for callbacks: they run elsewhere.
  const auto one_has_ended = [this, completion] {
    if (completion->unfinished.fetch_sub(1) > 1) return;
    communicator_->call_later([completion] { completion->complete(); });
  };
  for (const auto& operation : operations_) {
    if (operation->add_callback(one_has_ended)) {
      communicator_->drive_in_background(operation);
    } else {
      communicator_->wait(operation, Deadline::never());  // it is ending just now
      completion->unfinished.fetch_sub(1);
    }
  }
  if (completion->unfinished.fetch_sub(1) == 1) completion->complete();
  return completion->future;
}

uint64_t PycollWork::getSequencenumber() const {
  return operations_.empty() ? 0 : operations_.front()->event.sequence;
}

void InFlight::add(c10::intrusive_ptr<PycollWork> work) {
  std::vector<c10::intrusive_ptr<PycollWork>> ended;  // dropped outside the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto end = std::stable_partition(works_.begin(), works_.end(),
                                         [](const auto& w) { return !w->finished(); });
  ended.assign(std::make_move_iterator(end), std::make_move_iterator(works_.end()));
  works_.erase(end, works_.end());
  works_.push_back(std::move(work));
}

void InFlight::remove(const PycollWork* work) {
  c10::intrusive_ptr<PycollWork> found;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it =
      std::find_if(works_.begin(), works_.end(), [work](const auto& w) { return w.get() == work; });
  if (it == works_.end()) return;
  found = std::move(*it);
  works_.erase(it);
}

}  // namespace pycoll::torch_adapter
