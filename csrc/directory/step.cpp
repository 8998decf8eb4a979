#include "directory/step.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "directory/file_names.h"
#include "directory/root_lock.h"
#include "directory/version.h"

namespace torch_ckpt::directory {
namespace {

constexpr std::size_t kStepDigits = 10;
constexpr std::chrono::milliseconds kPollInterval{100};
// A commit waits longer for the lock on the root than a deletion, which is repeated after a later
// save.
constexpr std::chrono::milliseconds kCommitPatience{30'000};

bool is_missing(const Error& error) { return error.sys_errno == ENOENT; }

std::string last_component(const std::string& path) {
  return path.substr(path.find_last_of('/') + 1);
}

Error moved_root(const std::string& path) {
  Error error = system_error(ESTALE, "remove", path);
  error.detail =
      "the path refers to a different directory than at the last save; refusing to remove anything "
      "from it";
  return error;
}

Error locked_root(const os::Directory& root) {
  return format_error(Errc::root_in_use,
                      root.path() +
                          ": another process has held the lock on this root for too long. Check "
                          "that the process is not stopped, and try again");
}

/// Gives a directory with the marker its final name. Returns false if the step exists, or if the
/// directory lacks the marker.
Result<bool> finish_rename(const os::Directory& root, const os::Directory& opened,
                           const std::string& name, const LeaseBytes& lease) {
  const std::string digits = name.substr(0, kStepDigits);
  auto is_complete = opened.contains(std::string(kMarkerName));
  if (!is_complete || !*is_complete) return is_complete;
  auto lock = RootLock::take(root, kCommitPatience);
  if (!lock) return lock.error();
  if (lease && !lock->is_held()) return locked_root(root);
  TC_TRY(require_lease(root, lease));
  auto exists = root.contains(digits);
  if (!exists) return exists;
  if (*exists) return false;
  TC_TRY(root.rename(name, digits, false));
  // Another run that takes the lease need not wait for the fsync.
  lock->release();
  TC_TRY(root.sync());
  return true;
}

/// Removes a leftover, or renames a step that lacks only its final name. Returns true if it was
/// removed.
Result<bool> sweep_one(const StepRoot& steps, const os::Directory& root, const std::string& name,
                       StepKind kind, const LeaseBytes& lease, bool is_superseded) {
  {
    auto opened = os::Directory::open(root.path_of(name));
    // A file belongs to the user. Another process may be sweeping the same leftover.
    if (!opened && (opened.error().sys_errno == ENOTDIR || is_missing(opened.error()))) {
      return false;
    }
    if (!opened) return opened.error();
    if (kind == StepKind::unfinished) {
      auto is_unused = opened->try_lock_exclusive();
      if (!is_unused || !*is_unused) return is_unused;
      if (!is_superseded) {
        auto renamed = finish_rename(root, *opened, name, lease);
        if (!renamed) return renamed;
        if (*renamed) return false;
      }
    }
  }
  auto removed = steps.remove(name, lease);
  if (!removed && is_missing(removed.error())) return false;
  return removed;
}

}  // namespace

Result<> pin(const os::Directory& step) {
  auto file = step.create(std::string(kPinnedName), os::IoMode::buffered);
  if (!file && file.error().sys_errno != EEXIST) return file.error();
  return step.sync();
}

// --- root ----------------------------------------------------------------------------------------

void StepRoot::remember(const os::FileIdentity& identity) {
  const os::MutexLock lock(mutex_);
  identity_ = identity;
}

Result<bool> StepRoot::remove(const std::string& name, const LeaseBytes& lease) const {
  auto root = os::Directory::open(path_);
  if (!root) return root.error();
  auto opened = os::Directory::open(root->path_of(name));
  if (!opened) return opened.error();
  auto identity = root->identity();
  if (!identity) return identity.error();
  {
    const os::MutexLock lock(mutex_);
    if (identity_ && *identity_ != *identity) return moved_root(path_);
  }
  auto is_unused = opened->try_lock_exclusive();
  if (!is_unused) return is_unused;
  // Without locks the readers of a step cannot be detected. Delete the step anyway: this run holds
  // the lease on the root.
  if (!*is_unused && opened->has_locks()) return false;
  TC_TRY(require_lease(*root, lease));
  std::string deleted = name;
  if (const auto parsed = parse_step_name(name); !parsed || parsed->kind != StepKind::deleted) {
    deleted = deleted_name(name.substr(0, kStepDigits));
    {
      auto lock = RootLock::take(*root);
      if (!lock) return lock.error();
      if (!lock->is_held()) return false;
      TC_TRY(require_lease(*root, lease));
      // A save may have replaced the directory since it was opened.
      auto is_same = root->leads_to(name, *opened);
      if (!is_same || !*is_same) return is_same;
      TC_TRY(leave_version(*root, name));
      TC_TRY(root->rename(name, deleted));
    }
    auto is_same = root->leads_to(deleted, *opened);
    if (!is_same) return is_same;
    if (!*is_same) {
      // A save that waited too long for the lock has replaced the directory.
      TC_TRY(root->rename(deleted, name));
      return false;
    }
    TC_TRY(root->sync());
  }
  // Some clients of network file systems keep a removed file under another name while it is open.
  opened->close();
  auto removed = root->remove_tree(deleted);
  // The user has moved the step and left a link. Remove only the link.
  if (!removed && (removed.error().sys_errno == ELOOP || removed.error().sys_errno == ENOTDIR)) {
    removed = root->remove(deleted);
  }
  if (!removed) return removed.error();
  return true;
}

Result<StepRoot::Sweep> StepRoot::sweep(bool deleted_only, const std::string& attempt,
                                        const LeaseBytes& lease,
                                        const std::set<std::string>& superseded) const {
  Sweep sweep;
  auto root = os::Directory::open(path_);
  if (!root && is_missing(root.error())) return sweep;
  if (!root) return root.error();
  TC_TRY(require_lease(*root, lease));
  auto names = root->names();
  if (!names) return names.error();
  std::ranges::sort(*names);
  for (const std::string& name : *names) {
    const auto parsed = parse_step_name(name);
    if (!parsed || parsed->kind == StepKind::step) continue;
    if (deleted_only && parsed->kind != StepKind::deleted) continue;
    if (!attempt.empty() && name == unfinished_name(parsed->digits, attempt)) continue;
    auto removed = sweep_one(*this, *root, name, parsed->kind, lease, superseded.contains(name));
    if (!removed && removed.error().code == Errc::root_in_use) return removed.error();
    if (!removed) {
      sweep.failures.push_back(removed.error());
    } else if (*removed) {
      sweep.removed.push_back(name);
    }
  }
  return sweep;
}

// --- save ----------------------------------------------------------------------------------------

StepSave::StepSave(StepRoot& steps, os::Directory root, os::Directory directory, std::string digits,
                   std::string unfinished)
    : steps_(&steps),
      root_(std::move(root)),
      directory_(std::move(directory)),
      digits_(std::move(digits)),
      unfinished_(std::move(unfinished)) {}

Result<StepSave> StepSave::begin(StepRoot& steps, const os::Directory& unfinished,
                                 const std::string& digits) {
  auto directory = unfinished.reopen();
  if (!directory) return directory.error();
  auto root = os::Directory::open(steps.path());
  if (!root) return root.error();
  // The save's lease holds the shared lock, too, so that this cannot fail because of a sweep.
  TC_TRY(directory->try_share());
  return StepSave(steps, std::move(*root), std::move(*directory), digits,
                  last_component(unfinished.path()));
}

Result<std::vector<std::string>> StepSave::find_missing(
    const std::set<std::string>& files, double patience_s,
    const InterruptCheck& check_interrupt) const {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(patience_s);
  while (true) {
    auto missing = directory::find_missing(directory_, files);
    if (!missing || missing->empty() || Clock::now() >= until) return missing;
    std::this_thread::sleep_for(kPollInterval);
    TC_TRY(check_interrupt());
  }
}

PublishOutcome StepSave::publish(std::string_view marker, bool may_replace, bool sync,
                                 const LeaseBytes& lease) {
  PublishOutcome outcome = try_publish(marker, may_replace, sync, lease);
  if (outcome.state == PublishState::durability_uncertain) {
    outcome.error.subject = root_.path_of(digits_);
  }
  if (outcome.state != PublishState::not_published) {
    is_published_ = true;
    close();
    return outcome;
  }
  if (!replaced_.empty()) {
    auto is_aside = root_.contains(replaced_);
    if (is_aside && *is_aside) {
      outcome.error.detail += (outcome.error.detail.empty() ? "the step" : "; the step") +
                              std::string(" is complete in ") + root_.path_of(unfinished_) +
                              ", and the next sweep will rename it";
      close();
    }
  }
  discard();
  return outcome;
}

PublishOutcome StepSave::try_publish(std::string_view marker, bool may_replace, bool sync,
                                     const LeaseBytes& lease) {
  const auto not_published = [](Error error) {
    return PublishOutcome{PublishState::not_published, std::move(error)};
  };
  // Read the identities now: nothing may fail after the rename.
  auto root_identity = root_.identity();
  if (!root_identity) return not_published(root_identity.error());
  auto identity = directory_.identity();
  if (!identity) return not_published(identity.error());
  // The commit of the metadata has already made the directories above durable.
  auto marked = publish_contents(directory_, std::string(kMarkerName), {&marker, 1},
                                 {.sync = sync, .sync_above = false});
  if (marked.state != PublishState::published) return not_published(marked.error);
  auto exists = root_.contains(digits_);
  if (!exists) return not_published(exists.error());
  if (*exists) {
    auto is_complete = root_.contains(digits_ + "/" + std::string(kMarkerName));
    if (!is_complete) return not_published(is_complete.error());
    if (*is_complete && !may_replace) {
      return not_published(system_error(EEXIST, "rename", root_.path_of(digits_)));
    }
    replaced_ = deleted_name(digits_);
  }
  // Without the lock, a deletion could rename the new step instead of the old one, and another run
  // could take the root and complete steps between the check of the lease and the rename.
  auto lock = RootLock::take(root_, kCommitPatience);
  if (!lock) return not_published(lock.error());
  if (lease && !lock->is_held()) return not_published(locked_root(root_));
  if (auto held = require_lease(root_, lease); !held) return not_published(held.error());
  // With the lock, so that no pin is set between the check and the rename.
  auto is_pinned = root_.contains(digits_ + "/" + std::string(kPinnedName));
  if (!is_pinned) return not_published(is_pinned.error());
  if (*is_pinned) {
    if (auto pinned = pin(directory_); !pinned) return not_published(pinned.error());
  }
  auto outcome = directory::publish(root_, {unfinished_, digits_, replaced_, *identity},
                                    {.sync = false, .replace = *exists});
  if (outcome.state == PublishState::not_published) return outcome;
  steps_->remember(*root_identity);
  // Another run that takes the lease need not wait for the fsync.
  lock->release();
  if (outcome.state == PublishState::published && sync) {
    if (auto synced = root_.sync(); !synced) {
      return {PublishState::durability_uncertain, synced.error()};
    }
  }
  return outcome;
}

void StepSave::discard() {
  if (std::exchange(has_ended_, true)) return;
  // Ignore failures: the next sweep removes the remaining files.
  static_cast<void>(remove_files());
  close();
}

Result<> StepSave::remove_files() {
  auto is_unused = directory_.try_lock_exclusive();
  if (!is_unused || !*is_unused) return is_unused ? Result<>() : is_unused.error();
  auto names = directory_.names();
  if (!names) return names.error();
  // Remove the marker first, so that the next sweep removes any remaining files.
  std::partition(names->begin(), names->end(),
                 [](const std::string& name) { return name == kMarkerName; });
  for (const std::string& name : *names) {
    const bool is_lock = name == os::kLockName;
    auto removed = is_lock ? directory_.remove_lock_file() : directory_.remove(name);
    if (!removed) return removed;
  }
  auto is_in_place = root_.leads_to(unfinished_, directory_);
  if (!is_in_place || !*is_in_place) return is_in_place ? Result<>() : is_in_place.error();
  return root_.remove_directory(unfinished_);
}

void StepSave::close() {
  has_ended_ = true;
  directory_.close();
  root_.close();
}

}  // namespace torch_ckpt::directory
