#include "os/thread.h"

#include <sys/resource.h>

#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "os/fault.h"

namespace torch_ckpt::os {
namespace {

std::string limit(int resource) {
  rlimit now{};
  if (::getrlimit(static_cast<__rlimit_resource>(resource), &now) != 0) return "unknown";
  return now.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(now.rlim_cur);
}

Error refusal(int sys_errno) {
  Error error = system_error(sys_errno, "pthread_create", "");
  error.detail = "the system refused to start a thread; raise " + thread_limits();
  return error;
}

Result<> inject_fault() {
  TC_FAULT("pthread_create", "");
  return {};
}

}  // namespace

std::string thread_limits() {
  return "the limit on the user's processes and threads (ulimit -u: " + limit(RLIMIT_NPROC) +
         "), the limit of the container (pids.max of its cgroup), or the limit on address space "
         "(ulimit -v, in bytes: " +
         limit(RLIMIT_AS) + ")";
}

Result<> start_thread(std::thread& thread, std::function<void()> body) {
  if (auto fault = inject_fault(); !fault) return refusal(fault.error().sys_errno);
  try {
    thread = std::thread(std::move(body));
    return {};
  } catch (const std::system_error& failure) {
    return refusal(failure.code().value());
  } catch (const std::bad_alloc&) {
    return refusal(ENOMEM);
  }
}

}  // namespace torch_ckpt::os
