// The tag that a thread gives to the collectives it calls; empty: none.
#pragma once

#include <string>
#include <utility>

namespace pycoll::torch_adapter {

inline std::string& thread_tag() {
  thread_local std::string tag;
  return tag;
}

class TagScope {
 public:
  explicit TagScope(std::string tag) : before_(std::exchange(thread_tag(), std::move(tag))) {}
  ~TagScope() { thread_tag() = std::move(before_); }
  TagScope(const TagScope&) = delete;
  TagScope& operator=(const TagScope&) = delete;

 private:
  std::string before_;
};

}  // namespace pycoll::torch_adapter
