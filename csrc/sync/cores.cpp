#include "sync/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <thread>

namespace pycoll {
namespace {

int affinity_cores() {
  // Masks of machines with more than 1024 cores do not fit a cpu_set_t.
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

// Cores that "quota period" of one cgroup allows; 0 where it sets no limit.
int quota_cores(double quota, double period) {
  return quota > 0 && period > 0 ? static_cast<int>(std::ceil(quota / period)) : 0;
}

int read_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max") return 0;
  return quota_cores(std::atof(quota.c_str()), period);
}

int read_v1(const std::string& folder) {
  double quota = 0, period = 0;
  std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
  std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  return quota_cores(quota, period);
}

// The lowest limit from the process's own cgroup up to the root.
int cgroup_cores() {
  int least = 0;
  const auto lower = [&least](int cores) {
    if (cores > 0 && (least == 0 || cores < least)) least = cores;
  };
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    while (true) {
      if (controllers.empty()) lower(read_v2("/sys/fs/cgroup" + path));
      if (controllers.find("cpu") == 0) lower(read_v1("/sys/fs/cgroup/cpu" + path));
      if (path.empty() || path == "/") break;
      path.resize(path.find_last_of('/'));
    }
  }
  return least;
}

}  // namespace

int usable_cores() {
  const int affinity = affinity_cores();
  const int quota = cgroup_cores();
  return std::max(1, quota > 0 ? std::min(affinity, quota) : affinity);
}

}  // namespace pycoll
