#include "engine/rendezvous.h"

#include <algorithm>
#include <cstring>

#include "base/env.h"
#include "base/log.h"
#include "memory/process_memory.h"

namespace pycoll {
namespace {

// Changes whenever the meaning of shared memory or of these blobs does.
constexpr uint32_t kProtocol = 5;

struct Introduction {
  uint32_t protocol;
  std::string problem;  // not empty: the rank cannot take part, and gives nothing else
  Token secret;         // rank 0's counts
  Facts facts;
  ProbeTarget probe_target;
};

void write_facts(BlobWriter* blob, const Facts& facts) {
  blob->put(facts.payload_bytes)
      .put(facts.staging_bytes)
      .put(facts.eager_bytes)
      .put(facts.compares_call_sites)
      .put(facts.direct_access)
      .put_text(facts.algorithm)
      .put_text(facts.tuning);
}

Introduction read_introduction(BlobReader* blob) {
  Introduction introduction;
  introduction.protocol = blob->get<uint32_t>();
  if (introduction.protocol != kProtocol) return introduction;
  introduction.problem = blob->get_text();
  if (!introduction.problem.empty()) return introduction;
  introduction.secret = blob->get<Token>();
  introduction.facts.payload_bytes = blob->get<uint64_t>();
  introduction.facts.staging_bytes = blob->get<uint64_t>();
  introduction.facts.eager_bytes = blob->get<uint64_t>();
  introduction.facts.compares_call_sites = blob->get<uint64_t>();
  introduction.facts.direct_access = blob->get<uint64_t>();
  introduction.facts.algorithm = blob->get_text();
  introduction.facts.tuning = blob->get_text();
  introduction.probe_target.address = blob->get<uint64_t>();
  introduction.probe_target.token = blob->get<Token>();
  return introduction;
}

template <class T>
void compare(const char* what, const T& of_zero, const T& of_rank, int rank, const char* remedy) {
  if (of_zero == of_rank) return;
  fail(ErrorKind::kMismatch, "ranks disagree about the group that they make: ", what, " is ",
       of_zero, " on rank 0 and ", of_rank, " on rank ", rank, "; ", remedy);
}

// Without the prefix that every error has.
std::string plain_text(const Error& error) {
  const std::string text = error.what();
  return text.rfind("pycoll: ", 0) == 0 ? text.substr(8) : text;
}

// All ranks raise if one of them has a problem.
void raise_problems(const std::vector<std::string>& problems, ErrorKind kind) {
  std::string text;
  for (size_t r = 0; r < problems.size(); ++r) {
    if (!problems[r].empty()) text += concat(" rank ", r, ": ", problems[r], ";");
  }
  if (text.empty()) return;
  fail(kind, "the group could not be made:", text);
}

void compare_introductions(const std::vector<Introduction>& all) {
  static constexpr char kSetSame[] = "set the same value on all ranks";
  for (size_t r = 1; r < all.size(); ++r) {
    compare("the protocol version", all[0].protocol, all[r].protocol, static_cast<int>(r),
            "run the same pycoll on all ranks");
  }
  std::vector<std::string> problems;
  for (const Introduction& introduction : all) problems.push_back(introduction.problem);
  raise_problems(problems, ErrorKind::kPeerFailed);
  for (size_t r = 1; r < all.size(); ++r) {
    const int rank = static_cast<int>(r);
    const Facts& a = all[0].facts;
    const Facts& b = all[r].facts;
    compare("the algorithm (Options(algorithm=...) or PYCOLL_ALGORITHM)", a.algorithm, b.algorithm,
            rank, kSetSame);
    compare("the tuning table (PYCOLL_TUNING)", a.tuning.empty() ? "empty" : a.tuning,
            b.tuning.empty() ? "empty" : b.tuning, rank,
            "give all ranks the same file, or PYCOLL_TUNING=off");
    compare("PYCOLL_PAYLOAD_BYTES", a.payload_bytes, b.payload_bytes, rank, kSetSame);
    compare("PYCOLL_STAGING_BYTES", a.staging_bytes, b.staging_bytes, rank, kSetSame);
    compare("PYCOLL_EAGER_BYTES", a.eager_bytes, b.eager_bytes, rank, kSetSame);
    compare("PYCOLL_MEMORY_PATH (0 staged, 1 mapped, 2 auto)", a.direct_access, b.direct_access,
            rank, kSetSame);
    compare("whether PYCOLL_DEBUG is DETAIL", a.compares_call_sites, b.compares_call_sites, rank,
            kSetSame);
  }
}

uint64_t nonce_of(const Token& secret) {
  uint64_t nonce;
  std::memcpy(&nonce, secret.data(), sizeof(nonce));
  return nonce | 1;  // never zero, which is what fresh memory holds
}

// How the preparation of a rank went.
struct Status {
  uint64_t page_offset;
  uint64_t direct_access;
  std::string problem;
};

Status read_status(const Blob& blob, int rank) {
  BlobReader reader(blob, rank);
  Status status;
  status.page_offset = reader.get<uint64_t>();
  status.direct_access = reader.get<uint64_t>();
  status.problem = reader.get_text();
  return status;
}

// Thrown while this rank waits for another that has given up.
struct PeerGaveUp {};

// The page of this rank, and the peers, or what went wrong.
struct Preparation {
  Region page;
  std::vector<std::shared_ptr<Peer>> peers;
  uint64_t direct_access = 0;  // what this rank can do with the memory of all others
  std::string problem;
  ErrorKind problem_kind =
      ErrorKind::kPeerFailed;  // without one of its own, a peer's is what is raised
};

Preparation prepare(Exchange* exchange, Endpoint* endpoint, const Facts& facts, const Token& secret,
                    std::vector<BlobReader>* greetings, Deadline deadline,
                    const InterruptCheck& interrupt) {
  Preparation result;
  try {
    const size_t page_bytes = GroupPage::page_bytes(facts.payload_bytes, exchange->world_size());
    result.page = endpoint->allocate_page(page_bytes);
    auto* page = reinterpret_cast<GroupPage*>(endpoint->arena().address(result.page));
    page->initialise(nonce_of(secret), page_bytes);
    const auto give_up = [&] {
      if (interrupt) interrupt();
      Blob blob;
      for (int r = 0; r < exchange->world_size(); ++r) {
        if (exchange->peek(r, &blob) && !read_status(blob, r).problem.empty()) throw PeerGaveUp();
      }
    };
    result.peers = endpoint->connect(greetings, exchange->rank(), secret, deadline, give_up);
  } catch (const PeerGaveUp&) {
    // The other rank says why.
  } catch (const Error& error) {
    result.problem = plain_text(error);
    result.problem_kind = error.kind();
  }
  return result;
}

// Without process_vm_readv if one of the peers cannot be reached by it.
uint64_t possible_access(const Facts& facts, const std::vector<Introduction>& introductions,
                         const std::vector<std::shared_ptr<Peer>>& peers) {
  constexpr uint64_t kMapped = static_cast<uint64_t>(DirectAccess::kMapped);
  if (facts.direct_access <= kMapped) return facts.direct_access;
  for (size_t r = 0; r < peers.size(); ++r) {
    if (peers[r] == nullptr || peers[r]->liveness == nullptr) continue;  // of this process
    if (!probe(peers[r]->liveness->pid(), introductions[r].probe_target)) return kMapped;
  }
  return facts.direct_access;
}

std::vector<Member> make_members(const Preparation& mine, Endpoint* endpoint, int rank,
                                 const std::vector<uint64_t>& page_offsets, size_t page_bytes) {
  std::vector<Member> members(page_offsets.size());
  for (size_t r = 0; r < members.size(); ++r) {
    Member& member = members[r];
    if (static_cast<int>(r) == rank) {
      member.bell = endpoint->bell();
      member.page = reinterpret_cast<GroupPage*>(endpoint->arena().address(mine.page));
      continue;
    }
    member.peer = mine.peers[r];
    member.segment = member.peer->segment.get();
    member.bell = member.peer->bell();
    const size_t reserved = member.segment->reserved();
    if (page_offsets[r] % 64 != 0 || page_bytes > reserved ||
        page_offsets[r] > reserved - page_bytes ||
        !member.segment->is_backed(page_offsets[r], page_bytes)) {
      fail(ErrorKind::kSystem, "the page of rank ", r, " lies outside its segment");
    }
    member.page = reinterpret_cast<GroupPage*>(member.segment->base() + page_offsets[r]);
  }
  return members;
}

}  // namespace

std::shared_ptr<Group> form_group(Exchange* exchange, const std::shared_ptr<Endpoint>& endpoint,
                                  const Facts& facts, Deadline deadline,
                                  const InterruptCheck& interrupt) {
  const int rank = exchange->rank();
  BlobWriter introduction;
  introduction.put(kProtocol).put_text("").put(random_token());
  write_facts(&introduction, facts);
  const bool wants_readv = facts.direct_access >= static_cast<uint64_t>(DirectAccess::kReadv);
  const ProbeTarget target = wants_readv ? offer_probe() : ProbeTarget{};
  introduction.put(target.address).put(target.token);
  endpoint->write_greeting(&introduction);
  const std::vector<Blob> blobs = exchange->all_gather(introduction.take(), deadline, interrupt);
  std::vector<BlobReader> readers;
  std::vector<Introduction> introductions;
  for (size_t r = 0; r < blobs.size(); ++r) {
    readers.emplace_back(blobs[r], static_cast<int>(r));
    introductions.push_back(read_introduction(&readers.back()));
  }
  compare_introductions(introductions);

  const Token secret = introductions[0].secret;
  Preparation mine =
      prepare(exchange, endpoint.get(), facts, secret, &readers, deadline, interrupt);
  if (mine.problem.empty() && !mine.peers.empty()) {
    mine.direct_access = possible_access(facts, introductions, mine.peers);
  }
  BlobWriter status;
  status.put(static_cast<uint64_t>(mine.page.offset))
      .put(mine.direct_access)
      .put_text(mine.problem);
  try {
    std::vector<uint64_t> page_offsets;
    std::vector<std::string> problems;
    Facts agreed = facts;
    const std::vector<Blob> statuses = exchange->all_gather(status.take(), deadline, interrupt);
    for (size_t r = 0; r < statuses.size(); ++r) {
      const Status of_rank = read_status(statuses[r], static_cast<int>(r));
      page_offsets.push_back(of_rank.page_offset);
      agreed.direct_access = std::min(agreed.direct_access, of_rank.direct_access);
      problems.push_back(of_rank.problem);
    }
    raise_problems(problems, mine.problem_kind);
    const size_t page_bytes = GroupPage::page_bytes(facts.payload_bytes, exchange->world_size());
    std::vector<Member> members =
        make_members(mine, endpoint.get(), rank, page_offsets, page_bytes);
    return std::make_shared<Group>(endpoint, agreed, rank, std::move(members), mine.page,
                                   nonce_of(secret));
  } catch (...) {
    endpoint->retire_page(mine.page, [] { return true; });
    throw;
  }
}

void decline_group(Exchange* exchange, const Error& problem) {
  BlobWriter introduction;
  introduction.put(kProtocol).put_text(plain_text(problem));
  try {
    exchange->all_gather(introduction.take(), Deadline::after(std::chrono::milliseconds(0)), {});
  } catch (const std::exception&) {
    // Others have not come yet, or the store is gone. What is raised is the problem itself.
  }
}

}  // namespace pycoll
