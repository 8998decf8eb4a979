#pragma once

#include <string>
#include <string_view>

#include "error.h"
#include "os/directory.h"

// The protocol for the versions of a model beneath a local root. Each version is a complete step
// (step.h) that contains safetensors files. A crash at any point leaves each version either
// complete or absent, and "latest" leads to a complete version.
//
//  1. A publication removes leftovers of interrupted publications, and repeats 5 for the last one.
//     Its version has a larger number than all other versions beneath the root.
//  2. All ranks write version 12 as a directory of safetensors files (model_save.h). The marker
//     "write_completed" is one of its files, so the directory is a complete step as soon as it has
//     the name "0000000012". It never replaces another directory.
//  3. Before the directory gets this name, each file that the base contains with the same bytes is
//     replaced by a hard link to the base's file. Files are never changed after they have been
//     published, so versions can share them. If a delta is wanted, "torch_ckpt.delta"
//     (format/delta.h) is written from the files of both versions, and fsynced.
//  4. The directory gets its name. This is the commit point.
//  5. Under a lock on the root (root_lock.h), the link "latest" is replaced by one to the newest
//     version. It is created under a temporary name and renamed. If two publications end at the
//     same time, "latest" leads to the version with the larger number.
//  6. Versions that are no longer kept are deleted like steps (step.h): not the newest one, and none
//     that a process is reading under a lock. If "latest" leads to a version that is being deleted,
//     the link is first replaced by one to the newest other version, or removed if there is none.
//     Files that other versions share remain.

namespace torch_ckpt::directory {

/// The link to the newest version.
inline constexpr std::string_view kLatestName = "latest";

/// Performs 5. Does nothing if there is no version, or if the link is up to date. Fails with EEXIST
/// if "latest" is not a link.
Result<> update_latest(const os::Directory& root, bool sync);

/// Performs the first part of 6: makes "latest" lead to another version if it leads to `name`. The
/// caller holds the lock on the root. Does nothing if `name` is not a version, but a checkpoint.
Result<> leave_version(const os::Directory& root, const std::string& name);

}  // namespace torch_ckpt::directory
