#pragma once

#include <string>

#include "error.h"

namespace torch_ckpt::os {

/// mkdir -p. With `durable` every directory that had to be made is fsynced into its parent, so that
/// a power cut cannot take an ancestor away from under a committed checkpoint.
Result<> make_directories(const std::string& path, bool durable);

/// fsync of a directory: makes the creations, renames and removals in it survive a power cut.
Result<> sync_directory(const std::string& path);

/// Atomically replaces `to` within one directory. Not durable before sync_directory.
Result<> rename_file(const std::string& from, const std::string& to);

/// Removes a file; a file that is not there is not an error.
Result<> remove_file(const std::string& path);

}  // namespace torch_ckpt::os
