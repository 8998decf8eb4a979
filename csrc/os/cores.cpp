#include "os/cores.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <thread>
#include <vector>

#include "checked_math.h"

namespace torch_ckpt::os {
namespace {

std::string contents_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Returns nullopt if the quota is not a positive number: "max" or -1 mean that there is none.
std::optional<std::size_t> cores_of(const std::string& quota, const std::string& period) {
  std::int64_t time = 0;
  std::int64_t of = 0;
  if (!(std::istringstream(quota) >> time) || !(std::istringstream(period) >> of)) return {};
  if (time <= 0 || of <= 0) return {};
  return divide_up(static_cast<std::uint64_t>(time), static_cast<std::uint64_t>(of));
}

std::optional<std::size_t> cores_of_v2(const std::string& group) {
  std::istringstream line(contents_of(group + "/cpu.max"));
  std::string quota;
  std::string period;
  line >> quota >> period;
  return cores_of(quota, period);
}

std::optional<std::size_t> cores_of_v1(const std::string& group) {
  return cores_of(contents_of(group + "/cpu.cfs_quota_us"),
                  contents_of(group + "/cpu.cfs_period_us"));
}

/// True if a comma-separated list has the element "cpu".
bool has_cpu(const std::string& controllers) {
  return ("," + controllers + ",").find(",cpu,") != std::string::npos;
}

/// Returns the number of cores in the affinity mask of the calling thread.
std::size_t cores_of_affinity() {
  // The kernel refuses a set that is smaller than its own with EINVAL.
  constexpr std::size_t kMaxSets = 1024;
  for (std::vector<cpu_set_t> sets(1); sets.size() <= kMaxSets; sets.resize(2 * sets.size())) {
    const std::size_t bytes = sets.size() * sizeof(cpu_set_t);
    if (::sched_getaffinity(0, bytes, sets.data()) == 0) {
      return static_cast<std::size_t>(CPU_COUNT_S(bytes, sets.data()));
    }
    if (errno != EINVAL) break;
  }
  return std::max(1U, std::thread::hardware_concurrency());
}

}  // namespace

std::optional<std::size_t> cores_of_quota(std::string_view groups, const std::string& root) {
  std::optional<std::size_t> least;
  std::istringstream lines{std::string(groups)};
  for (std::string line; std::getline(lines, line);) {
    // hierarchy number:controllers:group
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    if (!is_v2 && !has_cpu(controllers)) continue;
    const std::string mount = is_v2 ? root : root + "/cpu";
    // In a container, the group may name a folder that is not mounted. The root is always read.
    for (std::string group = line.substr(second + 1);;
         group.resize(std::min(group.size(), group.rfind('/')))) {
      if (group == "/") group.clear();
      const auto cores = is_v2 ? cores_of_v2(mount + group) : cores_of_v1(mount + group);
      if (cores) least = std::min(least.value_or(*cores), *cores);
      if (group.empty()) break;
    }
  }
  return least;
}

std::size_t usable_cores() {
  // Not a local static variable: a child that is forked while a thread initializes it would wait
  // for that thread forever. Two threads may both find the same number.
  static std::atomic<std::size_t> known_quota{0};
  std::size_t quota = known_quota;
  if (quota == 0) {
    quota = cores_of_quota(contents_of("/proc/self/cgroup"), "/sys/fs/cgroup")
                .value_or(std::numeric_limits<std::size_t>::max());
    known_quota = quota;
  }
  return std::min(quota, cores_of_affinity());
}

}  // namespace torch_ckpt::os
