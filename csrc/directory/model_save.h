#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "directory/lease.h"
#include "directory/publish.h"
#include "error.h"
#include "format/safe_checksums.h"
#include "os/directory.h"
#include "planning/safetensors_layout.h"

// The protocol for a directory of safetensors files, which all ranks write together. A crash at any
// point leaves either no directory or the old one, or the new one, with all its files.
//
//  1. The coordinator removes leftovers of interrupted saves of this directory (7). It creates
//     ".model.tmp-{32 hex digits}" next to "model", and takes the shared lock of the new directory
//     (lease.h).
//  2. Each rank opens the new directory beneath the parent directory, and writes its parts of the
//     tensors to their final places in the files (planning/safetensors_layout.h,
//     engine/output_file.h), or to temporary files from which one rank assembles each file
//     (planning/object_files.h). It fsyncs its files, then the directory.
//  3. Once all ranks have done so, the coordinator checks the size of each file, and writes its
//     header. It writes the index, the other files such as config.json, and the checksums of all of
//     these. It fsyncs each file, then the directory. A publication may then share files with
//     another directory, and add a delta (version.h).
//  4. If "model" does not exist, the coordinator renames the new directory to "model"; the rename
//     fails if another process has created it meanwhile. If "model" exists and may be replaced, the
//     coordinator exchanges the names of the two directories. This is the commit point. On a file
//     system that cannot exchange names, the old directory is first renamed to
//     ".model.former-{32 hex digits}", so that a crash between the two renames leaves no "model",
//     but the old directory under that name, which no save removes. If nothing may be replaced, the
//     coordinator first removes a directory that was empty in 1. The removal fails if another
//     process has added a file.
//  5. The coordinator fsyncs the parent directory. Only then is the save reported as successful.
//  6. The coordinator removes the old directory, which now has a temporary name. A directory is
//     replaced only if it contains nothing but model files and files that its own checksums name.
//     This is checked in 1, in 4, and again before the removal: if another process has added a file
//     meanwhile, the old directory is renamed to ".model.former-{32 hex digits}" and kept. If a
//     process holds the lock of the old directory, because it is loading, the old directory is left
//     to the next save (7).
//  7. A leftover is a directory with a temporary name of 1. It is removed under its exclusive lock,
//     which another process cannot take while a save or load holds the shared lock. Without locks,
//     leftovers stay.
//  8. If a save fails before 4, the coordinator removes the new directory.

namespace torch_ckpt::directory {

/// The coordinator's part of a save to a directory of safetensors files.
class ModelSave {
 public:
  using Extra = planning::SafetensorsLayout::Extra;

  /// Performs 1. `name` is the directory's name in `parent`. Fails with EEXIST if the directory
  /// exists, is not empty and may not be replaced, or contains other files. extras: names of the
  /// files that complete() receives.
  static Result<ModelSave> begin(const os::Directory& parent, std::string name, bool may_replace,
                                 std::set<std::string> extras, Warnings& warnings);

  /// The name of the new directory in the parent directory.
  const std::string& temporary() const { return temporary_; }
  const os::Directory& directory() const { return directory_; }

  /// Performs 3. checksums: of each file's data, in the order of the layout; empty if unknown.
  Result<> complete(const planning::SafetensorsLayout& layout, std::span<const Extra> extras,
                    std::vector<std::string> checksums, bool sync);
  /// Does the same for files without an index, which may be one of the extras.
  Result<> complete(std::span<const planning::SafetensorsLayout::File> files,
                    std::span<const Extra> extras, std::vector<std::string> checksums, bool sync);
  /// Replaces each file that `base` contains with the same name and bytes by a hard link to it.
  /// Call this after complete(). Compares checksums, then all bytes. A file that cannot be linked
  /// stays.
  Result<> link_unchanged(const os::Directory& base, bool sync, Warnings& warnings);
  /// Performs 4 to 6. If nothing is published, removes the new directory.
  PublishOutcome publish(bool sync, Warnings& warnings);
  /// Performs 8. Does nothing after publish().
  void discard(Warnings& warnings);

 private:
  ModelSave(os::Directory parent, os::Directory directory, std::string name, std::string temporary,
            bool may_replace, bool replaces_empty, std::set<std::string> extras);
  PublishOutcome try_publish(bool sync, std::string& former);
  Result<> remove_former(const std::string& former) const;
  Result<> write_file(const std::string& name, std::string_view contents, bool sync) const;
  Result<> link_if_equal(const os::Directory& base, const std::string& name, bool sync) const;

  os::Directory parent_;
  os::Directory directory_;
  std::string name_;
  std::string temporary_;
  bool may_replace_;
  bool replaces_empty_;  // only an empty directory may be replaced, and there was one
  std::set<std::string> extras_;
  std::vector<format::SafeChecksums> checksums_;  // set by complete()
  bool has_ended_ = false;
};

}  // namespace torch_ckpt::directory
