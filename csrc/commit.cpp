// Commit protocol. A crash at any point leaves either the old checkpoint or the new one.
//
// 1. The coordinator shares the directory, so that nobody removes unused files in it meanwhile, and
//    gives the save's files names that nobody uses (torch_ckpt/generations.py).
// 2. Every rank writes its data files, fsyncs and closes each, then fsyncs the directory
//    (engine/save_session.cpp). All ranks' results arrive at the coordinator. One missing or failed
//    result aborts: nothing below runs, and there is no checkpoint but the old one.
// 3. The coordinator writes the metadata under a temporary name that nobody can guess and that does
//    not exist (O_EXCL, no links), fsyncs and closes it.
// 4. It fsyncs the directories above, up to the root of the file system: this save may have made
//    them, or one before it that died.
// 5. It renames the temporary file to the metadata's name; where nothing may be replaced, by a
//    rename that fails if the name is taken. This is the commit point.
// 6. It fsyncs the directory. Without this a power cut undoes the rename, so only now is the save
//    reported. If this one call fails the checkpoint is visible but perhaps not durable:
//    CommitState::durability_uncertain.
// 7. Data files that no metadata names any more are removed, unless somebody else shares the
//    directory (torch_ckpt/generations.py). A crash before or amid this leaves unused files, never
//    a missing one.

#include "commit.h"

#include <cerrno>
#include <random>
#include <utility>

#include "os/directory.h"
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

Result<> write_temporary(const std::string& path, std::span<const std::byte> contents, bool sync,
                         bool& created) {
  auto file = os::File::create(path, os::IoMode::buffered);
  if (!file) return file.error();
  created = true;
  if (auto written = file->write_at(contents, 0); !written) return written;
  if (sync) {
    if (auto synced = file->sync(); !synced) return synced;
  }
  return std::move(*file).close();
}

}  // namespace

CommitOutcome commit_metadata(const std::string& directory, const std::string& name,
                              std::span<const std::byte> contents, CommitMode mode) {
  const std::string temporary = directory + "/" + name + ".tmp-" + random_suffix();
  bool created = false;
  Result<> prepared = write_temporary(temporary, contents, mode.sync, created);
  if (prepared && mode.sync) prepared = os::sync_ancestors(directory);
  if (prepared) prepared = os::rename_file(temporary, directory + "/" + name, mode.replace);
  if (!prepared) {
    // The first cause is what matters; a left-over temporary file is named by nothing.
    if (created) static_cast<void>(os::remove_file(temporary));
    return {CommitState::not_committed, prepared.error()};
  }
  if (mode.sync) {
    if (auto synced = os::sync_directory(directory); !synced) {
      return {CommitState::durability_uncertain, synced.error()};
    }
  }
  return {CommitState::committed, {}};
}

}  // namespace torch_ckpt
