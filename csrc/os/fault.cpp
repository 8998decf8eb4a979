#include "os/fault.h"

#include <mutex>
#include <shared_mutex>
#include <utility>

namespace torch_ckpt::os {
namespace {
// Shared while a hook runs, so that a hook may wait for another thread's call.
std::shared_mutex hook_mutex;
FaultHook current_hook;  // guarded by hook_mutex
}  // namespace

std::atomic<bool> ScopedFaultHook::installed_ = false;

ScopedFaultHook::ScopedFaultHook(FaultHook hook) {
  std::lock_guard lock(hook_mutex);
  current_hook = std::move(hook);
  installed_ = true;
}

ScopedFaultHook::~ScopedFaultHook() {
  std::lock_guard lock(hook_mutex);
  installed_ = false;
  current_hook = nullptr;
}

int injected_fault(std::string_view operation, std::string_view path) {
  std::shared_lock lock(hook_mutex);
  return current_hook ? current_hook(operation, path) : 0;
}

}  // namespace torch_ckpt::os
