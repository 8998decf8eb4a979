#include "directory/version.h"

#include <algorithm>
#include <cerrno>
#include <vector>

#include "directory/file_names.h"
#include "directory/root_lock.h"
#include "directory/step_names.h"
#include "format/safe_checksums.h"

namespace torch_ckpt::directory {
namespace {

constexpr std::string_view kTemporaryLatest = ".latest.tmp-";

/// Returns the target of "latest"; empty if there is no link.
Result<std::string> current_target(const os::Directory& root) {
  auto target = root.read_link(std::string(kLatestName));
  if (target) return target;
  if (target.error().sys_errno == ENOENT) return std::string();
  if (target.error().sys_errno != EINVAL) return target.error();
  Error error = system_error(EEXIST, "publish", root.path_of(kLatestName));
  error.detail = "it is not a link, so it was not replaced; remove it, or choose another root";
  return error;
}

/// Returns the name of the newest complete version except `without`; empty if there is none.
Result<std::string> newest_of(const os::Directory& root, std::string_view without) {
  auto names = root.names();
  if (!names) return names.error();
  std::ranges::sort(*names, std::greater());
  for (const std::string& name : *names) {
    const auto parsed = parse_step_name(name);
    if (!parsed || parsed->kind != StepKind::step || name == without) continue;
    auto is_complete = root.contains(name + "/" + std::string(kMarkerName));
    if (is_complete && *is_complete) return name;
    if (!is_complete && is_complete.error().sys_errno != ENOTDIR) return is_complete.error();
  }
  return std::string();
}

Result<> set_latest(const os::Directory& root, const std::string& name) {
  const std::string temporary = std::string(kTemporaryLatest) + random_hex(kSuffixDigits);
  TC_TRY(root.make_link(name, temporary));
  auto renamed = root.rename(temporary, std::string(kLatestName));
  if (!renamed) static_cast<void>(root.remove(temporary));
  return renamed;
}

Result<> remove_leftovers_of_links(const os::Directory& root) {
  auto names = root.names();
  if (!names) return names.error();
  for (const std::string& name : *names) {
    if (!name.starts_with(kTemporaryLatest)) continue;
    TC_TRY(root.remove(name));
  }
  return {};
}

}  // namespace

Result<> update_latest(const os::Directory& root, bool sync) {
  auto lock = RootLock::take(root);
  if (!lock) return lock.error();
  auto current = current_target(root);
  if (!current) return current.error();
  // Without the lock, a link may belong to a running publication.
  if (lock->is_exclusive()) {
    TC_TRY(remove_leftovers_of_links(root));
  }
  // Without the lock, another publication may have moved the link meanwhile, so look again.
  while (true) {
    auto newest = newest_of(root, {});
    if (!newest) return newest.error();
    if (newest->empty()) return {};
    // Another process may have renamed the link, but not made it durable.
    if (*newest == *current) return sync ? root.sync() : Result<>();
    TC_TRY(set_latest(root, *newest));
    *current = std::move(*newest);
  }
}

Result<> leave_version(const os::Directory& root, const std::string& name) {
  const auto current = root.read_link(std::string(kLatestName));
  if (!current || *current != name) return {};
  // A link to a checkpoint was made by another program.
  const auto is_version = root.contains(name + "/" + std::string(format::kSafeChecksumsName));
  if (!is_version || !*is_version) return is_version ? Result<>() : is_version.error();
  const auto newest = newest_of(root, name);
  if (!newest) return newest.error();
  auto left = newest->empty() ? root.remove(std::string(kLatestName)) : set_latest(root, *newest);
  return left ? root.sync() : left;
}

}  // namespace torch_ckpt::directory
