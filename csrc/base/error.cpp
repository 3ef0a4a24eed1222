#include "base/error.h"

#include <system_error>

namespace pycoll {

std::string errno_text(int code) {
  return concat(std::generic_category().message(code), " (errno ", code, ")");
}

}  // namespace pycoll
