#include "directory/root_lock.h"

#include <chrono>
#include <thread>
#include <utility>

namespace torch_ckpt::directory {
namespace {

constexpr std::chrono::seconds kPatience{1};
constexpr std::chrono::milliseconds kPollInterval{5};

}  // namespace

Result<RootLock> RootLock::take(const os::Directory& root) {
  auto opened = root.reopen();
  if (!opened) return opened.error();
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    auto locked = opened->try_lock_exclusive();
    if (!locked) return locked.error();
    const bool is_held = *locked || !opened->has_locks();
    if (is_held || std::chrono::steady_clock::now() >= until) {
      return RootLock(std::move(*opened), is_held);
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace torch_ckpt::directory
