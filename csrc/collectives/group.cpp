#include "collectives/group.h"

#include <cstring>
#include <thread>

namespace pycoll {
namespace {

constexpr std::chrono::microseconds kTouchingSlice{100};

// Whether `member` will never again read what others own in this group.
bool is_out_of_use(const Member& member, uint64_t nonce) {
  return member.page->nonce.load(std::memory_order_acquire) != nonce ||
         member.page->state.load(std::memory_order_acquire) ==
             static_cast<uint32_t>(GroupState::kClosed) ||
         (member.peer != nullptr && !member.peer->alive());
}

}  // namespace

Group::Group(std::shared_ptr<Endpoint> endpoint, Facts facts, int rank, std::vector<Member> members,
             Region page_region, uint64_t nonce)
    : endpoint_(std::move(endpoint)),
      facts_(std::move(facts)),
      rank_(rank),
      members_(std::make_shared<const Members>(std::move(members))),
      page_region_(page_region),
      nonce_(nonce),
      lanes_to_(members_->size()),
      lanes_from_(members_->size()) {}

Group::~Group() {
  if (endpoint_->forked()) return;
  end_staging();
  leave();
  for (const auto& lane : lanes_to_) {
    if (lane != nullptr) keep_until_closed(lane->region());
  }
  endpoint_->retire_page(page_region_, all_others_out_of_use());
}

void Group::leave() {
  self().page->state.store(static_cast<uint32_t>(GroupState::kClosed), std::memory_order_seq_cst);
  ring_everyone();
}

std::function<bool()> Group::all_others_out_of_use() const {
  return [members = members_, nonce = nonce_, rank = rank_] {
    for (size_t r = 0; r < members->size(); ++r) {
      if (static_cast<int>(r) != rank && !is_out_of_use((*members)[r], nonce)) return false;
    }
    return true;
  };
}

void Group::keep_until_closed(Region region) {
  endpoint_->arena().release_when(region, all_others_out_of_use());
}

// True for the last of all members to count this arrival.
bool Group::count_arrival(Counter* counter, uint64_t* mine) {
  const uint64_t all = ++*mine * static_cast<uint64_t>(world_size());
  return counter->value.fetch_add(1, std::memory_order_seq_cst) + 1 == all;
}

void Group::post_handshake(uint64_t sequence) {
  handshake_line(rank_, sequence)->signal.store(sequence, std::memory_order_seq_cst);
  // Two counters: a rank that is seen to have posted may not have counted itself in yet.
  const size_t turn = sequence % GroupPage::kHandshakeCounters;
  if (world_size() == 2 ||
      count_arrival(&member(0).page->handshake_arrivals[turn], &handshake_arrivals_[turn])) {
    ring_everyone();
  }
}

void Group::post_round(Wake wake, int root) {
  self().page->round.store(++rounds_posted_, std::memory_order_seq_cst);
  switch (wake) {
    case Wake::kNobody:
      break;
    case Wake::kIfLast: {
      const size_t turn = rounds_posted_ % GroupPage::kRoundCounters;
      if (world_size() == 2 ||
          count_arrival(&member(0).page->round_arrivals[turn], &round_arrivals_[turn])) {
        ring_everyone();
      }
      break;
    }
    case Wake::kEveryone:
      ring_everyone();
      break;
    case Wake::kRoot:
      member(root).bell->ring_sleepers();
      break;
  }
}

void Group::ring_everyone() const {
  for (int r = 0; r < world_size(); ++r) {
    if (r != rank_) member(r).bell->ring_sleepers();
  }
}

std::byte* Group::lease_staging(size_t nbytes) {
  PYCOLL_CHECK(staging_.nbytes == 0);
  staging_ = endpoint_->arena().allocate(nbytes);
  self().page->staging_offset.store(staging_.offset, std::memory_order_relaxed);
  return endpoint_->arena().address(staging_);
}

void Group::end_staging() {
  if (staging_.nbytes == 0) return;
  endpoint_->arena().release_when(
      std::exchange(staging_, Region{}),
      [members = members_, nonce = nonce_, rank = rank_, last = rounds_posted_] {
        for (size_t r = 0; r < members->size(); ++r) {
          const Member& member = (*members)[r];
          if (static_cast<int>(r) != rank &&
              member.page->round.load(std::memory_order_acquire) < last &&
              !is_out_of_use(member, nonce)) {
            return false;
          }
        }
        return true;
      });
}

const std::byte* Group::staging(int peer, size_t nbytes) const {
  const Member& member = this->member(peer);
  const uint64_t offset = member.page->staging_offset.load(std::memory_order_relaxed);
  if (nbytes > member.segment->reserved() || offset > member.segment->reserved() - nbytes) {
    fail(ErrorKind::kSystem, "the staging of rank ", peer, " lies outside its segment");
  }
  return member.segment->base() + offset;
}

Group::Touching::Touching(const Group& group) : group_(group) {
  group_.self().page->touching.store(1, std::memory_order_seq_cst);
  try {
    group_.check_all_open();
  } catch (...) {
    group_.self().page->touching.store(0, std::memory_order_release);
    throw;
  }
}

Group::Touching::~Touching() { group_.self().page->touching.store(0, std::memory_order_release); }

void Group::check_all_open() const {
  for (int r = 0; r < world_size(); ++r) {
    const auto state = member(r).page->state.load(std::memory_order_seq_cst);
    if (state == static_cast<uint32_t>(GroupState::kOpen)) continue;
    if (r == rank_) check_usable();
    check_member(r);
  }
}

std::vector<int> Group::await_untouched(Deadline deadline) const {
  std::vector<int> touching;
  do {
    touching.clear();
    for (int r = 0; r < world_size(); ++r) {
      const Member& member = this->member(r);
      if (r != rank_ && member.page->touching.load(std::memory_order_seq_cst) != 0 &&
          member.page->nonce.load(std::memory_order_acquire) == nonce_ &&
          (member.peer == nullptr || member.peer->alive())) {
        touching.push_back(r);
      }
    }
    if (touching.empty()) break;
    std::this_thread::sleep_for(kTouchingSlice);
  } while (!deadline.passed());
  return touching;
}

SendLane& Group::lane_to(int peer) {
  auto& lane = lanes_to_[static_cast<size_t>(peer)];
  if (lane == nullptr) {
    // What the longest ring needs, and not one more than that (collectives/ring_pipeline.h).
    const size_t num_slots = 2 * static_cast<size_t>(world_size());
    const size_t slot_bytes = round_up(facts_.staging_bytes / 4, 64);
    lane = std::make_unique<SharedSendLane>(endpoint_.get(), peer, member(peer).bell, num_slots,
                                            slot_bytes);
    self()
        .page->collective_lane(peer, facts_.payload_bytes)
        ->store(lane->region().offset, std::memory_order_seq_cst);
    member(peer).bell->ring_sleepers();
  }
  return *lane;
}

Wait Group::lane_offered(int peer) const {
  return Wait{member(peer).page->collective_lane(rank_, facts_.payload_bytes), 1, peer};
}

ReceiveLane& Group::lane_from(int peer) {
  auto& lane = lanes_from_[static_cast<size_t>(peer)];
  if (lane == nullptr) {
    const size_t offset = lane_offered(peer).word->load(std::memory_order_acquire);
    lane =
        std::make_unique<SharedReceiveLane>(*member(peer).segment, offset, peer, member(peer).bell);
  }
  return *lane;
}

void Group::offer_message_lane(int peer, size_t offset) {
  self()
      .page->message_lane(peer, facts_.payload_bytes, world_size())
      ->store(offset, std::memory_order_seq_cst);
  member(peer).bell->ring_sleepers();
}

Wait Group::message_lane_offered(int peer) const {
  return Wait{member(peer).page->message_lane(rank_, facts_.payload_bytes, world_size()), 1, peer};
}

void Group::post_monitored(uint64_t number) {
  self().page->monitored.store(number, std::memory_order_seq_cst);
  ring_everyone();
}

bool Group::has_left(int peer) const {
  const GroupPage& page = *member(peer).page;
  return page.state.load(std::memory_order_acquire) == static_cast<uint32_t>(GroupState::kClosed) ||
         page.nonce.load(std::memory_order_acquire) != nonce_;
}

bool Group::is_present(int peer) const { return !is_out_of_use(member(peer), nonce_); }

void Group::poison(ErrorKind kind, const std::string& reason) {
  std::lock_guard<std::mutex> lock(poison_mutex_);
  if (state() != GroupState::kOpen) return;
  GroupPage* page = self().page;
  page->failure_kind = static_cast<uint32_t>(kind);
  const size_t length = std::min(reason.size(), GroupPage::kReasonBytes - 1);
  std::memcpy(page->reason, reason.data(), length);
  page->reason[length] = '\0';
  page->state.store(static_cast<uint32_t>(GroupState::kPoisoned), std::memory_order_seq_cst);
  ring_everyone();
  endpoint_->bell()->ring_sleepers();
}

void Group::check_usable() const {
  if (state() == GroupState::kPoisoned) {
    fail(ErrorKind::kAborted,
         "this group can no longer be used, since an earlier operation on it failed (",
         self().page->reason, "); destroy it and make a new one");
  }
}

void Group::raise_failure_of(int rank) const {
  const GroupPage& page = *member(rank).page;
  char reason[GroupPage::kReasonBytes];
  std::memcpy(reason, page.reason, sizeof(reason));
  reason[sizeof(reason) - 1] = '\0';
  fail(ErrorKind::kPeerFailed, "rank ", rank, " gave up: ", reason);
}

void Group::check_member(int peer) const {
  const Member& member = this->member(peer);
  const auto state = static_cast<GroupState>(member.page->state.load(std::memory_order_acquire));
  const bool recycled = member.page->nonce.load(std::memory_order_acquire) != nonce_;
  // A page that was poisoned before it was closed still tells why.
  if (!recycled && state != GroupState::kOpen && member.page->reason[0] != '\0')
    raise_failure_of(peer);
  if (recycled || state == GroupState::kClosed) {
    fail(ErrorKind::kPeerFailed, "rank ", peer,
         " has left the group: connection closed because it destroyed it or ended");
  }
  if (member.peer != nullptr && !member.peer->alive()) {
    fail(ErrorKind::kPeerFailed, "rank ", peer, " (pid ", member.peer->liveness->pid(),
         ") died: connection closed by its end");
  }
}

}  // namespace pycoll
