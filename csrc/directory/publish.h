#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "error.h"
#include "os/directory.h"

// Publishes a new file or directory under its name. These are steps 4 to 8 of a checkpoint's
// commit; lease.h describes the protocol.
//
// Publishing is a single rename: after a crash, the name refers to either the old contents or the
// new. If the old directory must first be moved to `aside`, there are two renames. After a crash
// between them, nothing has the name: the new directory is complete under its temporary name, and
// the old one is under `aside`. For a step, the sweep of its root repairs this (step.h). For a
// converted checkpoint, nothing does: the old one stays under `aside`.
//
// A network file system may carry out a rename and still report an error. So after an error, the
// identity of the file that has the name decides.

namespace torch_ckpt::directory {

/// State of the directory after an attempt to publish.
enum class PublishState {
  published,
  not_published,  // the old contents are unchanged
  // The new contents are visible, but a power cut may undo the rename; or the rename failed
  // with an error that leaves open whether it was or will be carried out. Nothing was removed.
  durability_uncertain,
};

struct [[nodiscard]] PublishOutcome {
  PublishState state = PublishState::not_published;
  Error error;  // valid unless state is published
};

struct PublishMode {
  bool sync = true;        // false: fsync nothing; a power cut may lose the new contents
  bool replace = true;     // false: fail with EEXIST if the name exists
  bool sync_above = true;  // false: do not fsync the parent directories, which are durable
};

/// The contents of a file, in pieces.
using Pieces = std::span<const std::string_view>;

/// Publishes a file with these contents as `name`; replaces a file of that name. Calls `check`
/// immediately before the rename; an error from it prevents the rename. Fails with
/// Errc::directory_moved if the directory's path now refers to another directory.
PublishOutcome publish_contents(const os::Directory& directory, const std::string& name,
                                Pieces contents, PublishMode mode,
                                const std::function<Result<>()>& check = {});

/// A durable file or directory to be renamed within its directory.
struct Publication {
  std::string temporary;
  std::string name;
  /// A directory that has `name` is first renamed to `aside`, and back if publishing fails.
  /// Requires PublishMode::replace. If `aside` is empty, only a file or an empty directory can be
  /// replaced.
  std::string aside;
  /// Expected identity of `temporary`, if another process may rename it meanwhile.
  std::optional<os::FileIdentity> identity;
  /// No other process uses `temporary`. If `name` does not have the expected identity after the
  /// rename, a later save has replaced the directory, which stays.
  bool is_private = false;
  /// Exchange the two names: a directory that has `name` gets the temporary name. Requires
  /// PublishMode::replace, and that both exist. Fails with EINVAL or ENOSYS if the file system
  /// cannot exchange names.
  bool exchanges = false;
};

/// Renames `publication.temporary` to `publication.name`. Fails with Errc::directory_moved if the
/// directory's path now refers to another directory or if `temporary` does not have the expected
/// identity, and with Errc::invalid_argument if `aside` is set but `mode` forbids replacing.
PublishOutcome publish(const os::Directory& directory, const Publication& publication,
                       PublishMode mode);

}  // namespace torch_ckpt::directory
