#include "os/fault.h"

#include <utility>

#include "os/mutex.h"

namespace torch_ckpt::os {
namespace {
// Held shared while a hook runs, so that several threads can run the hook at once.
SharedMutex hook_mutex;
FaultHook current_hook TC_GUARDED_BY(hook_mutex);
}  // namespace

std::atomic<bool> ScopedFaultHook::installed_ = false;

ScopedFaultHook::ScopedFaultHook(FaultHook hook) {
  const MutexLock lock(hook_mutex);
  current_hook = std::move(hook);
  installed_ = true;
}

ScopedFaultHook::~ScopedFaultHook() {
  const MutexLock lock(hook_mutex);
  installed_ = false;
  current_hook = nullptr;
}

int injected_fault(std::string_view operation, std::string_view path) {
  const SharedLock lock(hook_mutex);
  return current_hook ? current_hook(operation, path) : 0;
}

}  // namespace torch_ckpt::os
