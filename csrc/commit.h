#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "error.h"
#include "os/directory.h"

namespace torch_ckpt {

/// How a failed commit left the directory.
enum class CommitState {
  committed,
  not_committed,         // the old state, untouched
  durability_uncertain,  // visible now, but a power cut may undo it
};

struct CommitOutcome {
  CommitState state = CommitState::not_committed;
  Error error;  // where state is not committed
};

struct CommitMode {
  bool sync = true;     // false: nothing is fsynced, and a power cut may lose the checkpoint
  bool replace = true;  // false: not committed, with EEXIST, where there is one of the name
};

/// Makes `contents` appear as `name` in `directory` in one step; see commit.cpp for the protocol.
/// Not committed, with Errc::directory_moved, where the directory's path leads elsewhere by now.
CommitOutcome commit_metadata(const os::Directory& directory, const std::string& name,
                              std::span<const std::byte> contents, CommitMode mode);

}  // namespace torch_ckpt
