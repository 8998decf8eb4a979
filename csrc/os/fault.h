#pragma once

// Named fault points: the first line of every function in csrc/os that calls the system.
// A test installs a hook that may return an errno for a named operation on a path; the call then
// fails with it before the system is asked. Release builds compile the points out.

#ifdef TORCH_CKPT_FAULTS

#include <functional>
#include <string_view>

namespace torch_ckpt::os {

/// Returns 0 to let the operation run, or the errno that it fails with. Called from any thread, and
/// from several at once; it may block, which makes it a point to synchronize with.
using FaultHook = std::function<int(std::string_view operation, std::string_view path)>;

/// Installs `hook` for its lifetime; the destructor waits for calls of it that are under way. One
/// at a time per process.
class ScopedFaultHook {
 public:
  explicit ScopedFaultHook(FaultHook hook);
  ~ScopedFaultHook();
  ScopedFaultHook(const ScopedFaultHook&) = delete;
  ScopedFaultHook& operator=(const ScopedFaultHook&) = delete;
};

int injected_fault(std::string_view operation, std::string_view path);

}  // namespace torch_ckpt::os

// The offset is optional: TC_FAULT("pwrite", path_, offset);
#define TC_FAULT(operation, path, ...)                                              \
  if (int injected_ = ::torch_ckpt::os::injected_fault(operation, path); injected_) \
  return ::torch_ckpt::system_error(injected_, operation, path __VA_OPT__(, ) __VA_ARGS__)

#else
#define TC_FAULT(operation, path, ...) static_cast<void>(0)
#endif
