#pragma once

// Named fault points: the first line of every function in csrc/os that calls the system, and the
// moments that Python names (csrc/python/fault.cpp). A test installs a hook that looks, waits, or
// returns the errno that the call fails with before the system is asked. Without a hook a point
// costs one load.

#include <atomic>
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

  /// Whether there is one.
  static bool is_installed() { return installed_.load(std::memory_order_relaxed); }

 private:
  static std::atomic<bool> installed_;
};

/// What the hook says; 0 without one.
int injected_fault(std::string_view operation, std::string_view path);

}  // namespace torch_ckpt::os

// The offset is optional: TC_FAULT("pwrite", path_, offset);
#define TC_FAULT(operation, path, ...)                                                \
  if (::torch_ckpt::os::ScopedFaultHook::is_installed()) [[unlikely]]                 \
    if (int injected_ = ::torch_ckpt::os::injected_fault(operation, path); injected_) \
  return ::torch_ckpt::system_error(injected_, operation, path __VA_OPT__(, ) __VA_ARGS__)
