#include "engine/collective_queue.h"

#include <algorithm>

#include "base/log.h"
#include "engine/fingerprint.h"

namespace pycoll {
namespace {

// How long a failed operation waits for peers that are at work on this rank's tensors: far longer than they need unless stopped.
constexpr std::chrono::milliseconds kTouchingPatience{5000};

// Every collective: handshake, comparison, then the algorithm.
Task run_collective(Context context, CollectiveOperation* operation) {
  Group& group = context.group;
  HandshakeLine* line = group.handshake_line(context.rank(), context.sequence);
  const bool refused = !operation->refusal.empty();
  if (refused) {
    write_refusal(line, group.facts().payload_bytes, operation->refusal);
  } else {
    if (context.request.before) context.request.before();
    write_fingerprint(group, context.sequence, context.request);
    operation->self_contained = operation->algorithm->publish(context);
  }
  group.post_handshake(context.sequence);
  for (int r = 0; r < context.world_size(); ++r) {
    if (r != context.rank()) co_await context.reached(group.handshake(r, context.sequence));
  }
  // A rank that refused waits all the same: its slots must not be written again while others read them.
  if (refused) co_return;
  compare_fingerprints(group, context.sequence, &context.request);
  operation->agreed = true;
  const uint64_t rounds = group.rounds_posted();
  co_await operation->algorithm->run(context);
  Event& event = context.event;
  if (event.memory_path[0] == '\0' && context.request.collective != Collective::kBarrier) {
    event.memory_path = group.rounds_posted() == rounds ? "payload" : "staged";
  }
  if (context.request.after) context.request.after();
}

}  // namespace

std::string CollectiveOperation::describe() const {
  return concat(name(request.collective), " (", algorithm == nullptr ? "refused" : algorithm->name,
                "), operation ", sequence, " of the group");
}

void CollectiveQueue::submit(const std::shared_ptr<CollectiveOperation>& operation) {
  const Request& request = operation->request;
  if (operation->refusal.empty()) {
    operation->algorithm = &select(request, group_->facts());
    operation->event.algorithm = operation->algorithm->name;
  }
  Event& event = operation->event;
  event.operation = name(request.collective);
  event.dtype = request.dtype;
  event.wire_dtype = request.wire ? request.wire->dtype : request.dtype;
  event.op = request.op;
  event.peer = has_root(request.collective) ? request.root : -1;
  event.nbytes = request.nbytes();
  std::lock_guard<std::mutex> lock(queue_mutex_);
  operation->sequence = event.sequence = next_sequence_++;
  queue_.push_back(operation);
}

uint64_t CollectiveQueue::sequence() const {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  return next_sequence_;
}

std::shared_ptr<CollectiveOperation> CollectiveQueue::front() const {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  return queue_.empty() ? nullptr : queue_.front();
}

void CollectiveQueue::start(CollectiveOperation* operation) {
  operation->event.started_ns = now_ns();
  operation->task = run_collective(
      Context{*group_, operation->request, operation->sequence, operation->event}, operation);
  operation->task.start(&operation->task_state);
}

void CollectiveQueue::progress() {
  while (const std::shared_ptr<CollectiveOperation> operation = front()) {
    if (operation->event.started_ns == 0) {
      try {
        group_->check_usable();
      } catch (const Error& error) {
        finish_front(std::current_exception());
        continue;
      }
      start(operation.get());
    } else if (operation->task_state.wait.ready()) {
      Task::resume(&operation->task_state);
    }
    if (!operation->task.done()) {
      if (operation->task_state.wait.ready()) continue;
      return;
    }
    try {
      operation->task.rethrow();
      finish_front(nullptr);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kMismatch) {
        finish_front(std::current_exception());
      } else {
        fail_front(error);
      }
    } catch (const std::exception& error) {
      fail_front(Error(ErrorKind::kSystem, error.what()));
    }
  }
}

void CollectiveQueue::check() {
  const std::shared_ptr<CollectiveOperation> operation = front();
  if (operation == nullptr || operation->event.started_ns == 0) return;
  const Wait wait = operation->task_state.wait;
  if (wait.ready()) return;  // what has arrived counts before the state of who sent it
  try {
    group_->check_usable();
    if (wait.peer >= 0) group_->check_member(wait.peer);
    if (wait.ready()) return;
    if (const auto late = find_late()) {
      fail(ErrorKind::kTimeout, timeout_text(*operation, late->timeout()));
    }
  } catch (const Error& error) {
    if (!wait.ready()) fail_front(error);
  }
}

// The front operation, or one that cannot even start because of it, if its deadline is over.
std::shared_ptr<CollectiveOperation> CollectiveQueue::find_late() const {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  const auto it = std::find_if(queue_.begin(), queue_.end(), [](const auto& operation) {
    return operation->deadline().passed();
  });
  return it == queue_.end() ? nullptr : *it;
}

bool CollectiveQueue::watch(std::vector<Wait>* waits) const {
  const std::shared_ptr<CollectiveOperation> operation = front();
  if (operation == nullptr) return false;
  waits->push_back(operation->task_state.wait);  // not started: ready at once
  return true;
}

void CollectiveQueue::pending_events(std::vector<Event>* events) const {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  for (const auto& operation : queue_) events->push_back(operation->event);
}

// Memory of this rank must not be written any more when its user gets it back; to be called after the group was poisoned or closed.
std::string CollectiveQueue::still_touching() const {
  const std::vector<int> ranks = group_->await_untouched(Deadline::after(kTouchingPatience));
  if (ranks.empty()) return "";
  return concat("; ", list_ranks(ranks), " stopped in the middle of an access to this rank's ",
                "tensors and may still write to them: do not use them again");
}

void CollectiveQueue::fail_all(const std::exception_ptr& error) {
  if (front() == nullptr) return;
  group_->poison(ErrorKind::kAborted, concat("rank ", group_->rank(),
                                             " destroyed the group while operations were pending"));
  const std::string text = still_touching();
  if (!text.empty()) PYCOLL_LOG(LogLevel::kWarn, "rank ", group_->rank(), text);
  while (front() != nullptr) finish_front(error);
}

void CollectiveQueue::finish_front(std::exception_ptr error) {
  std::shared_ptr<CollectiveOperation> operation;
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    operation = queue_.front();
    queue_.pop_front();
  }
  operation->task = Task();
  // Those who learn of the end may at once look at the events.
  Event event = operation->event;
  event.ended_ns = now_ns();
  event.failed = error != nullptr;
  events_->add(event);
  operation->finish(std::move(error));
  group_->endpoint().bell()->ring_sleepers();
}

// Ends the front operation and poisons the group, since peers' signals for it stay behind.
void CollectiveQueue::fail_front(const Error& error) {
  const std::shared_ptr<CollectiveOperation> operation = front();
  std::string text = error.what();
  if (error.kind() != ErrorKind::kTimeout) {
    text = concat("pycoll: rank ", group_->rank(), " failed in ", operation->describe(), ": ",
                  text.rfind("pycoll: ", 0) == 0 ? text.substr(8) : text);
  }
  group_->poison(error.kind(), text.substr(8));
  text += still_touching();
  failed.store(true, std::memory_order_release);
  if (operation->agreed) text += "; its output is undefined";
  text += ". The group can no longer be used: destroy it and make a new one";
  finish_front(std::make_exception_ptr(Error(error.kind(), text)));
}

// Whom the operation waits for: in the handshake, all that have not come.
std::string CollectiveQueue::awaited(const CollectiveOperation& operation) const {
  if (operation.agreed) return list_ranks({operation.task_state.wait.peer});
  std::vector<int> missing;
  for (int r = 0; r < group_->world_size(); ++r) {
    if (r != group_->rank() && !group_->handshake(r, operation.sequence).ready())
      missing.push_back(r);
  }
  return missing.empty() ? list_ranks({operation.task_state.wait.peer}) : list_ranks(missing);
}

std::string CollectiveQueue::timeout_text(const CollectiveOperation& operation,
                                          std::chrono::milliseconds timeout) const {
  const Event& event = operation.event;
  return concat("rank ", group_->rank(), " timed out in ", operation.describe(),
                ": Timed out waiting ", timeout.count(), " ms for ", awaited(operation), " (",
                event.bytes_written, " bytes written for others, ", event.bytes_read,
                " read from others, of a tensor of ", event.nbytes, " bytes)");
}

}  // namespace pycoll
