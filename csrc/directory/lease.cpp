#include "directory/lease.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <sstream>
#include <thread>
#include <utility>

#include "directory/file_names.h"
#include "index/checkpoint_index.h"
#include "os/file.h"

namespace torch_ckpt::directory {
namespace {

constexpr std::chrono::milliseconds kPollInterval{5};
constexpr double kMaxPatienceForFiles = 5.0;
constexpr std::int64_t kRecentSeconds = 3600;

/// Returns the data files and temporary files that no metadata names, sorted.
///
/// rank: return only files of this rank; nullopt for all ranks. used: the files that the metadata
/// of `rank` names; nullptr to read that metadata.
Result<std::vector<std::string>> unnamed_files(const os::Directory& directory,
                                               std::optional<int> rank,
                                               const std::set<std::string>* used,
                                               const NamedFiles& named) {
  auto names = directory.names();
  if (!names) return names.error();
  std::sort(names->begin(), names->end());
  std::vector<std::string> unnamed;
  for (const std::string& name : *names) {
    const FileName file = parse_file_name(name);
    const bool is_removable = file.kind == FileKind::data || file.kind == FileKind::temporary;
    const bool is_of_rank = !rank || file.rank == std::to_string(*rank);
    if (is_removable && is_of_rank && (used == nullptr || !used->contains(name)))
      unnamed.push_back(name);
  }
  if (unnamed.empty()) return unnamed;
  for (const std::string& name : *names) {
    if (parse_file_name(name).kind != FileKind::metadata) continue;
    if (used != nullptr && name == metadata_name(rank)) continue;
    auto others = named(directory, name);
    if (!others) return others.error();
    std::erase_if(unnamed, [&](const std::string& file) { return others->contains(file); });
  }
  return unnamed;
}

/// Removes from `names` the files that a save on another host may have written (rule g), except
/// those that `may_remove` returns true for.
Result<> spare_recent(const os::Directory& directory, std::vector<std::string>& names,
                      const std::function<bool(const std::string&)>& may_remove) {
  if (names.empty() || directory.is_local()) return {};
  auto all = directory.names();
  if (!all) return all.error();
  std::map<std::string, std::int64_t> modified;
  std::int64_t newest = 0;
  for (const std::string& name : *all) {
    auto found = directory.modified_s(name);
    if (!found && found.error().sys_errno == ENOENT) continue;
    if (!found) return found.error();
    modified[name] = *found;
    newest = std::max(newest, *found);
  }
  std::erase_if(names, [&](const std::string& name) {
    const auto found = modified.find(name);
    const bool is_recent = found == modified.end() || found->second > newest - kRecentSeconds;
    return is_recent && !may_remove(name);
  });
  return {};
}

/// Returns true if the file has these contents.
Result<bool> has_contents(const os::Directory& directory, const std::string& name,
                          Pieces contents) {
  directory.refresh(name);
  auto file = directory.open_for_read(name);
  if (!file) return file.error();
  auto size = file->size();
  if (!size) return size.error();
  std::size_t bytes = 0;
  for (const std::string_view piece : contents) bytes += piece.size();
  if (*size != bytes) return false;
  std::string found(bytes, '\0');
  TC_TRY(file->read_at(std::as_writable_bytes(std::span(found)), 0));
  std::string_view rest = found;
  for (const std::string_view piece : contents) {
    if (!rest.starts_with(piece)) return false;
    rest.remove_prefix(piece.size());
  }
  return true;
}

void warn_of_unused(const os::Directory& directory, const Error& error, Warnings& warnings) {
  warnings.push_back("unused files are left in " + directory.path() + ": " + error.message());
}

/// Calls `remove`, which removes unused files. Reports a failure as a warning, because it only
/// leaves files behind.
template <class Remove>
void warn_unless_done(const os::Directory& directory, Warnings& warnings, Remove remove) {
  try {
    if (const Result<> done = remove(); !done) warn_of_unused(directory, done.error(), warnings);
  } catch (const std::exception&) {
    warn_of_unused(directory, exception_error(std::current_exception(), "removing them"), warnings);
  }
}

}  // namespace

Result<std::vector<std::string>> find_missing(const os::Directory& directory,
                                              const std::set<std::string>& files) {
  // List the directory once: calling stat for thousands of files takes seconds on a network file
  // system.
  auto listed = directory.names();
  if (!listed) return listed.error();
  std::ranges::sort(*listed);
  std::vector<std::string> missing;
  for (const std::string& file : files) {
    if (std::ranges::binary_search(*listed, file)) continue;
    // The listing does not contain files in subdirectories. On a network file system, it may lack
    // files that other hosts have created.
    auto found = directory.identity_of(file);
    if (found) continue;
    if (found.error().sys_errno != ENOENT) return found.error();
    missing.push_back(file);
  }
  return missing;
}

Result<std::set<std::string>> named_files(const os::Directory& directory, const std::string& name) {
  directory.refresh(name);
  auto file = directory.open_for_read(name);
  if (!file) return file.error();
  const auto size = file->size();
  if (!size) return size.error();
  const std::string path = directory.path_of(name);
  if (*size > index::CheckpointIndex::kMaxFileBytes) {
    return format_error(Errc::metadata_inconsistent,
                        path + " is too large: it has " + std::to_string(*size) +
                            " bytes, and the limit is " +
                            std::to_string(index::CheckpointIndex::kMaxFileBytes));
  }
  std::vector<std::byte> contents(*size);
  TC_TRY(file->read_at(contents, 0));
  const auto index = index::CheckpointIndex::decode(contents, path);
  if (!index) return index.error();
  std::set<std::string> files;
  for (const auto& named : index->files()) {
    // Normalize the names, because readers also accept names such as "./__0_0.distcp".
    files.insert(index::normalized_path(index->text(named)));
  }
  return files;
}

Result<bool> share(os::Directory& directory, double patience_s,
                   const InterruptCheck& check_interrupt) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(patience_s);
  while (true) {
    auto shared = directory.try_share();
    if (!shared || *shared) return shared;
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(kPollInterval);
    TC_TRY(check_interrupt());
  }
}

DirectoryLease::DirectoryLease(os::Directory directory, std::optional<int> rank, std::string tag,
                               double patience_s)
    : directory_(std::move(directory)),
      rank_(rank),
      tag_(std::move(tag)),
      patience_s_(std::min(patience_s, kMaxPatienceForFiles)) {}

Result<DirectoryLease> DirectoryLease::take(const os::Directory& directory, std::optional<int> rank,
                                            double patience_s,
                                            const InterruptCheck& check_interrupt) {
  auto opened = directory.reopen();
  if (!opened) return opened.error();
  // Only a save that gets the exclusive lock may omit the tag, so of two saves that start at the
  // same time, at least one has a tag.
  auto is_exclusive = opened->try_lock_exclusive();
  if (!is_exclusive) return is_exclusive.error();
  auto names = opened->names();
  if (!names) return names.error();
  const bool is_empty = std::none_of(names->begin(), names->end(), [](const std::string& name) {
    const FileKind kind = parse_file_name(name).kind;
    return kind == FileKind::data || kind == FileKind::metadata;
  });
  auto shared = share(*opened, patience_s, check_interrupt);
  if (!shared) return shared.error();
  if (!*shared) {
    // Fail: without the shared lock, another process could remove this save's files before its
    // commit.
    std::ostringstream text;
    text << directory.path() << ": another process has held the exclusive lock for " << patience_s
         << " s while removing unreferenced files; check that it is not suspended (its PID is in "
            "/proc/locks), then save again";
    return format_error(Errc::system, text.str());
  }
  // Two hosts can both get the exclusive lock if the file system hides their locks.
  const bool needs_tag = !*is_exclusive || !is_empty || !opened->is_local();
  return DirectoryLease(std::move(*opened), rank,
                        needs_tag ? random_hex(kTagDigits) + "_" : std::string(), patience_s);
}

/// Checks that all files are in the directory. Waits up to patience_s_ for a missing file, because
/// a network file system may cache for some time that a name does not exist.
Result<> DirectoryLease::require_files(const std::set<std::string>& files) const {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(patience_s_);
  while (true) {
    auto missing = find_missing(directory_, files);
    if (!missing) return missing.error();
    if (missing->empty()) return {};
    if (Clock::now() >= until) {
      Error error = system_error(ENOENT, "commit", directory_.path_of(missing->front()));
      error.detail =
          "the metadata names this file, but the file is not in the directory, so nothing was "
          "published. Another process has removed it, or the hosts of the ranks do not share the "
          "directory. Check that all hosts have the same file system there, then save again";
      return error;
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

PublishOutcome DirectoryLease::commit(Pieces contents, const std::set<std::string>& files,
                                      PublishMode mode, const NamedFiles& named,
                                      Warnings& warnings) {
  if (!directory_.is_local()) {
    // Without the names, the files are kept for an hour.
    if (auto replaced = named(directory_, metadata_name(rank_))) replaced_ = *std::move(replaced);
  }
  auto outcome = publish_contents(directory_, metadata_name(rank_), contents, mode,
                                  [&] { return require_files(files); });
  switch (outcome.state) {
    case PublishState::published: {
      const Committed committed{contents, files};
      sweep(&committed, named, warnings);
      break;
    }
    case PublishState::not_published:
      // Rule a permits this: no other save has files with these names.
      remove_files(directory_, {files.begin(), files.end()}, warnings);
      sweep(nullptr, named, warnings);
      break;
    case PublishState::durability_uncertain:
      close();
      break;
  }
  return outcome;
}

void DirectoryLease::discard(const NamedFiles& named, Warnings& warnings) {
  sweep(nullptr, named, warnings);
}

void DirectoryLease::sweep(const Committed* committed, const NamedFiles& named,
                           Warnings& warnings) {
  warn_unless_done(directory_, warnings, [&]() -> Result<> {
    const auto is_exclusive = directory_.try_lock_exclusive();
    if (!is_exclusive) return is_exclusive.error();
    return *is_exclusive ? remove_unnamed(committed, named, warnings) : Result<>();
  });
  close();
}

Result<> DirectoryLease::remove_unnamed(const Committed* committed, const NamedFiles& named,
                                        Warnings& warnings) {
  if (committed != nullptr && !rank_) {
    // This commit supersedes the metadata of ranks that saved independently.
    auto names = directory_.names();
    if (!names) return names.error();
    std::erase_if(*names, [](const std::string& name) {
      const FileName file = parse_file_name(name);
      return file.kind != FileKind::metadata || file.rank.empty();
    });
    remove_files(directory_, *names, warnings);
    if (!names->empty()) {
      // A power cut must not bring the metadata back after its data files were removed.
      TC_TRY(directory_.sync());
    }
  }
  auto unnamed =
      unnamed_files(directory_, rank_, committed != nullptr ? &committed->files : nullptr, named);
  if (!unnamed) return unnamed.error();
  if (!unnamed->empty() && committed != nullptr) {
    auto is_current = has_contents(directory_, metadata_name(rank_), committed->contents);
    if (!is_current) return is_current.error();
    if (!*is_current) {
      // Another save has replaced the metadata.
      committed = nullptr;
      unnamed = unnamed_files(directory_, rank_, nullptr, named);
      if (!unnamed) return unnamed.error();
    }
  }
  auto spared =
      spare_recent(directory_, *unnamed, [&](const std::string& file) { return may_remove(file); });
  if (!spared) return spared;
  if (!unnamed->empty() && committed == nullptr) {
    // The metadata may be from a save whose last fsync failed or was never called.
    TC_TRY(directory_.sync());
  }
  remove_files(directory_, *unnamed, warnings);
  return {};
}

/// Returns true for files of this save, and of the save that it has replaced.
bool DirectoryLease::may_remove(const std::string& file) const {
  const bool is_own = !tag_.empty() && file.find("_" + tag_) != std::string::npos;
  return is_own || replaced_.contains(file);
}

void remove_files(const os::Directory& directory, const std::vector<std::string>& names,
                  Warnings& warnings) {
  for (const std::string& name : names) {
    if (auto removed = directory.remove(name); !removed) {
      warnings.push_back("an unused file could not be removed: " + removed.error().message());
    }
  }
}

void remove_own(const os::Directory& directory, const std::set<std::string>& names,
                const NamedFiles& named, Warnings& warnings) {
  warn_unless_done(directory, warnings, [&]() -> Result<> {
    auto opened = directory.reopen();
    if (!opened) return opened.error();
    auto is_exclusive = opened->try_lock_exclusive();
    if (!is_exclusive || !*is_exclusive) return is_exclusive ? Result<>() : is_exclusive.error();
    auto unnamed = unnamed_files(*opened, std::nullopt, nullptr, named);
    if (!unnamed) return unnamed.error();
    std::erase_if(*unnamed, [&](const std::string& name) { return !names.contains(name); });
    remove_files(*opened, *unnamed, warnings);
    return {};
  });
}

Result<std::optional<std::vector<std::string>>> remove_leftovers(os::Directory& directory,
                                                                 const NamedFiles& named) {
  auto is_exclusive = directory.try_lock_exclusive();
  if (!is_exclusive) return is_exclusive.error();
  if (!*is_exclusive) return std::optional<std::vector<std::string>>();
  TC_TRY(directory.sync());
  auto unnamed = unnamed_files(directory, std::nullopt, nullptr, named);
  if (!unnamed) return unnamed.error();
  const auto none = [](const std::string&) { return false; };
  TC_TRY(spare_recent(directory, *unnamed, none));
  for (const std::string& name : *unnamed) {
    TC_TRY(directory.remove(name));
  }
  return std::optional(*std::move(unnamed));
}

}  // namespace torch_ckpt::directory
