// One line a message to stderr, with process and level.
#pragma once

#include <string>

#include "base/env.h"
#include "base/error.h"

namespace pycoll {

void set_log_level(LogLevel level);
bool log_enabled(LogLevel level);
void log_line(LogLevel level, const std::string& text);

}  // namespace pycoll

#define PYCOLL_LOG(level, ...)                                  \
  do {                                                          \
    if (::pycoll::log_enabled(level)) {                         \
      ::pycoll::log_line(level, ::pycoll::concat(__VA_ARGS__)); \
    }                                                           \
  } while (false)
