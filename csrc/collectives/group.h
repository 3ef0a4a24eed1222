// A group as algorithms see it: its members' memory, and the signals between them. docs/memory_model.md.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/task.h"
#include "collectives/tuning.h"
#include "lane/shared_lane.h"
#include "memory/endpoint.h"
#include "memory/group_page.h"

namespace pycoll {

// What selection and memory layout depend on. Rank 0's, compared when the group is made.
struct Facts {
  uint64_t payload_bytes = 0;
  uint64_t staging_bytes = 0;
  uint64_t eager_bytes = 0;
  uint64_t compares_call_sites =
      0;  // 1: a call without a tag is tagged with its place in the program
  std::string algorithm = "auto";
  uint64_t direct_access = 0;  // DirectAccess, that of all members; kReadv only where all can
  std::string tuning;          // as parse_tuning() reads it
  std::vector<TunedRow>
      tuned;  // the rows of `tuning` for groups of this size; follows from it, and is not compared
};

struct Member {
  std::shared_ptr<Peer> peer;  // null for this rank
  Segment* segment = nullptr;
  Bell* bell = nullptr;
  GroupPage* page = nullptr;
};

// Who is woken by a post, if asleep.
enum class Wake {
  kNobody,  // nobody waits for this post
  kIfLast,  // all wait for all: the last to post wakes everyone
  kEveryone,
  kRoot,  // only the given rank waits
};

// Used by one thread at a time, the one that drives the group's collectives (except where a method says otherwise).
class Group {
 public:
  Group(std::shared_ptr<Endpoint> endpoint, Facts facts, int rank, std::vector<Member> members,
        Region page_region, uint64_t nonce);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(members_->size()); }
  const Facts& facts() const { return facts_; }
  Endpoint& endpoint() const { return *endpoint_; }
  const Member& member(int rank) const { return (*members_)[static_cast<size_t>(rank)]; }

  // ---- the handshake
  HandshakeLine* handshake_line(int rank, uint64_t sequence) const {
    return member(rank).page->slot(sequence, facts_.payload_bytes);
  }
  void post_handshake(uint64_t sequence);
  // The tag of a call, zero-terminated and cut to what fits, in the page of `rank`.
  char* tag(int rank, uint64_t sequence) const { return member(rank).page->tags[sequence % 2]; }
  Wait handshake(int peer, uint64_t sequence) const {
    return Wait{&handshake_line(peer, sequence)->signal, sequence, peer};
  }

  // ---- rounds: every member posts equally many in an operation
  uint64_t rounds_posted() const { return rounds_posted_; }
  void post_round(Wake wake, int root = 0);
  // `round` counts from the group's beginning, as rounds_posted() does.
  Wait round(int peer, uint64_t round) const {
    return Wait{&member(peer).page->round, round, peer};
  }

  // ---- staging of the running operation
  std::byte* lease_staging(size_t nbytes);
  // Ends the lease once all members have posted as many rounds as this rank has.
  void end_staging();
  // A peer's staging, once one of its rounds of this operation was seen.
  const std::byte* staging(int peer, size_t nbytes) const;

  // ---- direct access to tensors of others. docs/memory_model.md, "Tensors that peers reach directly"
  // While one lives, this rank accesses tensors of others. Raises unless all members are open.
  class Touching {
   public:
    explicit Touching(const Group& group);
    ~Touching();
    Touching(const Touching&) = delete;
    Touching& operator=(const Touching&) = delete;
    // Between blocks: raises when a member has given up, which then waits for the end of this access.
    void check() const { group_.check_all_open(); }

   private:
    const Group& group_;
  };
  // After the group has been poisoned or closed: waits until no living peer accesses tensors of others any more. Ranks that still do
  // at the deadline.
  std::vector<int> await_untouched(Deadline deadline) const;

  // ---- lanes of collectives
  SendLane& lane_to(int peer);
  Wait lane_offered(int peer) const;
  ReceiveLane& lane_from(int peer);

  // ---- lanes of messages, kept by the engine
  void offer_message_lane(int peer, size_t offset);
  Wait message_lane_offered(int peer) const;
  // Gives a region back once no member can look at it any more.
  void keep_until_closed(Region region);
  std::function<bool()> all_others_out_of_use() const;

  // ---- monitored barriers: reached, or (after a failure) not reached after all
  void post_monitored(uint64_t number);
  Wait monitored(int peer, uint64_t number) const {
    return Wait{&member(peer).page->monitored, number, peer};
  }

  // ---- state, from any thread
  // The first reason given counts.
  void poison(ErrorKind kind, const std::string& reason);
  GroupState state() const {
    return static_cast<GroupState>(self().page->state.load(std::memory_order_acquire));
  }
  // Raises if this rank has poisoned the group.
  void check_usable() const;
  // Raises when a wait for `peer` cannot end: it is dead, or has poisoned or closed the group. Looks at that peer only: others
  // may have done their part and gone; whoever still needs one of them fails by itself and hands the reason on.
  void check_member(int peer) const;
  // Closes the group for this rank: peers that still wait for it fail at once.
  void leave();
  // Whether `peer` closed the group in good order.
  bool has_left(int peer) const;
  // Neither left nor dead.
  bool is_present(int peer) const;
  void ring_everyone() const;

 private:
  using Members = std::vector<Member>;
  const Member& self() const { return member(rank_); }
  bool count_arrival(Counter* counter, uint64_t* mine);
  [[noreturn]] void raise_failure_of(int rank) const;
  void check_all_open() const;

  std::shared_ptr<Endpoint> endpoint_;
  const Facts facts_;
  const int rank_;
  const std::shared_ptr<const Members> members_;
  const Region page_region_;
  const uint64_t nonce_;

  uint64_t rounds_posted_ = 0;
  uint64_t handshake_arrivals_[GroupPage::kHandshakeCounters] = {};
  uint64_t round_arrivals_[GroupPage::kRoundCounters] = {};
  Region staging_;
  std::vector<std::unique_ptr<SharedSendLane>> lanes_to_;
  std::vector<std::unique_ptr<SharedReceiveLane>> lanes_from_;
  std::mutex poison_mutex_;
};

}  // namespace pycoll
