#pragma once

// Named fault points: the first line of every function in csrc/os that makes a system call, and the
// moments that Python names (csrc/python/fault.cpp). A test installs a hook that observes, waits,
// or makes the call fail with an errno before it is made. Without a hook a point costs one load.

#include <atomic>
#include <functional>
#include <string_view>

namespace torch_ckpt::os {

/// Returns 0 to let the operation run, or an errno to make it fail. It may be called from several
/// threads at once, and may block, so that a test can synchronize with the operation.
using FaultHook = std::function<int(std::string_view operation, std::string_view path)>;

/// Installs `hook` for its lifetime. The destructor waits until no thread runs the hook. A process
/// can have one hook at a time.
class ScopedFaultHook {
 public:
  explicit ScopedFaultHook(FaultHook hook);
  ~ScopedFaultHook();
  ScopedFaultHook(const ScopedFaultHook&) = delete;
  ScopedFaultHook& operator=(const ScopedFaultHook&) = delete;

  static bool is_installed() { return installed_.load(std::memory_order_relaxed); }

 private:
  static std::atomic<bool> installed_;
};

/// Calls the hook; returns 0 without one.
int injected_fault(std::string_view operation, std::string_view path);

}  // namespace torch_ckpt::os

// The offset is optional: TC_FAULT("pwrite", path_, offset);
#define TC_FAULT(operation, path, ...)                                                \
  if (::torch_ckpt::os::ScopedFaultHook::is_installed()) [[unlikely]]                 \
    if (int injected_ = ::torch_ckpt::os::injected_fault(operation, path); injected_) \
  return ::torch_ckpt::system_error(injected_, operation, path __VA_OPT__(, ) __VA_ARGS__)
