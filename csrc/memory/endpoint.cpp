#include "memory/endpoint.h"

#include <unistd.h>

#include <algorithm>

#include "topology/partition.h"

namespace pycoll {
namespace {

constexpr std::chrono::milliseconds kAcceptSlice{50};
constexpr std::chrono::milliseconds kHelloTimeout{5000};
constexpr uint64_t kMagic = 0x31306c6c6f637970;  // "pycoll01"
constexpr uint64_t kMostReserved = uint64_t{1} << 46;

}  // namespace

namespace {

// The segments of this process's endpoints: ranks of one process find each other's here, by what they have been told.
class SegmentsHere {
 public:
  void add(const Token& id, const std::shared_ptr<Segment>& segment) {
    std::lock_guard<std::mutex> lock(mutex_);
    segments_[id] = segment;
  }
  void remove(const Token& id) {
    std::lock_guard<std::mutex> lock(mutex_);
    segments_.erase(id);
  }
  std::shared_ptr<Segment> find(const Token& id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = segments_.find(id);
    return it == segments_.end() ? nullptr : it->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<Token, std::weak_ptr<Segment>> segments_;
};

// Never destroyed: endpoints may outlive other statics.
SegmentsHere& segments_here() {
  static SegmentsHere* const instance = new SegmentsHere();
  return *instance;
}

}  // namespace

struct Endpoint::Greeting {
  Token id;
  Token address_space;
};

struct Endpoint::Hello {
  uint64_t magic;
  Token secret;
  Token from, to;
  uint64_t reserved;
};

std::shared_ptr<Endpoint> Endpoint::create(size_t segment_bytes) {
  return std::shared_ptr<Endpoint>(new Endpoint(Segment::create(segment_bytes)));
}

Endpoint::Endpoint(std::shared_ptr<Segment> segment)
    : id_(random_token()),
      fork_epoch_(fork_epoch()),
      segment_(std::move(segment)),
      arena_(segment_),
      heap_(segment_) {
  const Region header = arena_.allocate(sizeof(Bell));
  PYCOLL_CHECK(header.offset == 0);
  listener_ = listen_abstract(listener_name(id_));
  segments_here().add(id_, segment_);
}

Endpoint::~Endpoint() { segments_here().remove(id_); }

Region Endpoint::allocate_page(size_t nbytes) {
  nbytes = round_up(nbytes, Arena::kGrain);
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = idle_pages_.begin(); it != idle_pages_.end(); ++it) {
    if (it->region.nbytes != nbytes || !it->unused()) continue;
    const Region region = it->region;
    idle_pages_.erase(it);
    return region;
  }
  return arena_.allocate(nbytes);
}

void Endpoint::retire_page(Region page, std::function<bool()> unused) {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_pages_.push_back(IdlePage{page, std::move(unused)});
}

std::string Endpoint::listener_name(const Token& id) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text = "pycoll-";
  for (uint8_t byte : id) {
    text += kHex[byte >> 4];
    text += kHex[byte & 15];
  }
  return text;
}

void Endpoint::write_greeting(BlobWriter* blob) const { blob->put(id_).put(address_space_token()); }

Endpoint::Greeting Endpoint::read_greeting(BlobReader* blob) {
  Greeting greeting;
  greeting.id = blob->get<Token>();
  greeting.address_space = blob->get<Token>();
  return greeting;
}

int Endpoint::num_peers() {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(peers_.size());
}

std::shared_ptr<Peer> Endpoint::find(const Token& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = peers_.find(id);
  return it == peers_.end() ? nullptr : it->second;
}

std::shared_ptr<Peer> Endpoint::share(const Greeting& greeting) {
  auto peer = std::make_shared<Peer>(Peer{greeting.id, segments_here().find(greeting.id), nullptr});
  if (peer->segment == nullptr) {
    fail(ErrorKind::kPeerFailed, "a rank of this process has ended while it was making a group");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return peers_.emplace(greeting.id, std::move(peer)).first->second;
}

Endpoint::Hello Endpoint::make_hello(const Token& secret, const Token& to) const {
  return Hello{kMagic, secret, id_, to, segment_->reserved()};
}

void Endpoint::add_peer(const Token& id, const UniqueFd& fd, uint64_t reserved, UniqueFd socket) {
  PYCOLL_CHECK_ARG(reserved > 0 && reserved <= kMostReserved, "a peer announced a segment of ",
                   reserved, " bytes; the most is ", kMostReserved);
  const int pid = peer_credentials(socket).pid;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (peers_.count(id) != 0) {
      spare_sockets_.push_back(std::move(socket));
      return;
    }
  }
  auto peer = std::make_shared<Peer>(Peer{id, Segment::map_peer(fd, reserved),
                                          std::make_shared<Liveness>(std::move(socket), pid)});
  std::lock_guard<std::mutex> lock(mutex_);
  peers_.emplace(id, std::move(peer));
}

void Endpoint::drop_dead_peers() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = peers_.begin(); it != peers_.end();) {
    const bool unused = it->second.use_count() == 1;
    it = unused && !it->second->alive() ? peers_.erase(it) : std::next(it);
  }
}

void Endpoint::call(const Greeting& greeting, int peer_rank, const Token& secret, Deadline deadline,
                    const InterruptCheck& interrupt) {
  UniqueFd socket = connect_abstract(listener_name(greeting.id));
  if (!socket) {
    fail(ErrorKind::kSystem, "rank ", peer_rank,
         " cannot be reached on this host: it has ended, or runs on another host or in another "
         "network "
         "namespace, which pycoll does not connect yet; start all ranks of a group on one host");
  }
  const Hello hello = make_hello(secret, greeting.id);
  send_with_fd(socket, &hello, sizeof(hello), segment_->fd());
  Hello reply;
  UniqueFd fd;
  try {
    fd = receive_with_fd(socket, &reply, sizeof(reply), deadline, interrupt);
  } catch (const Error& error) {
    fail(error.kind(), "making a group with rank ", peer_rank, ": ", error.what());
  }
  if (reply.magic != kMagic || reply.secret != secret || reply.from != greeting.id) {
    fail(ErrorKind::kMismatch, "rank ", peer_rank,
         " answered with something that is not its greeting");
  }
  add_peer(greeting.id, fd, reply.reserved, std::move(socket));
}

// A caller that is not of a group being made here is dropped without a word.
void Endpoint::answer(UniqueFd socket, Deadline deadline, const InterruptCheck& interrupt) {
  if (peer_credentials(socket).uid != geteuid()) return;
  Hello hello;
  UniqueFd fd;
  try {
    fd = receive_with_fd(socket, &hello, sizeof(hello), deadline, interrupt);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kPeerFailed || error.kind() == ErrorKind::kTimeout) return;
    throw;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (hello.magic != kMagic || hello.to != id_ || secrets_.count(hello.secret) == 0) return;
  }
  const Hello reply = make_hello(hello.secret, hello.from);
  send_with_fd(socket, &reply, sizeof(reply), segment_->fd());
  add_peer(hello.from, fd, hello.reserved, std::move(socket));
}

std::vector<std::shared_ptr<Peer>> Endpoint::connect(std::vector<BlobReader>* greetings, int rank,
                                                     const Token& secret, Deadline deadline,
                                                     const InterruptCheck& interrupt) {
  drop_dead_peers();
  struct Admission {
    Endpoint* endpoint;
    std::multiset<Token>::iterator it;
    ~Admission() {
      std::lock_guard<std::mutex> lock(endpoint->mutex_);
      endpoint->secrets_.erase(it);
    }
  };
  std::unique_lock<std::mutex> lock(mutex_);
  const Admission admission{this, secrets_.insert(secret)};
  lock.unlock();

  const int world_size = static_cast<int>(greetings->size());
  const Token address_space = address_space_token();
  std::vector<std::shared_ptr<Peer>> peers(greetings->size());
  std::vector<Token> ids;
  for (int r = 0; r < world_size; ++r) {
    const Greeting greeting = read_greeting(&(*greetings)[static_cast<size_t>(r)]);
    ids.push_back(greeting.id);
    if (r == rank) continue;
    if (greeting.address_space == address_space) {
      peers[static_cast<size_t>(r)] = share(greeting);
    } else if (r < rank && find(greeting.id) == nullptr) {
      call(greeting, r, secret, deadline, interrupt);
    }
  }
  for (int r = 0; r < world_size; ++r) {
    auto& peer = peers[static_cast<size_t>(r)];
    if (r == rank || peer != nullptr) continue;
    while ((peer = find(ids[static_cast<size_t>(r)])) == nullptr) {
      UniqueFd socket = accept_connection(listener_, kAcceptSlice);
      if (socket) {
        answer(std::move(socket), Deadline::earlier(deadline, Deadline::after(kHelloTimeout)),
               interrupt);
        continue;
      }
      if (interrupt) interrupt();
      if (deadline.passed()) {
        fail(ErrorKind::kTimeout, "rank ", rank,
             " timed out making a group: Timed out waiting for rank ", r,
             " to connect on this host");
      }
    }
  }
  return peers;
}

}  // namespace pycoll
