// Point-to-point messages of one group. docs/point_to_point.md.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "collectives/group.h"
#include "engine/driver.h"
#include "engine/operation.h"

namespace pycoll {

inline constexpr int kAnySource = -1;

class MessageOperation final : public Operation {
 public:
  MessageOperation(bool is_send, void* data, size_t nbytes, DType dtype, int peer, int tag,
                   std::chrono::milliseconds timeout)
      : Operation(timeout),
        is_send(is_send),
        data(static_cast<std::byte*>(data)),
        nbytes(nbytes),
        dtype(dtype),
        peer(peer),
        tag(tag) {}

  const bool is_send;
  std::byte* const data;
  const size_t nbytes;
  const DType dtype;
  int peer;  // of a receive from any source: kAnySource until a message was matched
  const int tag;
  std::function<void()> after;  // of a receive: run after its last write to `data`

  uint64_t id = 0;  // of a rendezvous, chosen by the sender
  size_t bytes_done = 0;

  std::string describe() const;
};

class MessageQueue final : public Driver {
 public:
  MessageQueue(std::shared_ptr<Group> group, EventRing* events);
  ~MessageQueue() override;

  void submit(const std::shared_ptr<MessageOperation>& operation);

  void progress() override;
  void check() override;
  bool watch(std::vector<Wait>* waits) const override;
  void pending_events(std::vector<Event>* events) const override;
  // Under `mutex`.
  void fail_all(const std::exception_ptr& error);
  // Sends that have not left this rank's memory yet.
  bool has_unsent() const;

 private:
  struct FrameHeader;
  using OperationPtr = std::shared_ptr<MessageOperation>;

  // A message, or the announcement of one, that came before its receive.
  struct Unexpected {
    int peer;
    int tag;
    DType dtype;
    size_t nbytes;
    uint64_t id;  // of an announcement; 0: `data` holds the message
    std::vector<std::byte> data;
  };

  struct Clearance {
    uint64_t id;
    bool discard;  // the receiver cannot take it: the sender is done
  };

  struct PeerState {
    std::unique_ptr<SharedSendLane> out;
    std::unique_ptr<SharedReceiveLane> in;
    std::deque<OperationPtr> unsent;             // in order: not yet in the lane
    std::deque<Clearance> clearances;            // to be sent
    std::map<uint64_t, OperationPtr> announced;  // wait for clearance
    std::deque<OperationPtr> cleared;            // data under way, in turn
    std::map<uint64_t, OperationPtr> receiving;  // cleared receives, by the sender's id
    uint64_t next_id = 1;
    uint64_t sends = 0, receives = 0;  // for the events

    bool has_output() const { return !unsent.empty() || !clearances.empty() || !cleared.empty(); }
    bool expects_input() const { return !announced.empty() || !receiving.empty(); }
  };

  void open_in_lane(int peer);
  SharedSendLane& out_lane(int peer);
  void write_frames(int peer);
  void write_frame(PeerState* state, std::byte* slot);
  void read_frames(int peer);
  void on_message(int peer, const FrameHeader& header, const std::byte* payload);
  void on_clearance(int peer, const FrameHeader& header);
  void on_data(int peer, const FrameHeader& header, const std::byte* payload);
  bool match_unexpected(const OperationPtr& receive);
  OperationPtr take_posted(int peer, int tag);
  // The receive gets this message, or an error that says why it cannot.
  void deliver(const OperationPtr& receive, const Unexpected& message, const std::byte* payload);
  void finish(const OperationPtr& operation, std::exception_ptr error);
  template <class Fn>
  void for_each_operation(const Fn& fn) const;
  void forget(const OperationPtr& operation);
  void fail(const OperationPtr& operation, const Error& error);
  void check_peer_of(const MessageOperation& operation) const;

  const std::shared_ptr<Group> group_;
  EventRing* const events_;
  const size_t payload_bytes_;  // of one frame
  mutable std::mutex submitted_mutex_;
  std::deque<OperationPtr> submitted_;  // since the last progress()
  std::vector<PeerState> peers_;
  std::list<OperationPtr> posted_;  // receives without a message, in order
  std::list<Unexpected> unexpected_;
};

}  // namespace pycoll
