// Sends and receives among ranks that are threads.
#include <cstring>
#include <random>

#include "guarded.h"
#include "ranks.h"

using namespace pycoll;
using namespace pycoll::test;

namespace {

constexpr std::chrono::milliseconds kTimeout{60000};
constexpr size_t kEager =
    16 << 10;  // PYCOLL_EAGER_BYTES: messages longer than this wait for their receive

using OperationPtr = std::shared_ptr<Operation>;

// A message whose bytes tell who sent which one.
class Message {
 public:
  explicit Message(size_t nbytes) : bytes_(nbytes) {}
  Message(size_t nbytes, int src, int tag) : Message(nbytes) { fill(src, tag); }
  uint8_t* data() { return bytes_.data(); }
  size_t nbytes() const { return bytes_.numel(); }

  void check(int src, int tag) {
    size_t wrong = 0;
    for (size_t i = 0; i < nbytes(); ++i) wrong += bytes_[i] != byte(i, src, tag);
    CHECK(wrong == 0, "message of %zu bytes from %d, tag %d: %zu wrong", nbytes(), src, tag, wrong);
    CHECK(bytes_.intact(), "message of %zu bytes from %d: wrote beyond the end", nbytes(), src);
  }

 private:
  // Inlined, GCC 12 warns of an overflow for messages of no bytes.
  [[gnu::noinline]] void fill(int src, int tag) {
    for (size_t i = 0; i < nbytes(); ++i) bytes_[i] = byte(i, src, tag);
  }
  static uint8_t byte(size_t i, int src, int tag) {
    return static_cast<uint8_t>(i * 31 + i / 251 + static_cast<size_t>(src) * 101 +
                                static_cast<size_t>(tag) * 17);
  }
  Guarded<uint8_t> bytes_;
};

OperationPtr send(Communicator& comm, Message& message, int dst, int tag = 0,
                  std::chrono::milliseconds timeout = kTimeout) {
  return comm.send(message.data(), message.nbytes(), DType::kUInt8, dst, tag, timeout);
}

OperationPtr receive(Communicator& comm, Message& message, int src, int tag = 0,
                     std::chrono::milliseconds timeout = kTimeout) {
  return comm.receive(message.data(), message.nbytes(), DType::kUInt8, src, tag, timeout, nullptr);
}

void finish(Communicator& comm, const OperationPtr& operation) {
  CHECK(comm.wait(operation, Deadline::never()));
  if (operation->error() != nullptr) std::rethrow_exception(operation->error());
}

std::string error_of(Communicator& comm, const OperationPtr& operation, ErrorKind kind) {
  try {
    finish(comm, operation);
  } catch (const Error& error) {
    CHECK(error.kind() == kind, "%s", error.what());
    return error.what();
  }
  CHECK(false, "nothing was raised");
  return "";
}

constexpr size_t kSizes[] = {0,          1,      8,          63,         64,     65,
                             kEager - 1, kEager, kEager + 1, 2 * kEager, 100003, 1 << 20};

}  // namespace

TEST(every_size_in_either_order) {
  for (const bool receive_first : {true, false}) {
    run_ranks(2, [receive_first](Communicator& comm) {
      for (const size_t nbytes : kSizes) {
        if (comm.rank() == 0) {
          Message message(nbytes, 0, 1);
          if (receive_first) std::this_thread::sleep_for(std::chrono::milliseconds(2));
          finish(comm, send(comm, message, 1, 1));
        } else {
          Message message(nbytes);
          if (!receive_first) std::this_thread::sleep_for(std::chrono::milliseconds(2));
          finish(comm, receive(comm, message, 0, 1));
          message.check(0, 1);
        }
      }
      const Event event = comm.events().back();
      CHECK(event.nbytes == 1 << 20 && std::string(event.algorithm) == "rendezvous" &&
            event.peer == 1 - comm.rank());
      CHECK((comm.rank() == 0 ? event.bytes_written : event.bytes_read) == 1 << 20);
    });
  }
}

TEST(short_messages_are_sent_before_their_receive) {
  run_ranks(2, [](Communicator& comm) {
    // Blocking, on both sides: nobody receives yet.
    std::vector<Message> messages(10, Message(kEager, comm.rank(), 0));
    for (Message& message : messages) finish(comm, send(comm, message, 1 - comm.rank()));
    for (int i = 0; i < 10; ++i) {
      Message message(kEager);
      finish(comm, receive(comm, message, 1 - comm.rank()));
      message.check(1 - comm.rank(), 0);
    }
  });
}

TEST(both_sides_send_first) {
  for (const size_t nbytes : {size_t{8}, size_t{8} << 20}) {
    run_ranks(2, [nbytes](Communicator& comm) {
      const int peer = 1 - comm.rank();
      Message out(nbytes, comm.rank(), 0), in(nbytes);
      const OperationPtr sent = send(comm, out, peer);
      const OperationPtr received = receive(comm, in, peer);
      finish(comm, sent);
      finish(comm, received);
      in.check(peer, 0);
    });
  }
}

TEST(tags_are_received_in_any_order) {
  for (const size_t nbytes : {size_t{100}, 3 * kEager}) {
    run_ranks(2, [nbytes](Communicator& comm) {
      const int peer = 1 - comm.rank();
      std::vector<Message> out;
      std::vector<OperationPtr> sent;
      for (int tag = 0; tag < 12; ++tag) out.emplace_back(nbytes, comm.rank(), tag);
      for (int tag = 0; tag < 12; ++tag)
        sent.push_back(send(comm, out[static_cast<size_t>(tag)], peer, tag));
      for (int i = 0; i < 12; ++i) {
        const int tag = i * 5 % 12;
        Message in(nbytes);
        finish(comm, receive(comm, in, peer, tag));
        in.check(peer, tag);
      }
      for (const OperationPtr& operation : sent) finish(comm, operation);
    });
  }
}

TEST(messages_of_one_tag_keep_their_order) {
  run_ranks(2, [](Communicator& comm) {
    // Short and long ones mixed: a short one must not pass the long one before it.
    const auto size = [](int i) { return i % 3 == 0 ? 2 * kEager : static_cast<size_t>(i + 1); };
    if (comm.rank() == 0) {
      std::vector<Message> out;
      std::vector<OperationPtr> sent;
      for (int i = 0; i < 30; ++i) out.emplace_back(size(i), 0, i);
      for (Message& message : out) sent.push_back(send(comm, message, 1));
      for (const OperationPtr& operation : sent) finish(comm, operation);
    } else {
      for (int i = 0; i < 30; ++i) {
        Message in(size(i));
        finish(comm, receive(comm, in, 0));
        in.check(0, i);
      }
    }
  });
}

TEST(any_source) {
  for (const size_t nbytes : {size_t{40}, 2 * kEager}) {
    run_ranks(4, [nbytes](Communicator& comm) {
      if (comm.rank() != 0) {
        Message out(nbytes, comm.rank(), 3);
        for (int i = 0; i < 5; ++i) finish(comm, send(comm, out, 0, 3));
        return;
      }
      std::vector<int> from(4);
      for (int i = 0; i < 15; ++i) {
        Message in(nbytes);
        const OperationPtr operation = receive(comm, in, kAnySource, 3);
        finish(comm, operation);
        const int src = static_cast<MessageOperation&>(*operation).peer;
        CHECK(src >= 1 && src <= 3, "%d", src);
        in.check(src, 3);
        ++from[static_cast<size_t>(src)];
      }
      CHECK(from == std::vector<int>({0, 5, 5, 5}));
    });
  }
}

TEST(many_in_flight) {
  for (const size_t nbytes : {size_t{256}, 3 * kEager}) {
    run_ranks(3, [nbytes](Communicator& comm) {
      std::vector<Message> out, in;
      std::vector<OperationPtr> operations;
      out.reserve(200);
      in.reserve(200);
      for (int i = 0; i < 100; ++i) {
        for (int peer = 0; peer < 3; ++peer) {
          if (peer == comm.rank()) continue;
          out.emplace_back(nbytes, comm.rank(), i);
          operations.push_back(send(comm, out.back(), peer, i));
        }
      }
      for (int i = 0; i < 100; ++i) {
        for (int peer = 0; peer < 3; ++peer) {
          if (peer == comm.rank()) continue;
          in.emplace_back(nbytes);
          operations.push_back(receive(comm, in.back(), peer, i));
        }
      }
      for (const OperationPtr& operation : operations) finish(comm, operation);
      size_t k = 0;
      for (int i = 0; i < 100; ++i) {
        for (int peer = 0; peer < 3; ++peer) {
          if (peer != comm.rank()) in[k++].check(peer, i);
        }
      }
    });
  }
}

TEST(sizes_that_differ_are_named_and_the_group_stays_usable) {
  for (const size_t nbytes : {size_t{100}, 3 * kEager}) {
    for (const bool receive_first : {true, false}) {
      run_ranks(2, [=](Communicator& comm) {
        Message message(nbytes, 0, 5), smaller(nbytes - 40);
        const bool late = (comm.rank() == 0) == receive_first;
        if (late) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        if (comm.rank() == 0) {
          finish(comm, send(comm, message, 1, 5));  // the receiver is at fault, or its program is
          finish(comm, send(comm, message, 1, 6));
        } else {
          const std::string text =
              error_of(comm, receive(comm, smaller, 0, 5), ErrorKind::kMismatch);
          CHECK(contains(
              text, concat("rank 0 sent ", nbytes, " x uint8 (", nbytes, " bytes) with tag 5")));
          CHECK(contains(text, concat("rank 1 receives ", nbytes - 40, " x uint8")));
          Message next(nbytes);
          finish(comm, receive(comm, next, 0, 6));
          next.check(0, 5);
        }
        CHECK(comm.failure().empty());
      });
    }
  }
}

TEST(dtypes_that_differ_are_named) {
  run_ranks(2, [](Communicator& comm) {
    Message message(64, 0, 0);
    if (comm.rank() == 0) {
      finish(comm, comm.send(message.data(), 64, DType::kFloat32, 1, 0, kTimeout));
    } else {
      const OperationPtr operation =
          comm.receive(message.data(), 64, DType::kInt32, 0, 0, kTimeout, nullptr);
      CHECK(contains(error_of(comm, operation, ErrorKind::kMismatch), "rank 0 sent 16 x float32"));
    }
  });
}

TEST(a_peer_that_leaves_is_named_and_what_it_sent_still_arrives) {
  run_ranks(3, [](Communicator& comm) {
    Message message(100, 1, 0);
    if (comm.rank() == 1) {
      finish(comm, send(comm, message, 0));
      return;
    }
    if (comm.rank() == 2) {
      Message never(100);
      const std::string text = error_of(comm, receive(comm, never, 1), ErrorKind::kPeerFailed);
      CHECK(contains(text, "receive from rank 1, tag 0, 100 x uint8") &&
            contains(text, "rank 1 has left the group"));
      CHECK(!comm.failure().empty());
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    Message in(100);
    finish(comm, receive(comm, in, 1));
    in.check(1, 0);
    Message large(3 * kEager, 0, 0);
    const std::string text = error_of(comm, send(comm, large, 1), ErrorKind::kPeerFailed);
    CHECK(contains(text, "send to rank 1") && contains(text, "rank 1 has left the group"));
  });
}

TEST(any_source_fails_when_all_others_have_left) {
  run_ranks(3, [](Communicator& comm) {
    if (comm.rank() != 0) return;
    Message never(10);
    const std::string text =
        error_of(comm, receive(comm, never, kAnySource), ErrorKind::kPeerFailed);
    CHECK(contains(text, "receive from any rank") && contains(text, "every other rank has left"));
  });
}

TEST(timeouts_name_what_was_waited_for) {
  run_ranks(2, [](Communicator& comm) {
    const std::chrono::milliseconds brief(80);
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      return;
    }
    Message message(50);
    const std::string text =
        error_of(comm, receive(comm, message, 1, 4, brief), ErrorKind::kTimeout);
    CHECK(contains(text, "rank 0 timed out in receive from rank 1, tag 4, 50 x uint8"));
    CHECK(contains(text, "Timed out waiting 80 ms for rank 1 (0 of 50 bytes done)"));
  });
}

// A receive that nobody answers ends at its deadline, however busy the rank is with other messages.
TEST(other_messages_do_not_put_off_a_timeout) {
  run_ranks(2, [](Communicator& comm) {
    if (comm.rank() == 1) {
      Message message(64, 1, 1);
      const Deadline end = Deadline::after(std::chrono::milliseconds(1500));
      try {
        while (!end.passed()) finish(comm, send(comm, message, 0, 1));
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kPeerFailed, "%s", error.what());
      }
      return;
    }
    Message never(10);
    const int64_t start = now_ns();
    error_of(comm, receive(comm, never, 1, 2, std::chrono::milliseconds(200)), ErrorKind::kTimeout);
    const int64_t ms = (now_ns() - start) / 1'000'000;
    CHECK(ms < 1000, "200 ms became %ld ms", ms);
  });
}

TEST(wrong_peers_are_refused) {
  run_ranks(2, [](Communicator& comm) {
    Message message(10);
    for (const int peer : {-2, 2, comm.rank()}) {
      try {
        send(comm, message, peer);
        CHECK(false, "%d", peer);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kInvalidArgument &&
              contains(error.what(), concat("dst ", peer)));
      }
    }
  });
}

// Each rank draws the same random numbers, so all know what each sends and receives.
TEST(random_traffic_with_pauses) {
  for (const int n : {2, 3, 4}) {
    run_ranks(n, [n](Communicator& comm) {
      std::mt19937 shared(17), own(static_cast<unsigned>(comm.rank()));
      struct Transfer {
        Message message;
        OperationPtr operation;
        int src, tag;
      };
      std::vector<Transfer> transfers;
      transfers.reserve(400);
      for (int i = 0; i < 400; ++i) {
        const int src = static_cast<int>(shared() % static_cast<unsigned>(n));
        const int dst = (src + 1 + static_cast<int>(shared() % static_cast<unsigned>(n - 1))) % n;
        const size_t sizes[] = {0, 8, 1000, kEager, kEager + 1, 5 * kEager};
        const size_t nbytes = sizes[shared() % 6];
        const int tag = static_cast<int>(shared() % 3);
        if (comm.rank() == src) {
          transfers.push_back({Message(nbytes, src, i), nullptr, -1, i});
          transfers.back().operation = send(comm, transfers.back().message, dst, tag);
        } else if (comm.rank() == dst) {
          transfers.push_back({Message(nbytes), nullptr, src, i});
          transfers.back().operation = receive(comm, transfers.back().message, src, tag);
        }
        if (own() % 20 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 2000));
        if (!transfers.empty() && own() % 10 == 0) comm.poll(transfers.back().operation);
      }
      std::shuffle(transfers.begin(), transfers.end(), own);
      for (Transfer& transfer : transfers) {
        finish(comm, transfer.operation);
        if (transfer.src >= 0) transfer.message.check(transfer.src, transfer.tag);
      }
    });
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
