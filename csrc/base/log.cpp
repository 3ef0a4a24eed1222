#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>

#include "base/error.h"

namespace pycoll {
namespace {

// What the environment says when the first line could be logged; a value that does not parse is reported by Env::read().
std::atomic<LogLevel>& level_now() {
  static std::atomic<LogLevel> level = [] {
    const char* text = std::getenv("PYCOLL_DEBUG");
    try {
      return text == nullptr || *text == '\0' ? LogLevel::kWarn : parse_log_level(text);
    } catch (const Error&) {
      return LogLevel::kWarn;
    }
  }();
  return level;
}

}  // namespace

void set_log_level(LogLevel level) { level_now().store(level, std::memory_order_relaxed); }

bool log_enabled(LogLevel level) {
  return level != LogLevel::kOff && level <= level_now().load(std::memory_order_relaxed);
}

void log_line(LogLevel level, const std::string& text) {
  static constexpr const char* kNames[] = {"OFF", "WARN", "INFO", "DETAIL"};
  const std::string line =
      concat("[pycoll ", getpid(), " ", kNames[static_cast<int>(level)], "] ", text, "\n");
  // One write, so that lines of several ranks do not mix; a full or closed stderr is not an error of the collective.
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

}  // namespace pycoll
