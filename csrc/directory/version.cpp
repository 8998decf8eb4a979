#include "directory/version.h"

#include <algorithm>
#include <cerrno>
#include <vector>

#include "directory/file_names.h"
#include "directory/root_lock.h"
#include "directory/step.h"

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

/// Returns the name of the newest complete version; empty if there is none.
Result<std::string> newest_of(const os::Directory& root, std::vector<std::string> names,
                              std::string_view below) {
  std::ranges::sort(names, std::greater());
  for (const std::string& name : names) {
    const auto parsed = parse_step_name(name);
    if (!parsed || parsed->kind != StepKind::step) continue;
    if (!below.empty() && name >= below) continue;
    auto is_complete = root.contains(name + "/" + std::string(kMarkerName));
    if (is_complete && *is_complete) return name;
    if (!is_complete && is_complete.error().sys_errno != ENOTDIR) return is_complete.error();
  }
  return std::string();
}

}  // namespace

Result<> update_latest(const os::Directory& root, bool sync, std::string_view below) {
  auto lock = RootLock::take(root);
  if (!lock) return lock.error();
  auto current = current_target(root);
  if (!current) return current.error();
  auto names = root.names();
  if (!names) return names.error();
  for (const std::string& name : *names) {
    // Without the lock, the link may belong to a running publication.
    if (!lock->is_held() || !name.starts_with(kTemporaryLatest)) continue;
    if (auto removed = root.remove(name); !removed) return removed;
  }
  auto newest = newest_of(root, std::move(*names), below);
  if (!newest) return newest.error();
  if (newest->empty() && !below.empty()) return root.remove(std::string(kLatestName));
  if (newest->empty() || *newest == *current) return {};
  const std::string temporary = std::string(kTemporaryLatest) + random_hex(kSuffixDigits);
  if (auto made = root.make_link(*newest, temporary); !made) return made;
  if (auto renamed = root.rename(temporary, std::string(kLatestName)); !renamed) {
    static_cast<void>(root.remove(temporary));
    return renamed;
  }
  return sync ? root.sync() : Result<>();
}

}  // namespace torch_ckpt::directory
