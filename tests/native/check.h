// A test is a function; CHECK reports and counts, and main() fails if anything was counted.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace pycoll::test {

inline std::atomic<int> g_failures{0};
inline std::atomic<long> g_checks{0};

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

}  // namespace pycoll::test

#define TEST(name)                                                    \
  static void name();                                                 \
  static const ::pycoll::test::Register register_##name(#name, name); \
  static void name()

// The rest are printf arguments that say which case failed.
#define CHECK(condition, ...)                                                      \
  do {                                                                             \
    ::pycoll::test::g_checks.fetch_add(1);                                         \
    if (!(condition)) {                                                            \
      if (::pycoll::test::g_failures.fetch_add(1) < 20) {                          \
        std::fprintf(stderr, "%s:%d: %s fails: ", __FILE__, __LINE__, #condition); \
        std::fprintf(stderr, " " __VA_ARGS__);                                     \
        std::fprintf(stderr, "\n");                                                \
      }                                                                            \
    }                                                                              \
  } while (false)

// For texts of errors: says what was looked for, and where.
inline bool contains(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) std::fprintf(stderr, "'%s' is not in '%s'\n", part.c_str(), text.c_str());
  return found;
}

// Runs the tests whose name contains one of the arguments (all without arguments).
inline int run_tests(int argc, char** argv) {
  int run = 0;
  for (const auto& test : ::pycoll::test::tests()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted |= std::strstr(test.name, argv[i]) != nullptr;
    if (!wanted) continue;
    const int before = ::pycoll::test::g_failures.load();
    test.run();
    std::printf("%s %s\n", ::pycoll::test::g_failures.load() == before ? "ok  " : "FAIL",
                test.name);
    std::fflush(stdout);
    ++run;
  }
  std::printf("%d tests, %ld checks, %d failures\n", run, ::pycoll::test::g_checks.load(),
              ::pycoll::test::g_failures.load());
  return ::pycoll::test::g_failures.load() == 0 && run > 0 && ::pycoll::test::g_checks.load() > 0
             ? 0
             : 1;
}
