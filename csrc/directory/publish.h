#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "error.h"
#include "os/directory.h"

// How a name comes to stand for new contents, in one step, be it a file's or a directory's. Steps 4
// to 8 of the commit of a checkpoint, whose protocol is in lease.h.

namespace torch_ckpt::directory {

/// How an attempt left the directory.
enum class PublishState {
  published,
  not_published,         // the old state, untouched
  durability_uncertain,  // visible now, but a power cut may undo it
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

/// A name beside `name` that nobody can guess.
std::string temporary_name(const std::string& name);

/// Makes `contents` appear as `name`, which a file had, if any.
/// Not published, with Errc::directory_moved, where the directory's path leads elsewhere by now.
PublishOutcome publish_contents(const os::Directory& directory, const std::string& name,
                                std::span<const std::byte> contents, PublishMode mode);

/// A file or a directory, durable itself, that is to have another name in its directory.
struct Publication {
  std::string temporary;
  std::string name;
  /// What has the name gets this one before, and its own back where the rest fails: a directory is
  /// replaced so. Empty: a file, which a rename replaces.
  std::string aside;
  /// What it must be, where anybody may rename it meanwhile.
  std::optional<os::FileIdentity> identity;
};

/// Not published, with Errc::directory_moved, where the directory's path leads elsewhere by now, or
/// something else has the temporary name.
PublishOutcome publish(const os::Directory& directory, const Publication& of, PublishMode mode);

}  // namespace torch_ckpt::directory
