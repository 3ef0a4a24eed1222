#include "engine/communicator.h"

#include <algorithm>

#include "base/log.h"
#include "collectives/reduction.h"
#include "collectives/wire.h"
#include "engine/rendezvous.h"
#include "sync/cores.h"

namespace pycoll {
namespace {

// Counts a thread in as one that waits, and therefore drives. When it leaves, what others still count on goes to the
// progress engine.
class WaiterScope {
 public:
  WaiterScope(std::shared_ptr<Driver> driver, ProgressEngine* progress_engine)
      : driver_(std::move(driver)), progress_engine_(progress_engine) {
    driver_->waiters.fetch_add(1, std::memory_order_acq_rel);
  }
  ~WaiterScope() {
    driver_->waiters.fetch_sub(1, std::memory_order_seq_cst);
    const bool left = driver_->left_to_waiters.exchange(false, std::memory_order_seq_cst);
    if (pending || left) progress_engine_->activate(driver_);
  }

  bool pending = false;  // operations were left when this thread last looked

 private:
  const std::shared_ptr<Driver> driver_;
  ProgressEngine* const progress_engine_;
};

Facts facts_of(const Env& env, const CommunicatorOptions& options, int world_size) {
  const std::string& algorithm = options.algorithm;
  Facts facts;
  // An all_to_all shows two counts for each rank.
  facts.payload_bytes =
      std::max(env.payload_bytes, 2 * sizeof(uint64_t) * static_cast<size_t>(world_size));
  facts.staging_bytes = round_up(env.staging_bytes, 4096);
  facts.eager_bytes = env.eager_bytes;
  facts.direct_access = static_cast<uint64_t>(env.direct_access);
  facts.compares_call_sites = log_enabled(LogLevel::kDetail) ? 1 : 0;
  facts.algorithm = algorithm.empty() ? env.algorithm : algorithm;
  facts.tuning = options.tuning;
  facts.tuned = parse_tuning(options.tuning);
  std::erase_if(facts.tuned, [&](const TunedRow& row) { return row.world_size != world_size; });
  const std::vector<std::string> names = algorithm_names();
  if (std::find(names.begin(), names.end(), facts.algorithm) == names.end()) {
    std::string list;
    for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
    fail(ErrorKind::kInvalidArgument, algorithm.empty() ? "PYCOLL_ALGORITHM" : "algorithm", " '",
         facts.algorithm, "' is unknown; use one of ", list);
  }
  return facts;
}

}  // namespace

std::shared_ptr<Runtime> Runtime::create(const Env& env) {
  auto runtime = std::make_shared<Runtime>();
  runtime->endpoint = Endpoint::create(env.segment_bytes);
  runtime->progress_engine = std::make_shared<ProgressEngine>(runtime->endpoint);
  return runtime;
}

Communicator::Communicator(int rank, int world_size, CommunicatorOptions options)
    : rank_(rank),
      world_size_(world_size),
      interrupt_(std::move(options.interrupt)),
      before_leaving_wait_(std::move(options.before_leaving_wait)),
      timeout_ms_(options.timeout.count()) {}

std::shared_ptr<Communicator> Communicator::create(
    Exchange* exchange, const std::function<std::shared_ptr<Runtime>(const Env&)>& make_runtime,
    CommunicatorOptions options) {
  const bool is_alone = exchange->world_size() == 1;
  Env env;
  Facts facts;
  std::shared_ptr<Runtime> runtime;
  try {
    env = Env::read();
    facts = facts_of(env, options, exchange->world_size());
    if (!is_alone) runtime = make_runtime(env);
  } catch (const Error& error) {
    if (!is_alone) decline_group(exchange, error);
    throw;
  }
  const uint64_t first_sequence = options.first_sequence;
  const std::function<void()> on_failure = options.on_failure;
  const Deadline deadline = Deadline::after(options.timeout);
  std::shared_ptr<Communicator> self(
      new Communicator(exchange->rank(), exchange->world_size(), std::move(options)));
  self->algorithm_ = facts.algorithm;
  self->compares_call_sites_ = facts.compares_call_sites != 0;
  if (is_alone) return self;

  self->runtime_ = std::move(runtime);
  self->group_ = form_group(exchange, self->runtime_->endpoint, facts, deadline, self->interrupt_);
  self->collectives_ =
      std::make_shared<CollectiveQueue>(self->group_, &self->events_, first_sequence);
  self->messages_ = std::make_shared<MessageQueue>(self->group_, &self->events_);
  self->collectives_->on_failure = self->messages_->on_failure = on_failure;
  const int cores = env.cores > 0 ? env.cores : usable_cores();
  const int ranks = std::max(exchange->world_size(), self->runtime_->endpoint->num_peers() + 1);
  self->spin_ = SpinPolicy{env.spin_us, ranks > cores};
  PYCOLL_LOG(LogLevel::kInfo, "rank ", self->rank_, " of ", self->world_size_,
             ": group made, algorithm ", facts.algorithm, ", ", cores, " cores for ", ranks,
             " ranks, waiters ", self->spin_.yield ? "yield" : "spin", " for ", env.spin_us,
             " us before they sleep");
  return self;
}

Communicator::~Communicator() { close(std::chrono::milliseconds(0)); }

uint64_t Communicator::sequence() const {
  return group_ == nullptr ? sequence_alone_.load() : collectives_->sequence();
}

std::vector<int> Communicator::dead_ranks() const {
  std::vector<int> dead;
  if (group_ == nullptr || forked()) return dead;
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_ && !group_->is_present(r)) dead.push_back(r);
  }
  return dead;
}

std::vector<Event> Communicator::events() const {
  std::vector<Event> events = events_.snapshot();
  if (group_ == nullptr || forked()) return events;
  for (Driver* driver :
       {static_cast<Driver*>(collectives_.get()), static_cast<Driver*>(messages_.get())}) {
    std::lock_guard<std::mutex> lock(driver->mutex);
    driver->pending_events(&events);
  }
  return events;
}

std::string Communicator::failure() const {
  if (group_ == nullptr) return "";
  try {
    group_->check_usable();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

// ---- collectives

void Communicator::check_open() const {
  if (closed_.load(std::memory_order_relaxed)) {
    fail(ErrorKind::kAborted, "this group has been destroyed; make a new one");
  }
  if (forked()) {
    fail(ErrorKind::kAborted,
         "this group belongs to the parent process: a forked child cannot use it; make one in the "
         "child");
  }
}

void Communicator::validate(const Request& request) const {
  if (reduces(request.collective)) {
    PYCOLL_CHECK_ARG(is_valid(request.op, request.dtype), "op ", name(request.op),
                     " has no meaning for dtype ", name(request.dtype), " in ",
                     name(request.collective), "; convert the tensor or choose another op");
  }
  if (request.wire) check_wire(request);
  PYCOLL_CHECK_ARG(request.root >= 0 && request.root < world_size_, "root ", request.root,
                   " is not a rank of this group of ", world_size_, " in ",
                   name(request.collective));
}

std::shared_ptr<CollectiveOperation> Communicator::submit(Request request,
                                                          std::chrono::milliseconds timeout) {
  check_open();
  try {
    validate(request);
  } catch (const Error& error) {
    refuse(request.collective, error.what());
    throw;
  }
  auto operation = std::make_shared<CollectiveOperation>(std::move(request), timeout);
  if (group_ == nullptr) {
    run_alone(operation->request);
    operation->finish(nullptr);
    return operation;
  }
  // An unusable group says so at once.
  group_->check_usable();
  collectives_->submit(operation);
  return operation;
}

std::shared_ptr<Operation> Communicator::start(Request request, std::chrono::milliseconds timeout) {
  const std::shared_ptr<CollectiveOperation> operation = submit(std::move(request), timeout);
  if (operation->finished()) return operation;
  // What fits beside the signal is shown to the peers at once: they need nothing more from this rank, so nobody has to drive
  // it until somebody waits. Whatever is longer, or queues behind something else, goes on in the background.
  const Request& submitted = operation->request;
  if (submitted.wire_nbytes(submitted.numel) <= group_->facts().payload_bytes) {
    std::unique_lock<std::mutex> lock(collectives_->mutex, std::try_to_lock);
    if (lock.owns_lock()) {
      collectives_->progress();
      if (operation->finished() || operation->self_contained) return operation;
    }
  }
  drive_or_abort(collectives_);
  return operation;
}

// Without a thread to drive it the operation cannot go on, and the caller's tensors go away with its stack.
void Communicator::drive_or_abort(const std::shared_ptr<Driver>& driver) {
  try {
    runtime_->progress_engine->activate(driver);
  } catch (const Error& error) {
    abort(concat("rank ", rank_, " cannot go on: ", error.what()));
    throw;
  }
}

void Communicator::run(Request request, std::chrono::milliseconds timeout) {
  const std::shared_ptr<CollectiveOperation> operation = submit(std::move(request), timeout);
  if (!operation->finished()) {
    try {
      wait_driving(*operation, collectives_, Deadline::never());
    } catch (...) {
      // Interrupted. The caller's tensors go away with its stack, so the operation cannot go on.
      abort(concat("rank ", rank_, " was interrupted by a signal in ", operation->describe()));
      throw;
    }
  }
  if (operation->error() != nullptr) std::rethrow_exception(operation->error());
}

void Communicator::refuse(Collective collective, const std::string& reason) {
  if (group_ == nullptr || closed_.load() || forked() || group_->state() != GroupState::kOpen)
    return;
  Request request;
  request.collective = collective;
  auto operation = std::make_shared<CollectiveOperation>(std::move(request), timeout());
  operation->refusal = reason;
  collectives_->submit(operation);
  std::unique_lock<std::mutex> lock(collectives_->mutex);
  collectives_->progress();
  lock.unlock();
  if (!operation->finished()) runtime_->progress_engine->activate(collectives_);
}

// A group of one: the input is the result, but for the arithmetic of AVG and PREMUL_SUM.
void Communicator::run_alone(const Request& request) {
  if (request.before) request.before();
  if (request.output.num_chunks() > 0 && !reduces(request.collective)) {
    const size_t numel = request.input.numel(0);
    PYCOLL_CHECK_ARG(numel == request.output.numel(0), name(request.collective), " sends ", numel,
                     " elements to this rank, which expects ", request.output.numel(0),
                     "; give both split sizes that agree");
    request.input.for_each_run(
        0, 0, numel, request.itemsize(), [&](std::byte* data, size_t offset, size_t run_numel) {
          request.output.copy_to_chunk(data, 0, offset, run_numel, request.itemsize());
        });
  } else if (reduces(request.collective)) {
    cpu::Operand operand;
    operand.factor = request.factor;
    cpu::ReduceArgs args = reduce_args(request, 1);
    args.operands = &operand;
    args.num_operands = 1;
    for_each_common_run(request, {0, 0, request.numel, 0},
                        [&](std::byte* input, std::byte* output, size_t, size_t numel) {
                          operand.data = input;
                          args.dst = output;
                          args.numel = numel;
                          cpu::reduce(args);
                        });
  }
  if (request.after) request.after();
  sequence_alone_.fetch_add(1);
}

// ---- messages

void Communicator::check_peer(const char* argument, int peer) const {
  PYCOLL_CHECK_ARG(peer >= 0 && peer < world_size_, argument, " ", peer,
                   " is not a rank of this group of ", world_size_);
  PYCOLL_CHECK_ARG(peer != rank_, argument, " ", peer,
                   " is this rank itself: a message to oneself is not sent; copy the tensor");
}

std::shared_ptr<Operation> Communicator::send(const void* data, size_t nbytes, DType dtype, int dst,
                                              int tag, std::chrono::milliseconds timeout) {
  check_open();
  check_peer("dst", dst);
  group_->check_usable();
  auto operation = std::make_shared<MessageOperation>(true, const_cast<void*>(data), nbytes, dtype,
                                                      dst, tag, timeout);
  messages_->submit(operation);
  if (!push(*operation, false)) drive_or_abort(messages_);
  return operation;
}

std::shared_ptr<Operation> Communicator::receive(void* data, size_t nbytes, DType dtype, int src,
                                                 int tag, std::chrono::milliseconds timeout,
                                                 std::function<void()> after) {
  check_open();
  if (src != kAnySource) check_peer("src", src);
  PYCOLL_CHECK_ARG(world_size_ > 1, "nobody can send to the only rank of a group");
  group_->check_usable();
  auto operation =
      std::make_shared<MessageOperation>(false, data, nbytes, dtype, src, tag, timeout);
  operation->after = std::move(after);
  messages_->submit(operation);
  // A short message needs nobody here until it is waited for; a long one has to be cleared before its data comes.
  if (!push(*operation, false) && nbytes > group_->facts().eager_bytes) drive_or_abort(messages_);
  return operation;
}

// ---- waiting

std::shared_ptr<Driver> Communicator::driver_of(const Operation& operation) const {
  if (dynamic_cast<const MessageOperation*>(&operation) != nullptr) return messages_;
  return collectives_;
}

bool Communicator::wait_driving(const Operation& operation, const std::shared_ptr<Driver>& driver,
                                Deadline patience) {
  struct Leaving {
    const std::function<void()>& callback;
    ~Leaving() {
      if (callback) callback();
    }
  } leaving{before_leaving_wait_};
  std::vector<Wait> waits;
  bool check = false;
  WaiterScope scope(driver, runtime_->progress_engine.get());
  const auto arrived = [&] { return operation.finished() || any_ready(waits); };
  while (true) {
    waits.clear();
    {
      std::lock_guard<std::mutex> lock(driver->mutex);
      driver->progress();
      if (check) driver->check();
      scope.pending = driver->watch(&waits);
    }
    driver->report_failure();
    if (operation.finished()) return true;
    if (patience.passed()) return false;
    check = !wait_slice(arrived, runtime_->endpoint->bell(), spin_,
                        Deadline::earlier(patience, operation.deadline()));
    if (check && interrupt_) interrupt_();
  }
}

bool Communicator::wait(const std::shared_ptr<Operation>& operation, Deadline patience) {
  if (operation->finished()) return true;
  if (forked()) check_open();
  return wait_driving(*operation, driver_of(*operation), patience);
}

bool Communicator::push(const Operation& operation, bool check) {
  if (operation.finished() || forked()) return operation.finished();
  const std::shared_ptr<Driver> driver = driver_of(operation);
  std::unique_lock<std::mutex> lock(driver->mutex, std::try_to_lock);
  if (lock.owns_lock()) {
    driver->progress();
    if (check && !operation.finished()) driver->check();
  }
  if (lock.owns_lock()) lock.unlock();
  driver->report_failure();
  return operation.finished();
}

void Communicator::drive_in_background(const std::shared_ptr<Operation>& operation) {
  if (!operation->finished() && !forked())
    runtime_->progress_engine->activate(driver_of(*operation));
}

void Communicator::call_later(std::function<void()> callback) {
  runtime_->callbacks.submit(std::move(callback));
}

// The words are those that programs written for torch's own monitored barrier look for.
std::string Communicator::monitored_failure(const std::vector<int>& missing,
                                            std::chrono::milliseconds timeout) const {
  std::string ranks = list_ranks(missing);
  ranks[0] = 'R';
  const std::string text =
      concat(ranks, " failed to pass monitoredBarrier in ", timeout.count(), " ms");
  if (rank_ != 0) {
    return concat("Rank ", rank_,
                  " successfully reached monitoredBarrier, but received errors while ",
                  "waiting for send/recv from rank 0: ", text);
  }
  return timeout.count() == 0 ? concat("Rank 0 timed out in monitoredBarrier: ", text) : text;
}

void Communicator::monitored_barrier(std::chrono::milliseconds timeout, bool wait_all_ranks) {
  check_open();
  if (group_ == nullptr) return;
  group_->check_usable();
  std::lock_guard<std::mutex> lock(monitored_mutex_);
  const Deadline deadline = Deadline::after(timeout);
  const uint64_t number = monitored_ + 1;
  group_->post_monitored(number);
  // A rank that gives up takes its post back: who has been seen once has come, whatever follows.
  std::vector<int> missing;
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_) missing.push_back(r);
  }
  const auto all_have_come = [&] {
    std::erase_if(missing, [&](int r) { return group_->monitored(r, number).ready(); });
    return missing.empty();
  };
  while (!wait_slice(all_have_come, runtime_->endpoint->bell(), spin_, deadline)) {
    if (interrupt_) interrupt_();
    for (const int r : missing) group_->check_member(r);
    if (deadline.passed()) break;
  }
  if (missing.empty()) {
    monitored_ = number;
    return;
  }
  group_->post_monitored(monitored_);
  if (!wait_all_ranks) missing.resize(1);
  fail(ErrorKind::kTimeout, monitored_failure(missing, timeout));
}

// ---- the end

void Communicator::abort(const std::string& reason) {
  if (group_ == nullptr || forked()) return;
  group_->poison(ErrorKind::kAborted, reason);
  const auto error = std::make_exception_ptr(Error(ErrorKind::kAborted, "pycoll: " + reason));
  {
    std::lock_guard<std::mutex> lock(collectives_->mutex);
    collectives_->fail_all(error);
  }
  std::lock_guard<std::mutex> lock(messages_->mutex);
  messages_->fail_all(error);
}

// Drives what has been issued but not waited for, so that peers get what they were promised.
void Communicator::flush(Deadline deadline) {
  const auto push = [&](Driver* driver, const auto& done) {
    std::vector<Wait> waits;
    while (true) {
      waits.clear();
      {
        std::lock_guard<std::mutex> lock(driver->mutex);
        driver->progress();
        driver->check();
        if (!driver->watch(&waits) || done()) return;
      }
      if (deadline.passed()) return;
      wait_slice([&] { return any_ready(waits); }, runtime_->endpoint->bell(), spin_, deadline);
    }
  };
  push(collectives_.get(), [] { return false; });
  push(messages_.get(), [&] { return !messages_->has_unsent(); });
}

void Communicator::close(std::chrono::milliseconds patience) {
  if (closed_.exchange(true) || group_ == nullptr || forked()) return;
  if (group_->state() == GroupState::kOpen) flush(Deadline::after(patience));
  runtime_->progress_engine->remove(collectives_.get());
  runtime_->progress_engine->remove(messages_.get());
  const auto error = std::make_exception_ptr(Error(
      ErrorKind::kAborted,
      concat("pycoll: rank ", rank_, " destroyed the group while this operation was pending")));
  {
    std::lock_guard<std::mutex> lock(collectives_->mutex);
    collectives_->fail_all(error);
  }
  {
    std::lock_guard<std::mutex> lock(messages_->mutex);
    messages_->fail_all(error);
  }
  group_->leave();
}

void Communicator::prepare_for_exit(Deadline deadline) {
  if (closed_.load() || group_ == nullptr || forked()) return;
  if (group_->state() == GroupState::kOpen) flush(deadline);
  // What callbacks start is completed on their own threads.
  runtime_->callbacks.drain(deadline);
  runtime_->progress_engine->stop();
}

void Communicator::leave() {
  if (group_ != nullptr && !closed_.load() && !forked()) group_->leave();
}

}  // namespace pycoll
