#include "directory/root_lock.h"

#include <cerrno>
#include <chrono>
#include <span>
#include <thread>
#include <utility>

namespace torch_ckpt::directory {
namespace {

constexpr std::chrono::milliseconds kPollInterval{5};

/// Returns the first bytes of a lease; none if the root has no lease.
Result<std::string> lease_of(const os::Directory& root, std::size_t most_bytes) {
  root.refresh(std::string(kLeaseName));
  // On NFS, opening the file revalidates its cached contents.
  auto file = root.open_for_read(std::string(kLeaseName));
  if (!file && file.error().sys_errno == ENOENT) return std::string();
  if (!file) return file.error();
  std::string text(most_bytes, 0);
  auto bytes = file->read_some_at(std::as_writable_bytes(std::span(text)), 0);
  if (!bytes) return bytes.error();
  text.resize(*bytes);
  return text;
}

}  // namespace

Result<RootLock> RootLock::take(const os::Directory& root, std::chrono::milliseconds patience) {
  auto opened = root.reopen();
  if (!opened) return opened.error();
  const auto until = std::chrono::steady_clock::now() + patience;
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

Result<> require_lease(const os::Directory& root, const LeaseBytes& lease) {
  if (!lease) return {};
  auto found = lease_of(root, lease->size() + 1);
  if (!found) return found.error();
  if (*found == *lease) return {};
  return format_error(Errc::root_in_use, root.path() + ": the lease on this root has changed");
}

}  // namespace torch_ckpt::directory
