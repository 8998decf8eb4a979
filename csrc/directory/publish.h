#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "error.h"
#include "os/directory.h"

// How a name comes to stand for new contents, be it a file's or a directory's. Steps 4 to 8 of the
// commit of a checkpoint, whose protocol is in lease.h.
//
// It is one rename, and a crash leaves what had the name or what was published. Only where
// something is put aside there are two, and a crash between them leaves nothing under the name:
// what was published is complete under its temporary name, and what had the name is whole under
// `aside`. The sweep of a root names a step that a crash has left so (torch_ckpt/steps/local.py).
// After a conversion nothing does: what had the name stays under its temporary one.
//
// What a rename says of its failure is not believed alone: a file system of another machine's may
// have carried it out. What has the name then tells.

namespace torch_ckpt::directory {

/// How an attempt left the directory.
enum class PublishState {
  published,
  not_published,  // the old state, untouched
  // Visible now, but a power cut may undo it; or a rename has failed in a way that does not tell
  // whether it was, or yet will be, carried out. Nothing was removed.
  durability_uncertain,
};

struct [[nodiscard]] PublishOutcome {
  PublishState state = PublishState::not_published;
  Error error;  // where state is not published
};

struct PublishMode {
  bool sync = true;        // false: nothing is fsynced, and a power cut may lose what is published
  bool replace = true;     // false: not published, with EEXIST, where something has the name
  bool sync_above = true;  // false: the directories above are durable already
};

/// Makes `contents` appear as `name`, which a file had, if any.
/// Not published, with Errc::directory_moved, where the directory's path leads elsewhere by now, or
/// with the error of `check`, the last call before the rename.
PublishOutcome publish_contents(const os::Directory& directory, const std::string& name,
                                std::span<const std::byte> contents, PublishMode mode,
                                const std::function<Result<>()>& check = {});

/// A file or a directory, durable itself, that is to have another name in its directory.
struct Publication {
  std::string temporary;
  std::string name;
  /// What has the name gets this one before, and its own back where the rest fails: a directory is
  /// replaced so. Only with PublishMode::replace. Empty: a rename replaces a file, or a directory
  /// that is empty.
  std::string aside;
  /// What it must be, where anybody may rename it meanwhile.
  std::optional<os::FileIdentity> identity;
};

/// Not published, with Errc::directory_moved, where the directory's path leads elsewhere by now, or
/// something else has the temporary name. With Errc::invalid_argument where `aside` is given and
/// nothing may be replaced.
PublishOutcome publish(const os::Directory& directory, const Publication& of, PublishMode mode);

}  // namespace torch_ckpt::directory
