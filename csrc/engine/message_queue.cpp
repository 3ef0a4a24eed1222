#include "engine/message_queue.h"

#include <algorithm>
#include <cstring>

namespace pycoll {
namespace {

constexpr size_t kNumSlots = 16;

enum class FrameKind : uint32_t {
  kMessage,   // a whole message
  kAnnounce,  // a message too long for one frame waits to be cleared
  kClear,     // to the sender: send it
  kDiscard,   // to the sender: it will not be taken
  kData,      // a part of a cleared message
};

}  // namespace

struct alignas(64) MessageQueue::FrameHeader {
  FrameKind kind;
  int32_t tag;
  DType dtype;
  uint64_t id;
  uint64_t nbytes;  // of the whole message
  uint64_t offset;  // of this part
  uint64_t length;  // of this frame's payload
};

std::string MessageOperation::describe() const {
  return concat(is_send ? "send to rank " : "receive from ",
                is_send              ? concat(peer)
                : peer == kAnySource ? "any rank"
                                     : concat("rank ", peer),
                ", tag ", tag, ", ", nbytes / itemsize(dtype), " x ", name(dtype));
}

MessageQueue::MessageQueue(std::shared_ptr<Group> group, EventRing* events)
    : group_(std::move(group)),
      events_(events),
      payload_bytes_(round_up(group_->facts().eager_bytes, 64)),
      peers_(static_cast<size_t>(group_->world_size())) {}

MessageQueue::~MessageQueue() {
  if (group_->endpoint().forked()) return;
  for (int r = 0; r < group_->world_size(); ++r) {
    const PeerState& state = peers_[static_cast<size_t>(r)];
    if (state.out != nullptr) group_->keep_until_closed(state.out->region());
  }
}

void MessageQueue::submit(const OperationPtr& operation) {
  Event& event = operation->event;
  event.operation = operation->is_send ? "send" : "recv";
  event.peer = operation->peer;
  event.dtype = event.wire_dtype = operation->dtype;
  event.nbytes = operation->nbytes;
  event.started_ns = event.queued_ns;
  event.algorithm = operation->nbytes <= payload_bytes_ ? "eager" : "rendezvous";
  std::lock_guard<std::mutex> lock(submitted_mutex_);
  submitted_.push_back(operation);
}

void MessageQueue::progress() {
  std::deque<OperationPtr> submitted;
  {
    std::lock_guard<std::mutex> lock(submitted_mutex_);
    submitted.swap(submitted_);
  }
  for (const OperationPtr& operation : submitted) {
    if (operation->is_send) {
      peers_[static_cast<size_t>(operation->peer)].unsent.push_back(operation);
    } else if (!match_unexpected(operation)) {
      posted_.push_back(operation);
    }
  }
  for (int r = 0; r < group_->world_size(); ++r) {
    if (r == group_->rank()) continue;
    read_frames(r);
    write_frames(r);
  }
}

// ---- sending

SharedSendLane& MessageQueue::out_lane(int peer) {
  PeerState& state = peers_[static_cast<size_t>(peer)];
  if (state.out == nullptr) {
    state.out =
        std::make_unique<SharedSendLane>(&group_->endpoint(), peer, group_->member(peer).bell,
                                         kNumSlots, sizeof(FrameHeader) + payload_bytes_);
    group_->offer_message_lane(peer, state.out->region().offset);
  }
  return *state.out;
}

void MessageQueue::write_frames(int peer) {
  PeerState& state = peers_[static_cast<size_t>(peer)];
  while (state.has_output() && out_lane(peer).writable().ready()) {
    write_frame(&state, state.out->slot());
  }
}

void MessageQueue::write_frame(PeerState* state, std::byte* slot) {
  auto* header = new (slot) FrameHeader{};
  std::byte* payload = slot + sizeof(FrameHeader);
  OperationPtr ended;
  if (!state->clearances.empty()) {
    const Clearance clearance = state->clearances.front();
    state->clearances.pop_front();
    header->kind = clearance.discard ? FrameKind::kDiscard : FrameKind::kClear;
    header->id = clearance.id;
  } else if (!state->unsent.empty()) {
    const OperationPtr send = state->unsent.front();
    state->unsent.pop_front();
    header->tag = send->tag;
    header->dtype = send->dtype;
    header->nbytes = send->nbytes;
    send->event.sequence = ++state->sends;
    if (send->nbytes <= payload_bytes_) {
      header->kind = FrameKind::kMessage;
      header->length = send->nbytes;
      if (send->nbytes > 0) std::memcpy(payload, send->data, send->nbytes);
      ended = send;
    } else {
      header->kind = FrameKind::kAnnounce;
      header->id = send->id = state->next_id++;
      state->announced[send->id] = send;
    }
  } else {
    const OperationPtr send = state->cleared.front();
    state->cleared.pop_front();
    header->kind = FrameKind::kData;
    header->id = send->id;
    header->nbytes = send->nbytes;
    header->offset = send->bytes_done;
    header->length = std::min(payload_bytes_, send->nbytes - send->bytes_done);
    std::memcpy(payload, send->data + send->bytes_done, header->length);
    send->bytes_done += header->length;
    if (send->bytes_done == send->nbytes) {
      ended = send;
    } else {
      state->cleared.push_back(send);  // several long messages take turns
    }
  }
  state->out->commit();
  if (ended != nullptr) {
    ended->event.bytes_written = ended->nbytes;
    finish(ended, nullptr);
  }
}

// ---- receiving

void MessageQueue::open_in_lane(int peer) {
  PeerState& state = peers_[static_cast<size_t>(peer)];
  const Wait offered = group_->message_lane_offered(peer);
  if (state.in != nullptr || !offered.ready()) return;
  const Member& member = group_->member(peer);
  state.in = std::make_unique<SharedReceiveLane>(
      *member.segment, offered.word->load(std::memory_order_acquire), peer, member.bell);
  if (state.in->slot_bytes() < sizeof(FrameHeader) + payload_bytes_) {
    pycoll::fail(ErrorKind::kSystem, "rank ", peer, " made a lane of too small slots");
  }
}

void MessageQueue::read_frames(int peer) {
  open_in_lane(peer);
  PeerState& state = peers_[static_cast<size_t>(peer)];
  while (state.in != nullptr && state.in->readable().ready()) {
    const std::byte* slot = state.in->slot();
    FrameHeader header;
    std::memcpy(&header, slot, sizeof(header));
    if (header.length > payload_bytes_) {
      pycoll::fail(ErrorKind::kSystem, "rank ", peer, " sent a frame of ", header.length,
                   " bytes; the most is ", payload_bytes_);
    }
    switch (header.kind) {
      case FrameKind::kMessage:
      case FrameKind::kAnnounce:
        on_message(peer, header, slot + sizeof(FrameHeader));
        break;
      case FrameKind::kClear:
      case FrameKind::kDiscard:
        on_clearance(peer, header);
        break;
      case FrameKind::kData:
        on_data(peer, header, slot + sizeof(FrameHeader));
        break;
    }
    state.in->release();
  }
}

MessageQueue::OperationPtr MessageQueue::take_posted(int peer, int tag) {
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    if ((*it)->tag == tag && ((*it)->peer == peer || (*it)->peer == kAnySource)) {
      const OperationPtr receive = *it;
      posted_.erase(it);
      return receive;
    }
  }
  return nullptr;
}

void MessageQueue::on_message(int peer, const FrameHeader& header, const std::byte* payload) {
  Unexpected message{peer,
                     header.tag,
                     header.dtype,
                     header.nbytes,
                     header.kind == FrameKind::kAnnounce ? header.id : 0,
                     {}};
  if (const OperationPtr receive = take_posted(peer, header.tag)) {
    deliver(receive, message, payload);
    return;
  }
  if (message.id == 0) message.data.assign(payload, payload + header.length);
  unexpected_.push_back(std::move(message));
}

bool MessageQueue::match_unexpected(const OperationPtr& receive) {
  // Messages that arrived meanwhile come first in their lanes' order.
  for (int r = 0; r < group_->world_size(); ++r) {
    if (r != group_->rank() && (receive->peer == kAnySource || receive->peer == r)) read_frames(r);
  }
  for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
    if (it->tag == receive->tag && (receive->peer == it->peer || receive->peer == kAnySource)) {
      const Unexpected message = std::move(*it);
      unexpected_.erase(it);
      deliver(receive, message, message.data.data());
      return true;
    }
  }
  return false;
}

void MessageQueue::deliver(const OperationPtr& receive, const Unexpected& message,
                           const std::byte* payload) {
  PeerState& state = peers_[static_cast<size_t>(message.peer)];
  receive->peer = receive->event.peer = message.peer;
  receive->event.sequence = ++state.receives;
  const bool fits = message.nbytes == receive->nbytes && message.dtype == receive->dtype;
  if (message.id != 0) {
    state.clearances.push_back(Clearance{message.id, !fits});
    if (fits) state.receiving[message.id] = receive;
  }
  if (!fits) {
    const Error error(
        ErrorKind::kMismatch,
        concat(
            "pycoll: rank ", message.peer, " sent ", message.nbytes / itemsize(message.dtype),
            " x ", name(message.dtype), " (", message.nbytes, " bytes) with tag ", message.tag,
            ", but rank ", group_->rank(), " receives ", receive->nbytes / itemsize(receive->dtype),
            " x ", name(receive->dtype), " (", receive->nbytes,
            " bytes); the message is dropped. Give both sides tensors of the same size and dtype"));
    finish(receive, std::make_exception_ptr(error));
    return;
  }
  if (message.id == 0) {
    if (message.nbytes > 0) std::memcpy(receive->data, payload, message.nbytes);
    receive->bytes_done = receive->event.bytes_read = message.nbytes;
    finish(receive, nullptr);
  }
}

void MessageQueue::on_clearance(int peer, const FrameHeader& header) {
  PeerState& state = peers_[static_cast<size_t>(peer)];
  const auto it = state.announced.find(header.id);
  if (it == state.announced.end()) return;  // the send has failed meanwhile
  const OperationPtr send = it->second;
  state.announced.erase(it);
  if (header.kind == FrameKind::kDiscard) {
    finish(send, nullptr);
  } else {
    state.cleared.push_back(send);
  }
}

void MessageQueue::on_data(int peer, const FrameHeader& header, const std::byte* payload) {
  PeerState& state = peers_[static_cast<size_t>(peer)];
  const auto it = state.receiving.find(header.id);
  if (it == state.receiving.end()) return;  // the receive has failed meanwhile
  const OperationPtr receive = it->second;
  if (header.offset > receive->nbytes || header.length > receive->nbytes - header.offset) {
    pycoll::fail(ErrorKind::kSystem, "rank ", peer, " sent bytes beyond the end of a message");
  }
  std::memcpy(receive->data + header.offset, payload, header.length);
  receive->bytes_done += header.length;
  receive->event.bytes_read = receive->bytes_done;
  if (receive->bytes_done == receive->nbytes) {
    state.receiving.erase(it);
    finish(receive, nullptr);
  }
}

// ---- ends

void MessageQueue::finish(const OperationPtr& operation, std::exception_ptr error) {
  if (error == nullptr && operation->after) {
    try {
      operation->after();
    } catch (...) {
      error = std::current_exception();
    }
  }
  Event event = operation->event;
  event.ended_ns = now_ns();
  event.failed = error != nullptr;
  events_->add(event);
  operation->finish(std::move(error));
  group_->endpoint().bell()->ring_sleepers();
}

template <class Fn>
void MessageQueue::for_each_operation(const Fn& fn) const {
  for (const OperationPtr& receive : posted_) fn(receive);
  for (const PeerState& state : peers_) {
    for (const OperationPtr& send : state.unsent) fn(send);
    for (const auto& [id, send] : state.announced) fn(send);
    for (const OperationPtr& send : state.cleared) fn(send);
    for (const auto& [id, receive] : state.receiving) fn(receive);
  }
}

void MessageQueue::forget(const OperationPtr& operation) {
  posted_.remove(operation);
  for (PeerState& state : peers_) {
    std::erase(state.unsent, operation);
    std::erase(state.cleared, operation);
    std::erase_if(state.announced, [&](const auto& entry) { return entry.second == operation; });
    std::erase_if(state.receiving, [&](const auto& entry) { return entry.second == operation; });
  }
}

void MessageQueue::fail(const OperationPtr& operation, const Error& error) {
  forget(operation);
  failed.store(true, std::memory_order_release);
  const std::string text = error.what();
  group_->poison(error.kind(), text.substr(text.rfind("pycoll: ", 0) == 0 ? 8 : 0));
  finish(operation,
         std::make_exception_ptr(
             Error(error.kind(),
                   text + ". The group can no longer be used: destroy it and make a new one")));
}

void MessageQueue::check_peer_of(const MessageOperation& operation) const {
  group_->check_usable();
  if (operation.peer != kAnySource) {
    group_->check_member(operation.peer);
    return;
  }
  // A member that ended in good order may have sent all it had to; a dead one may be the source waited for.
  int left = 0;
  for (int r = 0; r < group_->world_size(); ++r) {
    if (r == group_->rank()) continue;
    if (!group_->has_left(r)) {
      group_->check_member(r);
      ++left;
    }
  }
  if (left == 0)
    pycoll::fail(ErrorKind::kPeerFailed,
                 "every other rank has left the group: connection closed by all");
}

void MessageQueue::check() {
  progress();  // what has arrived counts before the state of who sent it
  std::vector<OperationPtr> operations;
  for_each_operation([&](const OperationPtr& operation) { operations.push_back(operation); });
  for (const OperationPtr& operation : operations) {
    try {
      check_peer_of(*operation);
      if (operation->deadline().passed()) {
        pycoll::fail(ErrorKind::kTimeout, "rank ", group_->rank(), " timed out in ",
                     operation->describe(), ": Timed out waiting ", operation->timeout().count(),
                     " ms for ",
                     operation->peer == kAnySource ? "any rank" : concat("rank ", operation->peer),
                     " (", operation->bytes_done, " of ", operation->nbytes, " bytes done)");
      }
    } catch (const Error& error) {
      const std::string text = error.what();
      fail(operation,
           error.kind() == ErrorKind::kTimeout
               ? error
               : Error(error.kind(), concat("pycoll: rank ", group_->rank(), " failed in ",
                                            operation->describe(), ": ", text.substr(8))));
    }
  }
}

bool MessageQueue::watch(std::vector<Wait>* waits) const {
  const size_t before = waits->size();
  {
    std::lock_guard<std::mutex> lock(submitted_mutex_);
    if (!submitted_.empty()) waits->push_back(Wait{});
  }
  for (int r = 0; r < group_->world_size(); ++r) {
    if (r == group_->rank()) continue;
    const PeerState& state = peers_[static_cast<size_t>(r)];
    const bool posted =
        std::any_of(posted_.begin(), posted_.end(), [r](const OperationPtr& receive) {
          return receive->peer == r || receive->peer == kAnySource;
        });
    if (posted || state.expects_input() || state.has_output()) {
      waits->push_back(state.in != nullptr ? state.in->readable()
                                           : group_->message_lane_offered(r));
    }
    if (state.has_output() && state.out != nullptr) waits->push_back(state.out->writable());
  }
  return waits->size() > before;
}

void MessageQueue::pending_events(std::vector<Event>* events) const {
  for_each_operation([&](const OperationPtr& operation) { events->push_back(operation->event); });
  std::lock_guard<std::mutex> lock(submitted_mutex_);
  for (const OperationPtr& operation : submitted_) events->push_back(operation->event);
}

void MessageQueue::fail_all(const std::exception_ptr& error) {
  std::vector<OperationPtr> operations;
  for_each_operation([&](const OperationPtr& operation) { operations.push_back(operation); });
  {
    std::lock_guard<std::mutex> lock(submitted_mutex_);
    operations.insert(operations.end(), submitted_.begin(), submitted_.end());
    submitted_.clear();
  }
  for (const OperationPtr& operation : operations) {
    forget(operation);
    finish(operation, error);
  }
}

bool MessageQueue::has_unsent() const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const PeerState& state) { return state.has_output(); });
}

}  // namespace pycoll
