#include "torch/work.h"

#include <algorithm>

#include "torch/errors.h"

namespace pycoll::torch_adapter {

PycollWork::PycollWork(std::shared_ptr<Communicator> communicator,
                       std::shared_ptr<InFlight> in_flight, c10d::OpType type, const char* title,
                       const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs)
    : Work(communicator->rank(), type, title, inputs),
      communicator_(std::move(communicator)),
      in_flight_(std::move(in_flight)),
      outputs_(std::move(outputs)) {}

void PycollWork::started() {
  if (!recordFunctionEndCallback_) return;
  if (operations_.empty() || !operations_.back()->set_callback([this] { finish(); })) finish();
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
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  return true;
}

void PycollWork::abort() {
  communicator_->abort(concat("rank ", communicator_->rank(), " aborted an operation"));
}

void PycollWork::complete_future() {
  std::exception_ptr error;
  for (const auto& operation : operations_) {
    if (operation->error() != nullptr && error == nullptr) error = as_torch(operation->error());
  }
  if (error != nullptr) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> PycollWork::getFuture() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  if (future_ != nullptr) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  // Operations of one work end in order, so the last one's end is the end of all.
  const auto at_the_end = [this] {
    complete_future();
    if (recordFunctionEndCallback_) finish();
  };
  if (operations_.empty() || !operations_.back()->set_callback(at_the_end)) {
    complete_future();
  } else {
    communicator_->drive_in_background(operations_.back());
  }
  return future_;
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
