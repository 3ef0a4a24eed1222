// How the ranks of a group that do not know each other yet swap small blobs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"

namespace pycoll {

using Blob = std::vector<uint8_t>;

// Called now and then while a thread waits; throws to give up (Ctrl-C). Must be callable from any thread.
using InterruptCheck = std::function<void()>;

class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // Gives `mine` to all ranks and returns the blobs of all, in rank order. Collective: every rank calls it equally often.
  // Raises kTimeout naming the ranks that gave nothing before the deadline.
  virtual std::vector<Blob> all_gather(const Blob& mine, Deadline deadline,
                                       const InterruptCheck& interrupt) = 0;

  // What `rank` gives to the next all_gather(), without waiting; false if it has not given it yet.
  virtual bool peek(int rank, Blob* blob) = 0;
};

// The store that a framework brings: keys are set once and then read by others.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const Blob& value) = 0;
  // The value, without waiting; false if the key has not been set yet.
  virtual bool try_get(const std::string& key, Blob* value) = 0;
  virtual void remove(const std::string& key) = 0;
  // How often it has been called for this key, by anybody, this time included.
  virtual int64_t count(const std::string& key) = 0;
};

// Over a key-value store. `prefix` keeps groups apart: members of one group use the same one, no other living group does. What an
// earlier one has left under it (a world made again on the same store) is not taken for this one's: members count how often
// they have used the prefix, and use it equally often.
class StoreExchange final : public Exchange {
 public:
  StoreExchange(KeyValueStore* store, std::string prefix, int rank, int world_size)
      : store_(store), prefix_(std::move(prefix)), rank_(rank), world_size_(world_size) {}

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::vector<Blob> all_gather(const Blob& mine, Deadline deadline,
                               const InterruptCheck& interrupt) override;
  bool peek(int rank, Blob* blob) override { return store_->try_get(key(turn_, rank), blob); }

 private:
  std::string key(int turn, int rank) const;
  void begin();

  KeyValueStore* store_;
  const std::string prefix_;
  const int rank_;
  const int world_size_;
  int64_t generation_ = 0;  // 0: not begun
  int turn_ = 0;
};

}  // namespace pycoll
