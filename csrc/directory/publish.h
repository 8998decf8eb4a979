#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "error.h"
#include "os/directory.h"

// Gives a name to a new file or directory. This is steps 4 to 8 of a checkpoint's commit; lease.h
// has the protocol.
//
// Publishing is one rename: after a crash the name belongs to the old contents or to the new ones.
// If the old directory is moved to `aside` first, there are two renames. After a crash between them
// nothing has the name: the new directory is complete under its temporary name, and the old one
// under `aside`. For a step, the sweep of its root repairs this (torch_ckpt/steps/local.py). For a
// converted checkpoint nothing does: the old one keeps its temporary name.
//
// A network file system may report an error for a rename that it has carried out. So after an error
// the identity of the file that has the name decides.

namespace torch_ckpt::directory {

/// State of the directory after an attempt to publish.
enum class PublishState {
  published,
  not_published,  // the old contents are unchanged
  // The new contents are visible, but a power cut may undo that; or a rename failed, and it is
  // unknown whether it was carried out or still will be. Nothing was removed.
  durability_uncertain,
};

struct [[nodiscard]] PublishOutcome {
  PublishState state = PublishState::not_published;
  Error error;  // valid unless state is published
};

struct PublishMode {
  bool sync = true;        // false: nothing is fsynced; a power cut may lose the new contents
  bool replace = true;     // false: fails with EEXIST if the name is taken
  bool sync_above = true;  // false: the directories above are already durable
};

/// Publishes a file with these contents as `name`; replaces a file of that name. `check` is called
/// last before the rename, and its error prevents the rename. Fails with Errc::directory_moved if
/// the directory's path now leads to another directory.
PublishOutcome publish_contents(const os::Directory& directory, const std::string& name,
                                std::span<const std::byte> contents, PublishMode mode,
                                const std::function<Result<>()>& check = {});

/// A durable file or directory to rename within its directory.
struct Publication {
  std::string temporary;
  std::string name;
  /// The directory that has `name` is first renamed to this, and back if publishing fails. Requires
  /// PublishMode::replace. If this is empty, a file or an empty directory can be replaced.
  std::string aside;
  /// The expected identity of `temporary`, if another process may rename it meanwhile.
  std::optional<os::FileIdentity> identity;
};

/// Renames `publication.temporary` to its name. Fails with Errc::directory_moved if the directory's
/// path now leads to another directory, or if `temporary` does not have the expected identity; with
/// Errc::invalid_argument if `aside` is given but `mode` forbids replacing.
PublishOutcome publish(const os::Directory& directory, const Publication& publication,
                       PublishMode mode);

}  // namespace torch_ckpt::directory
