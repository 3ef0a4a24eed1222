// The collectives of one group, in issue order.
#pragma once

#include <deque>
#include <memory>

#include "base/task.h"
#include "collectives/selector.h"
#include "engine/driver.h"
#include "engine/operation.h"

namespace pycoll {

class CollectiveOperation final : public Operation {
 public:
  CollectiveOperation(Request request, std::chrono::milliseconds timeout)
      : Operation(timeout), request(std::move(request)) {}

  Request request;
  std::string refusal;  // not empty: this rank's arguments were refused, the others are told
  uint64_t sequence = 0;
  const Algorithm* algorithm = nullptr;
  bool self_contained = false;  // peers need nothing more from this rank: nobody has to drive it
  bool agreed = false;          // fingerprints were compared; user memory may have been written
  TaskState task_state;
  Task task;

  std::string describe() const;
};

class CollectiveQueue final : public Driver {
 public:
  // `first_sequence` is the number of the first operation; all ranks pass the same.
  CollectiveQueue(std::shared_ptr<Group> group, EventRing* events, uint64_t first_sequence)
      : group_(std::move(group)), events_(events), next_sequence_(first_sequence) {}

  // Takes the next sequence number. From any thread; threads that share a group must order their calls themselves.
  void submit(const std::shared_ptr<CollectiveOperation>& operation);
  uint64_t sequence() const;

  void progress() override;
  void check() override;
  bool watch(std::vector<Wait>* waits) const override;
  void pending_events(std::vector<Event>* events) const override;
  // Under `mutex`, after the group was poisoned or is about to be left: ends all operations with `error`.
  void fail_all(const std::exception_ptr& error);

 private:
  std::shared_ptr<CollectiveOperation> front() const;
  void start(CollectiveOperation* operation);
  void finish_front(std::exception_ptr error);
  void fail_front(const Error& error);
  std::shared_ptr<CollectiveOperation> find_late() const;
  std::string awaited(const CollectiveOperation& operation) const;
  std::string still_touching() const;
  std::string timeout_text(const CollectiveOperation& operation,
                           std::chrono::milliseconds timeout) const;

  const std::shared_ptr<Group> group_;
  EventRing* const events_;
  mutable std::mutex queue_mutex_;
  std::deque<std::shared_ptr<CollectiveOperation>> queue_;
  uint64_t next_sequence_;
};

}  // namespace pycoll
