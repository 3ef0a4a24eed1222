// Errors of the core, and the checks that raise them.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pycoll {

enum class ErrorKind {
  kInvalidArgument,  // the caller's fault, found before anything moved
  kMismatch,         // ranks disagree about an operation or a group
  kTimeout,
  kPeerFailed,   // a peer died, left, or poisoned the group
  kAborted,      // by this rank
  kInterrupted,  // by a signal
  kSystem,       // the operating system refused something
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  ((out << parts), ...);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  throw Error(kind, concat("pycoll: ", parts...));
}

// "rank 1", "ranks 1, 2".
std::string list_ranks(const std::vector<int>& ranks);

// The text of errno's value `code`, with its number.
std::string errno_text(int code);

}  // namespace pycoll

// For what a caller can get wrong: the message names the argument, the values and the remedy.
#define PYCOLL_CHECK_ARG(condition, ...)                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      ::pycoll::fail(::pycoll::ErrorKind::kInvalidArgument, __VA_ARGS__); \
    }                                                                     \
  } while (false)

// For what holds unless pycoll itself is wrong.
#define PYCOLL_CHECK(condition)                                                             \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      ::pycoll::fail(::pycoll::ErrorKind::kSystem, "broken invariant ", #condition, " at ", \
                     __FILE__, ":", __LINE__, "; please report this");                      \
    }                                                                                       \
  } while (false)
