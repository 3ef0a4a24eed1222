// torch's Store as the core's KeyValueStore.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bootstrap/exchange.h"

namespace pycoll::torch_adapter {

class StoreAdapter final : public KeyValueStore {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const Blob& value) override { store_->set(key, value); }

  bool try_get(const std::string& key, Blob* value) override {
    if (!store_->check({key})) return false;
    *value = store_->get(key);
    return true;
  }

  void remove(const std::string& key) override { store_->deleteKey(key); }
  int64_t count(const std::string& key) override { return store_->add(key, 1); }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace pycoll::torch_adapter
