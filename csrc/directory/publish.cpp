#include "directory/publish.h"

#include <cerrno>
#include <optional>
#include <utility>

#include "directory/file_names.h"
#include "os/file.h"

namespace torch_ckpt::directory {
namespace {

/// Which file it is; nullopt where the system does not say.
using MaybeIdentity = std::optional<os::FileIdentity>;

MaybeIdentity known(const Result<os::FileIdentity>& found) {
  return found ? MaybeIdentity(*found) : std::nullopt;
}

/// A file that this call has made, perhaps not whole.
struct Created {
  MaybeIdentity identity;
};

Result<> write_temporary(const os::Directory& directory, const std::string& name,
                         std::span<const std::byte> contents, bool sync,
                         std::optional<Created>& created) {
  auto file = directory.create(name, os::IoMode::buffered);
  if (!file) return file.error();
  created = Created{known(file->identity())};
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
      "the path no longer leads to the directory that was opened by it: the directory was "
      "renamed or removed, or a link in the path was changed. The opened directory " +
          (now.empty() ? "is gone" : "is now " + now) +
          ". Nothing was published in either; try again");
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
                       const MaybeIdentity& identity) {
  if (!identity) return {};
  auto found = directory.identity_of(name);
  if (found && *found == *identity) return {};
  if (!found && found.error().sys_errno != ENOENT) return found.error();
  Error error =
      format_error(Errc::directory_moved,
                   "somebody has renamed what was to be published; nothing was published");
  error.operation = "commit";
  error.path = directory.path_of(name);
  return error;
}

/// What is known of a rename after it has returned.
enum class Renamed { yes, no, perhaps };

/// A file system of another machine's may say that a rename has failed that was carried out (its
/// answer was lost), or that will be yet: what has the name now tells more than the errno.
Renamed look_after_rename(const os::Directory& directory, const std::string& to,
                          const MaybeIdentity& identity, const Result<>& renamed) {
  if (renamed) return Renamed::yes;
  auto found = directory.identity_of(to);
  if (found && identity && *found == *identity) return Renamed::yes;
  const bool is_looked_up = found ? identity.has_value() : found.error().sys_errno == ENOENT;
  if (!is_looked_up) return Renamed::perhaps;
  const int failed = renamed.error().sys_errno;
  const bool tells_nothing = failed == EIO || failed == ETIMEDOUT || failed == EINTR;
  return tells_nothing ? Renamed::perhaps : Renamed::no;
}

PublishOutcome uncertain(Error error) {
  error.detail += error.detail.empty() ? "" : ", and ";
  error.detail += "whether the rename was carried out is not known";
  return {PublishState::durability_uncertain, std::move(error)};
}

PublishOutcome made_durable(const os::Directory& directory, PublishMode mode) {
  if (mode.sync) {
    if (auto synced = directory.sync(); !synced) {
      return {PublishState::durability_uncertain, synced.error()};
    }
  }
  return {PublishState::published, {}};
}

/// A name beside `name` that nobody can guess.
std::string temporary_name(const std::string& name) {
  return name + ".tmp-" + random_hex(kSuffixDigits);
}

}  // namespace

PublishOutcome publish_contents(const os::Directory& directory, const std::string& name,
                                std::span<const std::byte> contents, PublishMode mode,
                                const std::function<Result<>()>& check) {
  const std::string temporary = temporary_name(name);
  std::optional<Created> created;
  Renamed is_renamed = Renamed::no;
  Result<> done = write_temporary(directory, temporary, contents, mode.sync, created);
  if (done) done = require_at_path(directory, mode);
  if (done && check) done = check();
  if (done) {
    done = directory.rename(temporary, name, mode.replace);
    is_renamed = look_after_rename(directory, name, created->identity, done);
  }
  switch (is_renamed) {
    case Renamed::yes:
      return made_durable(directory, mode);
    case Renamed::perhaps:
      return uncertain(done.error());
    case Renamed::no:
      break;
  }
  // The first cause is what matters; a left-over temporary file is named by nothing.
  if (created) static_cast<void>(directory.remove(temporary));
  return {PublishState::not_published, done.error()};
}

PublishOutcome publish(const os::Directory& directory, const Publication& of, PublishMode mode) {
  if (!of.aside.empty() && !mode.replace) {
    Error error =
        format_error(Errc::invalid_argument, "what may not be replaced cannot be put aside either");
    error.operation = "publish";
    error.path = directory.path_of(of.name);
    return {PublishState::not_published, std::move(error)};
  }
  bool is_aside = false;
  Renamed is_renamed = Renamed::no;
  const Result<> done = [&]() -> Result<> {
    if (auto ready = require_at_path(directory, mode); !ready) return ready;
    if (auto same = require_named(directory, of.temporary, of.identity); !same) return same;
    if (!of.aside.empty()) {
      auto there = directory.identity_of(of.name);
      if (!there && there.error().sys_errno != ENOENT) return there.error();
      if (there) {
        auto put = directory.rename(of.name, of.aside, false);
        is_aside = look_after_rename(directory, of.aside, *there, put) == Renamed::yes;
        if (!is_aside) return put;
      }
    }
    const MaybeIdentity written =
        of.identity ? of.identity : known(directory.identity_of(of.temporary));
    auto renamed = directory.rename(of.temporary, of.name, mode.replace && of.aside.empty());
    is_renamed = look_after_rename(directory, of.name, written, renamed);
    if (is_renamed != Renamed::yes) return renamed;
    auto same = require_named(directory, of.name, of.identity);
    if (!same) {
      is_renamed = Renamed::no;
      static_cast<void>(directory.rename(of.name, of.temporary, false));
    }
    return same;
  }();
  if (done) return made_durable(directory, mode);
  Error error = done.error();
  if (is_aside) {
    if (auto back = directory.rename(of.aside, of.name, false); back) {
      // With the name taken a rename that comes late fails.
      is_renamed = Renamed::no;
    } else {
      error.detail += (error.detail.empty() ? "" : ", and ") + of.name + " is now named " +
                      of.aside + " (" + back.error().message() + ")";
    }
  }
  if (is_renamed == Renamed::perhaps) return uncertain(std::move(error));
  return {PublishState::not_published, std::move(error)};
}

}  // namespace torch_ckpt::directory
