#pragma once

#include <string>

#include "error.h"

namespace torch_ckpt::os {

/// mkdir -p. Not durable before sync_ancestors.
Result<> make_directories(const std::string& path);

/// fsync of a directory: makes the creations, renames and removals in it survive a power cut.
Result<> sync_directory(const std::string& path);

/// fsync of the directories above `path`, up to the root of its file system, so that a power cut
/// cannot take away one that was made lately, by whomever. Those that we may not open were there
/// before us.
Result<> sync_ancestors(const std::string& path);

/// Atomically renames within one directory; with `replace` false it fails with EEXIST where there
/// is a `to`. Not durable before sync_directory.
Result<> rename_file(const std::string& from, const std::string& to, bool replace = true);

/// Removes a file; a file that is not there is not an error.
Result<> remove_file(const std::string& path);

}  // namespace torch_ckpt::os
