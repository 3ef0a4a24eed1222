#include "base/env.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace pycoll {
namespace {

template <class T>
void read_integer(const char* variable, T* value, uint64_t least, uint64_t most) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return;
  char* end = nullptr;
  errno = 0;
  const unsigned long long number = std::strtoull(text, &end, 10);
  PYCOLL_CHECK_ARG(errno == 0 && *end == '\0' && std::strchr(text, '-') == nullptr &&
                       number >= least && number <= most,
                   variable, "=", text, " is not a whole number from ", least, " to ", most,
                   "; set one, or unset the variable");
  *value = static_cast<T>(number);
}

}  // namespace

LogLevel parse_log_level(const std::string& text) {
  if (text == "OFF") return LogLevel::kOff;
  if (text == "WARN") return LogLevel::kWarn;
  if (text == "INFO") return LogLevel::kInfo;
  if (text == "DETAIL") return LogLevel::kDetail;
  fail(ErrorKind::kInvalidArgument, "PYCOLL_DEBUG is ", text,
       ", which is none of OFF, WARN, INFO, DETAIL");
}

Env Env::read() {
  Env env;
  if (const char* text = std::getenv("PYCOLL_ALGORITHM"); text != nullptr && *text != '\0') {
    env.algorithm = text;
  }
  if (const char* text = std::getenv("PYCOLL_CUDA_ALGORITHM"); text != nullptr) {
    env.cuda_algorithm = text;
  }
  if (const char* text = std::getenv("PYCOLL_MEMORY_PATH"); text != nullptr && *text != '\0') {
    const std::string path = text;
    PYCOLL_CHECK_ARG(path == "auto" || path == "mapped" || path == "staged",
                     "PYCOLL_MEMORY_PATH is ", path, ", which is none of auto, mapped, staged");
    env.direct_access = path == "auto"     ? DirectAccess::kReadv
                        : path == "mapped" ? DirectAccess::kMapped
                                           : DirectAccess::kNone;
  }
  read_integer("PYCOLL_PAYLOAD_BYTES", &env.payload_bytes, 64, 1 << 20);
  read_integer("PYCOLL_STAGING_BYTES", &env.staging_bytes, 4 << 10, 64 << 20);
  read_integer("PYCOLL_EAGER_BYTES", &env.eager_bytes, 64, 1 << 20);
  read_integer("PYCOLL_SEGMENT_BYTES", &env.segment_bytes, 1 << 20, uint64_t{1} << 44);
  read_integer("PYCOLL_SPIN_US", &env.spin_us, 0, 1'000'000);
  read_integer("PYCOLL_CORES", &env.cores, 1, 1 << 16);
  if (const char* text = std::getenv("PYCOLL_DEBUG"); text != nullptr && *text != '\0') {
    parse_log_level(text);  // log.cpp keeps it
  }
  return env;
}

}  // namespace pycoll
