#include "base/error.h"

#include <system_error>

namespace pycoll {

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += concat(i == 0 ? "" : ", ", ranks[i]);
  return text;
}

std::string errno_text(int code) {
  return concat(std::generic_category().message(code), " (errno ", code, ")");
}

}  // namespace pycoll
