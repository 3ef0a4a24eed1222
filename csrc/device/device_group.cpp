#include "device/device_group.h"

#include <algorithm>
#include <thread>

#include "base/env.h"
#include "base/log.h"
#include "device/failure_text.h"
#include "device/fingerprint.h"
#include "engine/exchange_values.h"

namespace pycoll::device {
namespace {

constexpr int kCollectives = -1;
constexpr const char* kAuto = "auto";
constexpr std::chrono::milliseconds kPatienceWithThoseWhoLeft{1000};

// What a rank tells the others before any kernel runs.
struct Introduction {
  Token address_space;
  Token device;
  int32_t architecture;
  int32_t num_multiprocessors;
  uint64_t settings;  // a hash of what ranks must have set alike
};

// Of the device, for as long as somebody has it.
struct DeviceMemory {
  DeviceMemory(std::shared_ptr<Device> device, size_t nbytes)
      : device(std::move(device)), data(this->device->allocate(nbytes)) {}
  ~DeviceMemory() { device->release(data); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  const std::shared_ptr<Device> device;
  std::byte* const data;
};

uint64_t nanoseconds(std::chrono::milliseconds timeout) {
  constexpr int64_t kMost = int64_t{1} << 43;  // milliseconds; as nanoseconds they fit 64 bits
  return static_cast<uint64_t>(std::clamp<int64_t>(timeout.count(), 1, kMost)) * 1'000'000;
}

}  // namespace

std::shared_ptr<DeviceGroup> DeviceGroup::create(std::shared_ptr<Device> device,
                                                 std::shared_ptr<Communicator> communicator,
                                                 const GroupOptions& options,
                                                 const SharePeerMemory& share) {
  PYCOLL_CHECK_ARG(device->capture_id(device->current_stream()) == 0,
                   "the first operation of a group on a device is being captured into a graph, but "
                   "it has to make memory and meet the other ranks; call one before the capture, "
                   "such as barrier()");
  std::shared_ptr<DeviceGroup> self;
  try {
    self.reset(new DeviceGroup(std::move(device), communicator, options));
  } catch (const Error& error) {
    communicator->refuse(Collective::kAllGather, error.what());
    throw;
  }
  self->agree();
  try {
    self->make_workspace(share);
  } catch (const Error& error) {
    communicator->abort(concat("rank ", communicator->rank(),
                               " cannot make memory for the group on its device: ", error.what()));
    throw;
  }
  return self;
}

DeviceGroup::DeviceGroup(std::shared_ptr<Device> device, std::shared_ptr<Communicator> communicator,
                         const GroupOptions& options)
    : device_(std::move(device)),
      communicator_(std::move(communicator)),
      interrupt_(options.interrupt) {
  const Env env = Env::read();
  facts_.architecture = device_->architecture();
  facts_.world_size = communicator_->world_size();
  facts_.algorithm = options.algorithm;
  if (!env.cuda_algorithm.empty()) facts_.algorithm = env.cuda_algorithm;
  const std::vector<std::string> names = algorithm_names();
  PYCOLL_CHECK_ARG(
      std::find(names.begin(), names.end(), facts_.algorithm) != names.end(),
      "PYCOLL_CUDA_ALGORITHM '", facts_.algorithm,
      "' is unknown; use auto, direct, one_shot, two_shot, ring, ring_ll128 or multimem");
  facts_.measured = parse_rows(options.rows);
  PYCOLL_CHECK_ARG(facts_.world_size <= cuda::kMaxRanks, "the group has ", facts_.world_size,
                   " ranks; CUDA kernels take ", cuda::kMaxRanks);
}

DeviceGroup::~DeviceGroup() { close(std::chrono::milliseconds(0)); }

// What selection and grids depend on is the same on all ranks, or no kernel runs.
void DeviceGroup::agree() {
  uint64_t settings = 0xcbf29ce484222325;
  const auto mix = [&](uint64_t number) { settings = (settings ^ number) * 0x100000001b3; };
  for (const char c : facts_.algorithm) mix(static_cast<uint8_t>(c));
  for (const Row& row : facts_.measured) {
    for (const uint64_t field :
         {static_cast<uint64_t>(row.architecture), static_cast<uint64_t>(row.world_size),
          static_cast<uint64_t>(row.collective), static_cast<uint64_t>(row.algorithm),
          static_cast<uint64_t>(row.num_blocks), row.most_nbytes})
      mix(field);
  }
  const auto all =
      exchange_values(communicator_.get(), Introduction{address_space_token(), device_->identity(),
                                                        device_->architecture(),
                                                        device_->num_multiprocessors(), settings});
  int most_blocks = sizes_of(facts_.architecture).num_blocks;
  bool some_share_a_process = false;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto refuse = [&](const char* what, const auto& of_zero, const auto& of_rank,
                            const char* remedy) {
      fail(ErrorKind::kMismatch, "ranks cannot use their devices together: ", what, " is ", of_zero,
           " on rank 0 and ", of_rank, " on rank ", rank, "; ", remedy);
    };
    if (all[rank].architecture != all[0].architecture)
      refuse("the architecture", all[0].architecture, all[rank].architecture,
             "make a group of equal devices");
    if (all[rank].settings != all[0].settings)
      refuse("the hash of PYCOLL_CUDA_ALGORITHM and the tuning table", all[0].settings,
             all[rank].settings, "set the same on all ranks");
    all_in_one_process_ &= all[rank].address_space == all[0].address_space;
    for (size_t other = 0; other < rank; ++other)
      some_share_a_process |= all[rank].address_space == all[other].address_space;
    // Blocks of ranks that share a device have to be there at once.
    const auto sharing = std::count_if(all.begin(), all.end(), [&](const Introduction& other) {
      return other.device == all[rank].device;
    });
    most_blocks = std::min(most_blocks, all[rank].num_multiprocessors / static_cast<int>(sharing));
  }
  facts_.most_blocks = std::max(most_blocks, 1);
  if (some_share_a_process && !all_in_one_process_)
    fail(ErrorKind::kMismatch,
         "some ranks of the group share a process and others do not; put all into one process, or "
         "each into its own");
}

void DeviceGroup::make_workspace(const SharePeerMemory& share) {
  Workspace::Shape shape;
  shape.rank = communicator_->rank();
  shape.world_size = facts_.world_size;
  shape.sizes = sizes_of(facts_.architecture);
  shape.most_blocks = facts_.most_blocks;
  shape.has_ring = facts_.algorithm == device::name(Algorithm::kRing) ||
                   facts_.algorithm == device::name(Algorithm::kRingLL128);
  const size_t nbytes = Workspace::shared_bytes(shape);
  PeerMemory memory;
  if (all_in_one_process_) {
    // Every rank keeps everybody's: a neighbour on a ring may write to a rank that has ended.
    auto mine = std::make_shared<DeviceMemory>(device_, nbytes);
    std::vector<std::shared_ptr<DeviceMemory>> all;
    for (const uint64_t address :
         exchange_values(communicator_.get(), reinterpret_cast<uint64_t>(&mine)))
      all.push_back(*reinterpret_cast<const std::shared_ptr<DeviceMemory>*>(address));
    for (const auto& each : all) memory.of_rank.push_back(each->data);
    // Until all have copied what `mine` is.
    communicator_->run(Request{}, communicator_->timeout());
    memory.owner = std::make_shared<decltype(all)>(std::move(all));
  } else {
    memory = share(nbytes);
    device_->clear(memory.of_rank[static_cast<size_t>(shape.rank)], nbytes);
  }
  workspace_ = std::make_unique<Workspace>(shape, device_, std::move(memory));
  // No kernel before all memory is zero.
  communicator_->run(Request{}, communicator_->timeout());
  PYCOLL_LOG(LogLevel::kInfo, "rank ", shape.rank, " of ", shape.world_size, ": ", nbytes >> 10,
             " KiB on a device of architecture ", facts_.architecture, ", ", facts_.most_blocks,
             " blocks, algorithm ", facts_.algorithm);
}

// ---- streams

Stream& DeviceGroup::own_stream(int index) {
  const auto found = streams_.find(index);
  if (found != streams_.end()) return found->second;
  return streams_.emplace(index, device_->new_stream()).first->second;
}

// An operation must not overtake the one before. Between a graph and what is outside of it there are no edges: the streams that graphs
// are launched into order them.
void DeviceGroup::order(const Stream& stream, const Launched& last) {
  if (last.event == nullptr || last.stream == stream) return;
  if (last.capture == device_->capture_id(stream)) device_->wait(stream, *last.event);
}

DeviceGroup::Launched DeviceGroup::finish(const Stream& stream, uint64_t sequence, bool is_aside) {
  return {device_->record(stream), stream, device_->capture_id(stream), sequence, is_aside};
}

void DeviceGroup::keep(const Launched& launched, std::shared_ptr<void> used) {
  if (!launched.is_aside) return;
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.emplace_back(launched, std::move(used));
}

// On a thread of the program, since Python's objects may go with it.
void DeviceGroup::drop_kept() {
  // While a stream is captured no event may be asked.
  if (device_->capture_id(device_->current_stream()) != 0) return;
  std::vector<std::shared_ptr<void>> dropped;  // outside the lock
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(kept_, [&](auto& entry) {
    const Launched& launched = entry.first;
    const bool has_gone = launched.capture == 0
                              ? device_->has_passed(*launched.event)
                              : device_->capture_id(launched.stream) != launched.capture;
    if (has_gone) dropped.push_back(std::move(entry.second));
    return has_gone;
  });
}

// Symmetric tensors are not staged, unless they are so small that one-shot is faster, or something else was asked for. `*mapped` is
// emptied where they are staged after all.
Choice DeviceGroup::choose(const Request& request, std::optional<MappedTensor>* mapped) const {
  Choice choice = select(request, facts_);
  if (choice.algorithm == Algorithm::kMultimem) {
    if (*mapped && fits_multimem(request, **mapped, device_->launchers(), facts_.world_size))
      return choice;
    Facts facts = facts_;
    facts.algorithm = kAuto;
    choice = select(request, facts);
  }
  const bool is_asked_for = facts_.algorithm != kAuto && facts_.algorithm != "multimem";
  const bool is_staged =
      choice.algorithm == Algorithm::kTwoShot || choice.algorithm == Algorithm::kDirect;
  if (*mapped && is_staged && !is_asked_for) {
    choice.algorithm = Algorithm::kMapped;
  } else {
    mapped->reset();
  }
  return choice;
}

void DeviceGroup::add_window(PeerMemory memory, size_t nbytes) {
  windows_.add(std::move(memory), nbytes, communicator_->rank());
}

DeviceGroup::Launched DeviceGroup::run(const std::vector<Request>& requests, bool aside,
                                       std::chrono::milliseconds timeout) {
  check_usable();
  for (const Request& request : requests) {
    communicator_->validate(request);
    check_supported(request);
  }
  drop_kept();
  std::unique_lock<std::mutex> lock(mutex_);
  const Stream current = device_->current_stream();
  const Stream stream = aside ? own_stream(kCollectives) : current;
  const bool is_captured = device_->capture_id(current) != 0;
  if (aside) device_->wait(stream, *device_->record(current));
  Launched& last = last_[kCollectives];
  order(stream, last);
  timeout_ = timeout;
  try {
    for (const Request& request : requests) launch(request, stream, timeout);
  } catch (const std::exception& error) {
    // The others have launched theirs, which wait for it. A graph waits for nobody yet.
    lock.unlock();
    if (!is_captured)
      abort(concat("rank ", communicator_->rank(), " could not launch ",
                   pycoll::name(requests.front().collective), ": ", error.what()));
    throw;
  }
  return last = finish(stream, sequence_, aside);
}

void DeviceGroup::launch(const Request& request, const Stream& stream,
                         std::chrono::milliseconds timeout) {
  std::optional<MappedTensor> mapped = find_mapped(request, windows_);
  const Choice choice = choose(request, &mapped);
  const uint64_t print = fingerprint(request, choice, mapped ? mapped->place : 0);
  note(request, choice, ++sequence_, timeout);
  if (request.before) device_->run_on(stream, request.before);
  const Place place{device_.get(), workspace_.get(), stream, print, nanoseconds(timeout)};
  if (mapped) {
    launch_mapped(place, request, choice, *mapped);
  } else {
    launch_collective(place, request, choice);
  }
  if (request.after) device_->run_on(stream, request.after);
}

DeviceGroup::Launched DeviceGroup::run(const MessageRequest& request,
                                       std::chrono::milliseconds timeout) {
  check_usable();
  const int peer = request.message.peer;
  PYCOLL_CHECK_ARG(peer >= 0 && peer < facts_.world_size && peer != communicator_->rank(),
                   request.message.sends ? "dst" : "src", " is ", peer,
                   ", which is not another rank of this group of ", facts_.world_size);
  drop_kept();
  std::lock_guard<std::mutex> lock(mutex_);
  const int index = 2 * peer + (request.message.sends ? 1 : 0);
  const Stream stream = own_stream(index);
  device_->wait(stream, *device_->record(device_->current_stream()));
  Launched& last = last_[index];
  order(stream, last);
  timeout_ = timeout;
  if (request.before) device_->run_on(stream, request.before);
  const uint64_t print = message_fingerprint(request.dtype, request.tag);
  launch_message({device_.get(), workspace_.get(), stream, print, nanoseconds(timeout)},
                 request.message);
  if (request.after) device_->run_on(stream, request.after);
  return last = finish(stream, ++sequence_, true);
}

void DeviceGroup::refuse(const std::string& reason) {
  if (facts_.world_size == 1 || failed_.load()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const Stream stream = own_stream(kCollectives), other = device_->new_stream();
  Launched& last = last_[kCollectives];
  if (last.event != nullptr && last.capture != 0) return;  // a graph waits for nobody yet
  order(stream, last);
  order(other, last);
  // Long enough for peers to come, and ended by the failure of the group anyway.
  launch_refusal({device_.get(), workspace_.get(), stream, refusal_fingerprint(),
                  nanoseconds(communicator_->timeout())},
                 other);
  device_->wait(stream, *device_->record(other));  // both count epochs that the next operation does
  last = finish(stream, ++sequence_, true);
  refusal_ = reason;
}

void DeviceGroup::join(const Launched& launched) {
  const Stream current = device_->current_stream();
  const uint64_t capture = device_->capture_id(current);
  PYCOLL_CHECK_ARG(capture == 0 || capture == launched.capture,
                   "an operation from before the capture is waited for within it, but a graph "
                   "cannot wait for what is outside of it; call wait() before the capture");
  order(current, launched);
}

bool DeviceGroup::has_ended(const Launched& launched) {
  return launched.capture == 0 && device_->has_passed(*launched.event);
}

bool DeviceGroup::synchronise(const Launched& launched, Deadline patience) {
  PYCOLL_CHECK_ARG(launched.capture == 0,
                   "an operation that was captured into a graph cannot be waited for by the host; "
                   "launch the graph and synchronise with its stream");
  bool in_time = true;
  struct TimedOut {};
  try {
    device_->synchronise(*launched.event, [&] {
      watch();
      if (interrupt_) interrupt_();
      if (patience.passed() && !has_ended(launched)) throw TimedOut{};
    });
  } catch (const TimedOut&) {
    in_time = false;
  }
  check_usable();
  return in_time;
}

// ---- failures

void DeviceGroup::note(const Request& request, const Choice& choice, uint64_t sequence,
                       std::chrono::milliseconds timeout) {
  pycoll::Event event;
  event.sequence = sequence;
  event.operation = pycoll::name(request.collective);
  event.algorithm = device::name(choice.algorithm);
  event.memory_path = "device";
  event.dtype = request.dtype;
  event.wire_dtype = request.wire ? request.wire->dtype : request.dtype;
  event.op = request.op;
  event.peer = has_root(request.collective) ? request.root : -1;
  event.nbytes = request.nbytes();
  event.timeout_ms = timeout.count();
  event.queued_ns = now_ns();
  communicator_->note(event);
}

std::string DeviceGroup::text_of_record() {
  std::lock_guard<std::mutex> lock(mutex_);
  return describe_failure(workspace_->record(), communicator_->rank(), timeout_, refusal_);
}

std::string DeviceGroup::failure() {
  watch();
  std::lock_guard<std::mutex> lock(mutex_);
  return failed_.load() ? failure_ : "";
}

void DeviceGroup::check_usable() {
  communicator_->check_open();
  const std::string text = failure();
  if (text.empty()) return;
  const auto kind = static_cast<cuda::FailureKind>(workspace_->record().kind);
  throw Error(kind == cuda::FailureKind::kDeadline   ? ErrorKind::kTimeout
              : kind == cuda::FailureKind::kMismatch ? ErrorKind::kMismatch
                                                     : ErrorKind::kPeerFailed,
              text);
}

bool DeviceGroup::has_pending() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(last_.begin(), last_.end(), [&](const auto& entry) {
    const Launched& last = entry.second;
    return last.event != nullptr && last.capture == 0 && !device_->has_passed(*last.event);
  });
}

// Why kernels that are in streams cannot end: a peer that has failed, died or left.
std::string DeviceGroup::trouble_with_peers() {
  const std::shared_ptr<pycoll::Group>& group = communicator_->group();
  for (int peer = 0; group != nullptr && peer < facts_.world_size; ++peer) {
    if (peer == communicator_->rank()) continue;
    try {
      group->check_member(peer);
    } catch (const Error& error) {
      if (!has_pending()) return "";
      // A rank may leave when its own part has ended, and the rest of the others' is then about to.
      std::lock_guard<std::mutex> lock(mutex_);
      if (!left_since_) left_since_ = Deadline::after(kPatienceWithThoseWhoLeft);
      if (group->has_left(peer) && !left_since_->passed()) continue;
      return error.what();
    }
  }
  return "";
}

void DeviceGroup::watch() {
  if (failed_.load()) return;
  const auto* kind = &workspace_->record().kind;
  const bool has_record = __atomic_load_n(kind, __ATOMIC_ACQUIRE) != 0;
  std::string text = has_record ? text_of_record() : communicator_->failure();
  if (text.empty()) text = trouble_with_peers();
  if (text.empty()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed_.load()) return;
    failure_ = text;
    failed_.store(true);
  }
  // The others hear of it first: a device in trouble may refuse to end its kernels.
  constexpr size_t kPrefix = sizeof("pycoll: ") - 1;
  communicator_->abort(text.substr(text.rfind("pycoll: ", 0) == 0 ? kPrefix : 0));
  end_kernels();
}

void DeviceGroup::end_kernels() {
  if (!kernels_ended_.exchange(true)) device_->set_word(workspace_->abort_word(), 1);
}

void DeviceGroup::abort(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = concat("pycoll: ", reason);
    failed_.store(true);
  }
  communicator_->abort(reason);
  end_kernels();
}

void DeviceGroup::close(std::chrono::milliseconds patience) {
  std::map<int, Launched> last;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(closed_, true) || communicator_->forked()) return;
    last = last_;
  }
  if (workspace_ == nullptr) return;
  const Deadline deadline = Deadline::after(patience);
  struct TimedOut {};
  for (const auto& [index, launched] : last) {
    if (launched.event == nullptr || launched.capture != 0) continue;
    try {
      device_->synchronise(*launched.event, [&] {
        if (deadline.passed()) throw TimedOut{};
      });
    } catch (const TimedOut&) {
      end_kernels();
      device_->synchronise(*launched.event, [] {});
    }
  }
}

}  // namespace pycoll::device
