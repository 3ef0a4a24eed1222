// What one rank of one process owns and its groups share: a segment, a bell, and the connections to peers.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "base/process.h"
#include "bootstrap/blob.h"
#include "memory/arena.h"
#include "memory/shared_heap.h"
#include "sync/bell.h"
#include "sync/liveness.h"

namespace pycoll {

// Another endpoint, as seen from here. `liveness` is null for an endpoint of this very process.
struct Peer {
  Token id;
  std::shared_ptr<Segment> segment;
  std::shared_ptr<Liveness> liveness;

  Bell* bell() const { return reinterpret_cast<Bell*>(segment->base()); }
  bool alive() const { return liveness == nullptr || liveness->alive(); }
};

class Endpoint {
 public:
  static std::shared_ptr<Endpoint> create(size_t segment_bytes);
  ~Endpoint();

  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const Token& id() const { return id_; }
  Arena& arena() { return arena_; }
  // Of user tensors. In a forked child: the parent's, not to be touched.
  SharedHeap& heap() { return heap_; }
  std::byte* base() const { return segment_->base(); }
  Bell* bell() const { return reinterpret_cast<Bell*>(segment_->base()); }
  // Made before a fork that lies between then and now: nothing may be touched.
  bool forked() const { return fork_epoch_ != fork_epoch(); }

  // Memory for a group's page. It is never used for anything else afterwards: peers may still ask the page of a group that
  // they have left whether its owner has left too, and what they read must then be a page's atomic words.
  Region allocate_page(size_t nbytes);
  // The page may be taken for another group once `unused()` holds.
  void retire_page(Region page, std::function<bool()> unused);

  // Endpoints connected so far.
  int num_peers();

  // What others need to connect to this endpoint. Valid as long as it lives.
  void write_greeting(BlobWriter* blob) const;

  // The peers of a group, by rank (null for `rank` itself), from what each wrote. Connects to those not known yet: a rank
  // calls those below it and is called by those above. `secret` is the group's; only who knows it is let in. All ranks of
  // the group call this at about the same time. Raises kSystem when a rank cannot be reached on this host.
  std::vector<std::shared_ptr<Peer>> connect(std::vector<BlobReader>* greetings, int rank,
                                             const Token& secret, Deadline deadline,
                                             const InterruptCheck& interrupt);

 private:
  struct Greeting;
  struct Hello;

  explicit Endpoint(std::shared_ptr<Segment> segment);
  static Greeting read_greeting(BlobReader* blob);
  static std::string listener_name(const Token& id);

  std::shared_ptr<Peer> find(const Token& id);
  std::shared_ptr<Peer> share(const Greeting& greeting);
  void call(const Greeting& greeting, int peer_rank, const Token& secret, Deadline deadline,
            const InterruptCheck& interrupt);
  void answer(UniqueFd socket, Deadline deadline, const InterruptCheck& interrupt);
  void add_peer(const Token& id, const UniqueFd& fd, uint64_t reserved, UniqueFd socket);
  void drop_dead_peers();
  Hello make_hello(const Token& secret, const Token& to) const;

  const Token id_;
  const uint32_t fork_epoch_;
  std::shared_ptr<Segment> segment_;
  Arena arena_;
  SharedHeap heap_;
  UniqueFd listener_;

  std::mutex mutex_;  // of what follows
  std::map<Token, std::shared_ptr<Peer>> peers_;
  std::vector<UniqueFd> spare_sockets_;  // of pairs that called each other at the same time
  std::multiset<Token> secrets_;         // of groups being made
  struct IdlePage {
    Region region;
    std::function<bool()> unused;
  };
  std::vector<IdlePage> idle_pages_;
};

}  // namespace pycoll
