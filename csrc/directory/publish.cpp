#include "directory/publish.h"

#include <fcntl.h>

#include <cerrno>
#include <optional>
#include <utility>

#include "directory/file_names.h"
#include "os/file.h"

namespace torch_ckpt::directory {
namespace {

constexpr int kSuffixDigits = 32;

Result<> write_temporary(const os::Directory& directory, const std::string& name,
                         std::span<const std::byte> contents, bool sync, bool& created) {
  auto file = directory.create(name, os::IoMode::buffered);
  if (!file) return file.error();
  created = true;
  if (auto written = file->write_at(contents, 0); !written) return written;
  if (sync) {
    if (auto synced = file->sync(); !synced) return synced;
  }
  return std::move(*file).close();
}

Error moved(const os::Directory& directory) {
  const std::string now = directory.current_path();
  Error error = format_error(
      Errc::directory_moved,
      "the path leads to another directory than when the save began, or to none: the directory was "
      "renamed or removed, or a link in the path was changed. The save's own directory " +
          (now.empty() ? "is gone" : "is now " + now) +
          ". Nothing was published in either; save again");
  error.operation = "commit";
  error.path = directory.path();
  return error;
}

/// What lies beneath the directory will be found under its path, also after a power cut.
Result<> require_at_path(const os::Directory& directory, PublishMode mode) {
  if (mode.sync && mode.sync_above) {
    if (auto synced = directory.sync_ancestors(); !synced) return synced;
  }
  auto is_there = directory.is_at_path();
  if (!is_there) return is_there.error();
  if (!*is_there) return moved(directory);
  return {};
}

/// That `name` is what has the identity, if that is given.
Result<> require_named(const os::Directory& directory, const std::string& name,
                       const std::optional<os::FileIdentity>& identity) {
  if (!identity) return {};
  const std::string path = directory.path_of(name);
  auto found = os::identity_at(directory.fd(), name.c_str(), AT_SYMLINK_NOFOLLOW, path);
  if (found && *found == *identity) return {};
  if (!found && found.error().sys_errno != ENOENT) return found.error();
  Error error =
      format_error(Errc::directory_moved,
                   "somebody has renamed what was to be published; nothing was published");
  error.operation = "commit";
  error.path = path;
  return error;
}

PublishOutcome made_durable(const os::Directory& directory, PublishMode mode) {
  if (mode.sync) {
    if (auto synced = directory.sync(); !synced) {
      return {PublishState::durability_uncertain, synced.error()};
    }
  }
  return {PublishState::published, {}};
}

}  // namespace

std::string temporary_name(const std::string& name) {
  return name + ".tmp-" + random_hex(kSuffixDigits);
}

PublishOutcome publish_contents(const os::Directory& directory, const std::string& name,
                                std::span<const std::byte> contents, PublishMode mode) {
  const std::string temporary = temporary_name(name);
  bool created = false;
  Result<> done = write_temporary(directory, temporary, contents, mode.sync, created);
  if (done) done = require_at_path(directory, mode);
  if (done) done = directory.rename(temporary, name, mode.replace);
  if (!done) {
    // The first cause is what matters; a left-over temporary file is named by nothing.
    if (created) static_cast<void>(directory.remove(temporary));
    return {PublishState::not_published, done.error()};
  }
  return made_durable(directory, mode);
}

PublishOutcome publish(const os::Directory& directory, const Publication& of, PublishMode mode) {
  bool is_aside = false;
  const Result<> done = [&]() -> Result<> {
    if (auto ready = require_at_path(directory, mode); !ready) return ready;
    if (auto same = require_named(directory, of.temporary, of.identity); !same) return same;
    if (!of.aside.empty()) {
      const std::string path = directory.path_of(of.name);
      auto there = os::identity_at(directory.fd(), of.name.c_str(), AT_SYMLINK_NOFOLLOW, path);
      if (!there && there.error().sys_errno != ENOENT) return there.error();
      if (there) {
        if (auto put = directory.rename(of.name, of.aside, false); !put) return put;
        is_aside = true;
      }
    }
    auto renamed = directory.rename(of.temporary, of.name, mode.replace && of.aside.empty());
    if (!renamed) return renamed;
    auto same = require_named(directory, of.name, of.identity);
    if (!same) static_cast<void>(directory.rename(of.name, of.temporary, false));
    return same;
  }();
  if (done) return made_durable(directory, mode);
  Error error = done.error();
  if (is_aside) {
    if (auto back = directory.rename(of.aside, of.name, false); !back) {
      error.detail += (error.detail.empty() ? "" : ", and ") + of.name + " is now named " +
                      of.aside + " (" + back.error().message() + ")";
    }
  }
  return {PublishState::not_published, std::move(error)};
}

}  // namespace torch_ckpt::directory
