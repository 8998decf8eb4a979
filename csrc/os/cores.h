#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace torch_ckpt::os {

/// Returns the number of CPU cores that this process may use: the size of the calling thread's
/// affinity mask, limited by the CPU quota of the control group. Reads the quota on the first call
/// only.
std::size_t usable_cores();

/// Returns the smallest CPU quota, in cores rounded up, of a control group and the groups above it.
/// Returns nullopt if there is none. `groups` has the contents of /proc/self/cgroup; `root` is the
/// mount point of version 2, and contains the mount point "cpu" of version 1.
std::optional<std::size_t> cores_of_quota(std::string_view groups, const std::string& root);

}  // namespace torch_ckpt::os
