#include "directory/publish.h"

#include <cerrno>
#include <optional>
#include <utility>

#include "directory/file_names.h"
#include "os/file.h"

namespace torch_ckpt::directory {
namespace {

/// Identity of a file; nullopt if it could not be determined.
using MaybeIdentity = std::optional<os::FileIdentity>;

MaybeIdentity to_optional(const Result<os::FileIdentity>& found) {
  return found ? MaybeIdentity(*found) : std::nullopt;
}

/// A file that this call has created; may be incomplete.
struct Created {
  MaybeIdentity identity;
};

/// Writes the pieces to the beginning of the file. Joins small pieces, because each write is a
/// system call.
Result<> write_pieces(os::File& file, Pieces contents) {
  constexpr std::size_t kJoinedBytes = std::size_t{1} << 20;
  std::string joined;
  std::uint64_t offset = 0;
  const auto write = [&](std::string_view bytes) {
    offset += bytes.size();
    return file.write_at(std::as_bytes(std::span(bytes)), offset - bytes.size());
  };
  for (const std::string_view piece : contents) {
    if (joined.size() + piece.size() <= kJoinedBytes) {
      joined += piece;
      continue;
    }
    TC_TRY(write(joined));
    joined.clear();
    TC_TRY(write(piece));
  }
  return write(joined);
}

Result<> write_temporary(const os::Directory& directory, const std::string& name, Pieces contents,
                         bool sync, std::optional<Created>& created) {
  auto file = directory.create(name, os::IoMode::buffered);
  if (!file) return file.error();
  created = Created{to_optional(file->identity())};
  TC_TRY(write_pieces(*file, contents));
  if (sync) {
    TC_TRY(file->sync());
  }
  return std::move(*file).close();
}

Error moved_error(const os::Directory& directory) {
  const std::string now = directory.current_path();
  Error error = format_error(
      Errc::directory_moved,
      "the path no longer refers to the directory that was opened: the directory was renamed or "
      "removed, or a link in the path was changed. The opened directory " +
          (now.empty() ? "no longer exists" : "is now " + now) +
          ". Nothing was published; save again");
  error.operation = "commit";
  error.path = directory.path();
  return error;
}

/// Checks that the path refers to the directory. If `mode` asks for it, first fsyncs the parent
/// directories, so that this is still true after a power cut.
Result<> require_at_path(const os::Directory& directory, PublishMode mode) {
  if (mode.sync && mode.sync_above) {
    TC_TRY(directory.sync_ancestors());
  }
  auto is_at_path = directory.is_at_path();
  if (!is_at_path) return is_at_path.error();
  if (!*is_at_path) return moved_error(directory);
  return {};
}

/// If an identity is given, checks that the file `name` has it.
Result<> require_named(const os::Directory& directory, const std::string& name,
                       const MaybeIdentity& identity) {
  if (!identity) return {};
  auto found = directory.identity_of(name);
  if (found && *found == *identity) return {};
  if (!found && found.error().sys_errno != ENOENT) return found.error();
  Error error = format_error(
      Errc::directory_moved,
      "another process renamed or replaced this file or directory before it was published; nothing "
      "was published");
  error.operation = "commit";
  error.path = directory.path_of(name);
  return error;
}

/// Outcome of a rename; `unknown` after some errors.
enum class Renamed { yes, no, unknown };

/// Determines from the identity of the file that has the name whether a rename was carried out. If
/// a network file system reports an error, it may have carried out the rename (if only the reply
/// was lost) or may still do so.
Renamed check_rename(const os::Directory& directory, const std::string& to,
                     const MaybeIdentity& identity, const Result<>& renamed) {
  if (renamed) return Renamed::yes;
  auto found = directory.identity_of(to);
  if (found && identity && *found == *identity) return Renamed::yes;
  const bool is_known = found ? identity.has_value() : found.error().sys_errno == ENOENT;
  if (!is_known) return Renamed::unknown;
  const int failed = renamed.error().sys_errno;
  const bool is_ambiguous = failed == EIO || failed == ETIMEDOUT || failed == EINTR;
  return is_ambiguous ? Renamed::unknown : Renamed::no;
}

PublishOutcome uncertain(Error error) {
  error.detail += error.detail.empty() ? "" : ", and ";
  error.detail += "it is unknown whether the rename was carried out";
  return {PublishState::durability_uncertain, std::move(error)};
}

PublishOutcome make_durable(const os::Directory& directory, PublishMode mode) {
  if (mode.sync) {
    if (auto synced = directory.sync(); !synced) {
      return {PublishState::durability_uncertain, synced.error()};
    }
  }
  return {PublishState::published, {}};
}

/// Returns an unpredictable temporary name.
std::string temporary_name(const std::string& name) {
  return name + ".tmp-" + random_hex(kSuffixDigits);
}

}  // namespace

PublishOutcome publish_contents(const os::Directory& directory, const std::string& name,
                                Pieces contents, PublishMode mode,
                                const std::function<Result<>()>& check) {
  const std::string temporary = temporary_name(name);
  std::optional<Created> created;
  Renamed is_renamed = Renamed::no;
  Result<> done = write_temporary(directory, temporary, contents, mode.sync, created);
  if (done) done = require_at_path(directory, mode);
  if (done && check) done = check();
  if (done) {
    done = directory.rename(temporary, name, mode.replace);
    is_renamed = check_rename(directory, name, created->identity, done);
  }
  switch (is_renamed) {
    case Renamed::yes:
      return make_durable(directory, mode);
    case Renamed::unknown:
      return uncertain(done.error());
    case Renamed::no:
      break;
  }
  // Ignore a failure to remove the temporary file: no metadata names it, and only the first error
  // is reported.
  if (created) static_cast<void>(directory.remove(temporary));
  return {PublishState::not_published, done.error()};
}

PublishOutcome publish(const os::Directory& directory, const Publication& publication,
                       PublishMode mode) {
  if (!publication.aside.empty() && !mode.replace) {
    Error error =
        format_error(Errc::invalid_argument, "`aside` is set, but nothing may be replaced");
    error.operation = "publish";
    error.path = directory.path_of(publication.name);
    return {PublishState::not_published, std::move(error)};
  }
  bool is_aside = false;
  Renamed is_renamed = Renamed::no;
  const Result<> done = [&]() -> Result<> {
    TC_TRY(require_at_path(directory, mode));
    TC_TRY(require_named(directory, publication.temporary, publication.identity));
    if (!publication.aside.empty()) {
      auto there = directory.identity_of(publication.name);
      if (!there && there.error().sys_errno != ENOENT) return there.error();
      if (there) {
        auto put = directory.rename(publication.name, publication.aside, false);
        is_aside = check_rename(directory, publication.aside, *there, put) == Renamed::yes;
        if (!is_aside) return put;
      }
    }
    const MaybeIdentity written = publication.identity
                                      ? publication.identity
                                      : to_optional(directory.identity_of(publication.temporary));
    auto renamed = publication.exchanges
                       ? directory.exchange(publication.temporary, publication.name)
                       : directory.rename(publication.temporary, publication.name,
                                          mode.replace && publication.aside.empty());
    is_renamed = check_rename(directory, publication.name, written, renamed);
    if (is_renamed != Renamed::yes) return renamed;
    if (publication.is_private) return {};
    auto same = require_named(directory, publication.name, publication.identity);
    if (!same) {
      is_renamed = Renamed::no;
      static_cast<void>(directory.rename(publication.name, publication.temporary, false));
    }
    return same;
  }();
  if (done) return make_durable(directory, mode);
  Error error = done.error();
  if (is_aside) {
    if (auto back = directory.rename(publication.aside, publication.name, false); back) {
      // The name exists again, so a delayed rename will fail.
      is_renamed = Renamed::no;
    } else {
      error.detail += (error.detail.empty() ? "" : ", and ") + publication.name + " is now named " +
                      publication.aside + " (" + back.error().message() + ")";
    }
  }
  if (is_renamed == Renamed::unknown) return uncertain(std::move(error));
  return {PublishState::not_published, std::move(error)};
}

}  // namespace torch_ckpt::directory
