#include "base/log.h"

#include <unistd.h>

#include <atomic>

#include "base/error.h"

namespace pycoll {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kWarn};

}  // namespace

void set_log_level(LogLevel level) { g_level.store(level, std::memory_order_relaxed); }

bool log_enabled(LogLevel level) {
  return level != LogLevel::kOff && level <= g_level.load(std::memory_order_relaxed);
}

void log_line(LogLevel level, const std::string& text) {
  static constexpr const char* kNames[] = {"OFF", "WARN", "INFO", "DETAIL"};
  const std::string line =
      concat("[pycoll ", getpid(), " ", kNames[static_cast<int>(level)], "] ", text, "\n");
  // One write, so that lines of several ranks do not mix; a full or closed stderr is not an error of the collective.
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

}  // namespace pycoll
