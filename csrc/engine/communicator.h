// The operations of one group on this rank: what the framework adapter and the direct API call.
#pragma once

#include <memory>
#include <string>

#include "base/env.h"
#include "engine/callback_pool.h"
#include "engine/collective_queue.h"
#include "engine/message_queue.h"
#include "engine/progress_engine.h"
#include "sync/waiter.h"

namespace pycoll {

// What the groups of one rank share.
struct Runtime {
  std::shared_ptr<Endpoint> endpoint;
  std::shared_ptr<ProgressEngine> progress_engine;
  CallbackPool callbacks;

  static std::shared_ptr<Runtime> create(const Env& env);
};

struct CommunicatorOptions {
  std::string algorithm;  // empty: what the environment says
  std::string tuning;     // rows for parse_tuning(); empty: the selector's own table
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  uint64_t first_sequence = 1;  // tests start near where a counter of fewer bits would wrap
  InterruptCheck interrupt;
  std::function<void()> before_leaving_wait;  // called by a thread that has waited; throws nothing
  std::function<void()>
      on_failure;  // an operation failed and the group is unusable; any thread, no lock held
};

class Communicator {
 public:
  // Collective over the ranks of `exchange`. A group of one owns no resources: `make_runtime` is not called.
  static std::shared_ptr<Communicator> create(
      Exchange* exchange, const std::function<std::shared_ptr<Runtime>(const Env&)>& make_runtime,
      CommunicatorOptions options);
  ~Communicator();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load());
  }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_.store(timeout.count()); }
  const std::string& algorithm() const { return algorithm_; }
  // Whether calls without a tag are to be tagged with their place in the program.
  bool compares_call_sites() const { return compares_call_sites_; }
  // The number that the next collective will have.
  uint64_t sequence() const;
  // The last operations, oldest first; those that have not ended come last.
  std::vector<Event> events() const;
  bool forked() const { return runtime_ != nullptr && runtime_->endpoint->forked(); }
  // Ranks whose process has ended, or that have left the group, as far as can be told now.
  std::vector<int> dead_ranks() const;
  // Null unless an operation failed in a way that made the group unusable.
  std::string failure() const;

  // What start() refuses, for operations that run elsewhere. Raises kInvalidArgument.
  void validate(const Request& request) const;
  // Raises kAborted for a group that has been destroyed or is a parent's.
  void check_open() const;
  // Puts an operation that runs elsewhere among the events.
  void note(const Event& event) { events_.add(event); }

  // Starts a collective. `request`'s memory stays valid until it has finished. Raises kInvalidArgument, and tells the other
  // ranks so, when op, dtype or root make no sense. Threads that share a group must order their calls themselves.
  std::shared_ptr<Operation> start(Request request, std::chrono::milliseconds timeout);
  // Starts and completes it on this thread.
  void run(Request request, std::chrono::milliseconds timeout);
  // In place of a collective whose arguments were found wrong here: the other ranks raise too instead of waiting.
  void refuse(Collective collective, const std::string& reason);

  std::shared_ptr<Operation> send(const void* data, size_t nbytes, DType dtype, int dst, int tag,
                                  std::chrono::milliseconds timeout);
  // `src` may be kAnySource. `after` runs once the data is there.
  std::shared_ptr<Operation> receive(void* data, size_t nbytes, DType dtype, int src, int tag,
                                     std::chrono::milliseconds timeout,
                                     std::function<void()> after);

  // Returns when all ranks have called it. Otherwise raises kTimeout after `timeout`, naming the ranks that have not (the first
  // one only, unless `wait_all_ranks`); then it may be called again. Independent of the other operations.
  void monitored_barrier(std::chrono::milliseconds timeout, bool wait_all_ranks);

  // Until the operation has finished, or (false) `patience` is over; then it may be waited for again. Does not raise its
  // error. An interrupt leaves the operation going on.
  bool wait(const std::shared_ptr<Operation>& operation, Deadline patience);
  // Whether it has finished, after giving it a push.
  bool poll(const std::shared_ptr<Operation>& operation) { return push(*operation, true); }
  // Has the progress engine drive it: somebody counts on its end without waiting.
  void drive_in_background(const std::shared_ptr<Operation>& operation);
  // Runs `callback` on a thread on which it may start operations of any group and wait for them.
  void call_later(std::function<void()> callback);

  // Ends all operations with an error and makes the group unusable here and, as they find out, on all ranks.
  void abort(const std::string& reason);
  // Gives pending operations `patience` to complete, ends those that do not, and leaves the group. Idempotent.
  void close(std::chrono::milliseconds patience);
  // The interpreter is about to end: completes what it can, ends the progress engine's thread. The group stays usable on the
  // calling thread.
  void prepare_for_exit(Deadline deadline);
  // Tells the peers that this rank ends in good order. Touches shared memory only.
  void leave();

  // For waits of its own (SignalPads): null in a group of one, else what makes a wait end.
  const std::shared_ptr<Group>& group() const { return group_; }
  SpinPolicy spin() const { return spin_; }
  const InterruptCheck& interrupt() const { return interrupt_; }

 private:
  Communicator(int rank, int world_size, CommunicatorOptions options);
  void run_alone(const Request& request);
  std::shared_ptr<Driver> driver_of(const Operation& operation) const;
  bool wait_driving(const Operation& operation, const std::shared_ptr<Driver>& driver,
                    Deadline patience);
  bool push(const Operation& operation, bool check);
  void drive_or_abort(const std::shared_ptr<Driver>& driver);
  std::shared_ptr<CollectiveOperation> submit(Request request, std::chrono::milliseconds timeout);
  void check_peer(const char* argument, int peer) const;
  void flush(Deadline deadline);
  std::string monitored_failure(const std::vector<int>& missing,
                                std::chrono::milliseconds timeout) const;

  const int rank_;
  const int world_size_;
  const InterruptCheck interrupt_;
  const std::function<void()> before_leaving_wait_;
  std::atomic<int64_t> timeout_ms_;
  std::string algorithm_;
  bool compares_call_sites_ = false;
  EventRing events_{1024};
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> sequence_alone_{1};  // of a group of one

  // Null in a group of one.
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<CollectiveQueue> collectives_;
  std::shared_ptr<MessageQueue> messages_;
  SpinPolicy spin_;
  std::mutex monitored_mutex_;
  uint64_t monitored_ = 0;  // barriers passed
};

}  // namespace pycoll
