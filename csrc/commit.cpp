// Commit protocol. A crash at any point leaves either the old checkpoint or the new one.
//
// The directory is opened once, by its path, on each rank. From then on every call goes by that
// descriptor (os/directory.h), so that a save stays in one directory whatever becomes of its path.
//
// 1. The coordinator shares the directory, so that nobody removes unused files in it meanwhile, and
//    gives the save's files names that nobody uses (torch_ckpt/checkpoint/generations.py).
// 2. Every rank writes its data files, fsyncs and closes each, then fsyncs the directory
//    (engine/save_session.cpp). All ranks' results arrive at the coordinator. One missing or failed
//    result aborts: nothing below runs, and there is no checkpoint but the old one.
// 3. The coordinator writes the metadata under a temporary name that nobody can guess and that does
//    not exist (O_EXCL, no links), fsyncs and closes it.
// 4. It fsyncs the directories above, up to the root of the file system: this save may have made
//    them, or one before it that died.
// 5. It looks whether the path still leads to the directory. A checkpoint that nobody would find
//    under the path that the caller gave is not committed.
// 6. It renames the temporary file to the metadata's name; where nothing may be replaced, by a
//    rename that fails if the name is taken. This is the commit point.
// 7. It fsyncs the directory. Without this a power cut undoes the rename, so only now is the save
//    reported. If this one call fails the checkpoint is visible but perhaps not durable:
//    CommitState::durability_uncertain.
// 8. Data files that no metadata names any more are removed, unless somebody else shares the
//    directory (torch_ckpt/checkpoint/generations.py). A crash before or amid this leaves unused
//    files, never a missing one.

#include "commit.h"

#include <cerrno>
#include <random>
#include <utility>

#include "os/file.h"

namespace torch_ckpt {
namespace {

std::string random_suffix() {
  std::random_device entropy;
  constexpr char kDigits[] = "0123456789abcdef";
  std::string suffix;
  for (int word = 0; word < 4; ++word) {
    unsigned value = entropy();
    for (int i = 0; i < 8; ++i, value >>= 4) suffix += kDigits[value & 15];
  }
  return suffix;
}

Result<> write_temporary(const os::Directory& directory, const std::string& name,
                         std::span<const std::byte> contents, bool sync, bool& created) {
  auto file = directory.create(name, os::IoMode::buffered);
  if (!file) return file.error();
  created = true;
  if (auto written = file->write_at(contents, 0); !written) return written;
  if (sync) {
    if (auto synced = file->sync(); !synced) return synced;
  }
  return std::move(*file).close();
}

Result<> require_at_path(const os::Directory& directory) {
  auto is_there = directory.is_at_path();
  if (!is_there) return is_there.error();
  if (*is_there) return {};
  const std::string now = directory.current_path();
  Error error = format_error(
      Errc::directory_moved,
      "the path leads to another directory than when the save began, or to none: the directory was "
      "renamed or removed, or a link in the path was changed. The save's own directory " +
          (now.empty() ? "is gone" : "is now " + now) +
          ". Nothing was published in either; save again");
  error.operation = "commit";
  error.path = directory.path();
  return error;
}

}  // namespace

CommitOutcome commit_metadata(const os::Directory& directory, const std::string& name,
                              std::span<const std::byte> contents, CommitMode mode) {
  const std::string temporary = name + ".tmp-" + random_suffix();
  bool created = false;
  Result<> prepared = write_temporary(directory, temporary, contents, mode.sync, created);
  if (prepared && mode.sync) prepared = directory.sync_ancestors();
  if (prepared) prepared = require_at_path(directory);
  if (prepared) prepared = directory.rename(temporary, name, mode.replace);
  if (!prepared) {
    // The first cause is what matters; a left-over temporary file is named by nothing.
    if (created) static_cast<void>(directory.remove(temporary));
    return {CommitState::not_committed, prepared.error()};
  }
  if (mode.sync) {
    if (auto synced = directory.sync(); !synced) {
      return {CommitState::durability_uncertain, synced.error()};
    }
  }
  return {CommitState::committed, {}};
}

}  // namespace torch_ckpt
