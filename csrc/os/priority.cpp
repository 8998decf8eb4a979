#include "os/priority.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace torch_ckpt::os {
namespace {

// From linux/ioprio.h, which some distributions' headers lack.
constexpr int kWhoProcess = 1;
constexpr int kIdleClass = 3 << 13;

}  // namespace

void lower_priority(const Priority& priority) {
  // On Linux, both calls apply to a single thread; 0 means the calling thread.
  const int before = ::getpriority(PRIO_PROCESS, 0);
  ::setpriority(PRIO_PROCESS, 0, std::max(before, priority.nice));
  if (priority.idle_io) ::syscall(SYS_ioprio_set, kWhoProcess, 0, kIdleClass);
}

}  // namespace torch_ckpt::os
