#pragma once

// Named fault points. Functions in csrc/os that make a system call begin with one, and Python code
// can add others (csrc/python/fault.cpp). A test installs a hook that observes or delays the call,
// or makes it fail with an errno instead. Without a hook, a fault point costs one load.

#include <atomic>
#include <functional>
#include <string_view>

namespace torch_ckpt::os {

/// Returns 0 to let the operation run, or an errno to make it fail. May be called from several
/// threads at once. May block, so that a test can synchronize with the operation.
using FaultHook = std::function<int(std::string_view operation, std::string_view path)>;

/// Installs `hook` for the lifetime of this object. The destructor waits until no thread runs the
/// hook. A process can have only one hook at a time.
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

/// Calls the hook. Returns 0 if none is installed.
int injected_fault(std::string_view operation, std::string_view path);

}  // namespace torch_ckpt::os

// The offset is optional: TC_FAULT("pwrite", path_, offset);
#define TC_FAULT(operation, path, ...)                                                \
  if (::torch_ckpt::os::ScopedFaultHook::is_installed()) [[unlikely]]                 \
    if (int injected_ = ::torch_ckpt::os::injected_fault(operation, path); injected_) \
  return ::torch_ckpt::system_error(injected_, operation, path __VA_OPT__(, ) __VA_ARGS__)
