#include "directory/model_save.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <regex>
#include <set>

#include "directory/file_names.h"
#include "directory/step_names.h"
#include "format/crc32.h"
#include "format/delta.h"
#include "os/file.h"

namespace torch_ckpt::directory {
namespace {

constexpr std::string_view kInfix = ".tmp-";
// Limits the memory for the checksums of a directory that is to be replaced.
constexpr std::uint64_t kMaxChecksumsBytes = std::uint64_t{1} << 30;
constexpr std::size_t kCompareBytes = std::size_t{1} << 20;

std::string temporary_name(const std::string& name) {
  return "." + name + std::string(kInfix) + random_hex(kSuffixDigits);
}

/// Returns a new name for a directory that is replaced and may have to be kept.
std::string former_name(const std::string& name) {
  return "." + name + ".former-" + random_hex(kSuffixDigits);
}

/// Returns true for temporary names of `name`. If `name` is a step, returns true for the temporary
/// names of all steps: a later publication has another number.
bool is_temporary_name(std::string_view found, std::string_view name) {
  const std::size_t infix = found.rfind(kInfix);
  if (!found.starts_with('.') || infix == std::string_view::npos) return false;
  const std::string_view digits = found.substr(infix + kInfix.size());
  if (digits.size() != kSuffixDigits || !is_hex(digits)) return false;
  const auto is_step = [](std::string_view text) {
    const auto parsed = parse_step_name(text);
    return parsed && parsed->kind == StepKind::step;
  };
  const std::string_view of = found.substr(1, infix - 1);
  return of == name || (is_step(of) && is_step(name));
}

/// Returns true for the names of files that every save of this format may write.
bool is_model_file(std::string_view name) {
  if (name == planning::SafetensorsLayout::kIndexName || name == format::kSafeChecksumsName ||
      name == format::kDeltaName || name == "config.json" || name == os::kLockName) {
    return true;
  }
  static const std::regex kPattern(R"(model(-\d{5,}-of-\d{5,})?\.safetensors)");
  return std::regex_match(name.begin(), name.end(), kPattern);
}

/// Reads the directory's checksums; returns none if there are no valid ones.
Result<std::vector<format::SafeChecksums>> read_checksums(const os::Directory& directory) {
  std::vector<format::SafeChecksums> none;
  auto file = directory.open_for_read(std::string(format::kSafeChecksumsName));
  if (!file) {
    if (file.error().sys_errno == ENOENT) return none;
    return file.error();
  }
  const auto bytes = file->size();
  if (!bytes) return bytes.error();
  if (*bytes > kMaxChecksumsBytes) return none;
  std::vector<std::byte> contents(*bytes);
  TC_TRY(file->read_at(contents, 0));
  auto decoded = format::decode_safe_checksums(contents);
  return decoded ? std::move(*decoded) : none;
}

Error exists(const os::Directory& parent, const std::string& name, std::string detail) {
  Error error = system_error(EEXIST, "save", parent.path_of(name));
  error.detail = std::move(detail);
  return error;
}

/// Checks that a directory may be replaced: 6 of the protocol. extras: names of other files that
/// this save writes.
Result<> require_replaceable(const os::Directory& parent, const std::string& name,
                             const std::set<std::string>& extras) {
  auto old = parent.open_directory(name);
  if (!old) {
    if (old.error().sys_errno != ENOTDIR && old.error().sys_errno != ELOOP) return old.error();
    return exists(parent, name, "it is not a directory and was not replaced; choose another path");
  }
  const auto here = parent.identity();
  const auto there = old->identity();
  if (!here || !there) return here ? there.error() : here.error();
  if (here->device != there->device) {
    return exists(
        parent, name,
        "it is a mount point, which a save cannot replace; save to a directory inside it");
  }
  auto found = old->names();
  if (!found) return found.error();
  const auto checksums = read_checksums(*old);
  if (!checksums) return checksums.error();
  std::set<std::string> own;
  for (const format::SafeChecksums& of_file : *checksums) own.insert(of_file.name);
  for (const std::string& file : *found) {
    const bool is_known = is_model_file(file) || own.contains(file) || extras.contains(file);
    const auto inside = old->open_directory(file);
    const int failed = inside ? 0 : inside.error().sys_errno;
    const bool is_directory = failed != ENOTDIR && failed != ELOOP && failed != ENOENT;
    if (is_directory && failed != 0) return inside.error();
    if (is_known && !is_directory) continue;
    return exists(parent, name,
                  "the directory contains a file that this save would not write (" + file +
                      ") and was not replaced; choose another directory, or remove the file");
  }
  return {};
}

/// Returns true for an empty directory that no save or load uses. Does not follow a link.
Result<bool> is_unused_and_empty(const os::Directory& parent, const std::string& name) {
  auto opened = parent.open_directory(name);
  if (!opened) {
    const int failed = opened.error().sys_errno;
    const bool is_none = failed == ENOENT || failed == ENOTDIR || failed == ELOOP;
    return is_none ? Result<bool>(false) : opened.error();
  }
  const auto names = opened->names();
  if (!names) return names.error();
  // On a network file system, the lock is a file, so a locked directory is not empty.
  if (!names->empty() || !opened->is_local()) return names->empty();
  return opened->try_lock_exclusive();
}

/// Gives the new directory the permissions of the one that it replaces.
Result<> copy_mode(const os::Directory& parent, const std::string& name,
                   const os::Directory& made) {
  auto old = parent.open_directory(name);
  return old ? made.copy_mode(*old) : old.error();
}

/// Reads both files completely.
Result<bool> have_equal_bytes(const os::File& one, const os::File& other) {
  std::vector<std::byte> of_one(kCompareBytes);
  std::vector<std::byte> of_other(kCompareBytes);
  for (std::uint64_t offset = 0;; offset += kCompareBytes) {
    const auto read = one.read_some_at(of_one, offset);
    if (!read) return read.error();
    const auto read_other = other.read_some_at(of_other, offset);
    if (!read_other) return read_other.error();
    const bool are_equal =
        *read == *read_other && std::memcmp(of_one.data(), of_other.data(), *read) == 0;
    if (!are_equal || *read < kCompareBytes) return are_equal;
  }
}

/// Removes a directory under its exclusive lock. Returns false if it is in use.
Result<bool> remove_unused(const os::Directory& parent, const std::string& name) {
  auto opened = parent.open_directory(name);
  if (!opened) return opened.error();
  auto locked = opened->try_lock_exclusive();
  if (!locked || !*locked) return locked;
  // A save may have published the directory before it was locked.
  auto is_unused = parent.leads_to(name, *opened);
  if (!is_unused || !*is_unused) return is_unused;
  auto removed = opened->remove_lock_file();
  if (removed) removed = parent.remove_tree(name);
  return removed ? locked : removed.error();
}

}  // namespace

Result<ModelSave> ModelSave::begin(const os::Directory& parent, std::string name, bool may_replace,
                                   std::set<std::string> extras, Warnings& warnings) {
  auto own_parent = parent.reopen();
  if (!own_parent) return own_parent.error();
  auto names = parent.names();
  if (!names) return names.error();
  for (const std::string& found : *names) {
    if (!is_temporary_name(found, name)) continue;
    if (auto removed = remove_unused(parent, found);
        !removed && removed.error().sys_errno != ENOENT)
      warnings.push_back("a leftover of an interrupted save was not removed: " +
                         removed.error().message());
  }
  const bool is_present = std::ranges::find(*names, name) != names->end();
  Result<bool> is_empty = is_present && !may_replace ? is_unused_and_empty(parent, name) : false;
  if (!is_empty) return is_empty.error();
  if (is_present) {
    if (!may_replace && !*is_empty) {
      return exists(parent, name,
                    "it exists already, and is in use or not empty; pass overwrite=True to replace "
                    "it");
    }
    TC_TRY(require_replaceable(parent, name, extras));
  }
  std::string temporary = temporary_name(name);
  TC_TRY(parent.make_directory(temporary));
  auto opened = parent.open_directory(temporary);
  // The exclusive lock creates the file of the lock on a network file system.
  const Result<bool> locked = opened ? opened->try_lock_exclusive() : opened.error();
  const Result<bool> shared = locked ? opened->try_share() : locked.error();
  Result<> done = shared ? Result<>() : shared.error();
  if (shared && !*shared) {
    // Another save has found the new directory before it was locked, and removes it as a leftover.
    done = system_error(EAGAIN, "flock", parent.path_of(temporary));
  }
  if (done && is_present) done = copy_mode(parent, name, *opened);
  if (!done) {
    if (opened) opened->close();
    static_cast<void>(parent.remove_tree(temporary));
    return done.error();
  }
  return ModelSave(std::move(*own_parent), std::move(*opened), std::move(name),
                   std::move(temporary), may_replace, *is_empty, std::move(extras));
}

ModelSave::ModelSave(os::Directory parent, os::Directory directory, std::string name,
                     std::string temporary, bool may_replace, bool replaces_empty,
                     std::set<std::string> extras)
    : parent_(std::move(parent)),
      directory_(std::move(directory)),
      name_(std::move(name)),
      temporary_(std::move(temporary)),
      may_replace_(may_replace),
      replaces_empty_(replaces_empty),
      extras_(std::move(extras)) {}

Result<> ModelSave::write_file(const std::string& name, std::string_view contents,
                               bool sync) const {
  auto file = directory_.create(name, os::IoMode::buffered);
  if (!file) return file.error();
  auto done = file->write_at(std::as_bytes(std::span(contents)), 0);
  if (done && sync) done = file->sync();
  return done ? std::move(*file).close() : done;
}

Result<> ModelSave::complete(const planning::SafetensorsLayout& layout,
                             std::span<const Extra> extras, std::vector<std::string> checksums,
                             bool sync) {
  std::vector<Extra> others(extras.begin(), extras.end());
  if (!layout.index().empty()) {
    others.push_back({std::string(planning::SafetensorsLayout::kIndexName), layout.index()});
  }
  return complete(layout.files(), others, std::move(checksums), sync);
}

Result<> ModelSave::complete(std::span<const planning::SafetensorsLayout::File> files,
                             std::span<const Extra> extras, std::vector<std::string> checksums,
                             bool sync) {
  for (const auto& [name, header, bytes] : files) {
    auto file = directory_.open_or_create(name, os::IoMode::buffered);
    if (!file) return file.error();
    auto done = file->write_at(std::as_bytes(std::span(header)), 0);
    if (done && sync) done = file->sync();
    const auto found = file->size();
    if (done && !found) done = found.error();
    if (done && *found != bytes) {
      Error error = format_error(Errc::range_past_end,
                                 "the file has " + std::to_string(*found) + " bytes instead of " +
                                     std::to_string(bytes) +
                                     ": another process has changed it, or ranks do not see the "
                                     "same file system");
      error.operation = "save";
      error.path = file->path();
      return error;
    }
    if (done) done = std::move(*file).close();
    if (!done) return done;
  }
  for (const Extra& other : extras) {
    TC_TRY(write_file(other.name, other.contents, sync));
  }
  auto all = planning::checksums_of(files, std::move(checksums), extras);
  const std::string contents = format::encode_safe_checksums(all);
  TC_TRY(write_file(std::string(format::kSafeChecksumsName), contents, sync));
  checksums_ = std::move(all);
  return sync ? directory_.sync() : Result<>();
}

Result<> ModelSave::link_if_equal(const os::Directory& base, const std::string& name,
                                  bool sync) const {
  auto old = base.open_for_read(name);
  auto made = directory_.open_for_read(name);
  if (!old || !made) return old ? made.error() : old.error();
  auto are_equal = have_equal_bytes(*old, *made);
  if (!are_equal || !*are_equal) return are_equal ? Result<>() : are_equal.error();
  TC_TRY(sync ? old->sync() : Result<>());
  const auto identity = old->identity();
  if (!identity) return identity.error();
  const std::string link = name + ".link-" + random_hex(kTagDigits);
  TC_TRY(directory_.link_from(base, name, link));
  // Another process may have replaced the base's file since it was opened.
  const auto found = directory_.identity_of(link);
  Result<> done = found ? Result<>() : found.error();
  const bool is_same = found && *found == *identity;
  if (done && is_same) done = directory_.rename(link, name);
  if (!done || !is_same) static_cast<void>(directory_.remove(link));
  return done;
}

Result<> ModelSave::link_unchanged(const os::Directory& base, bool sync, Warnings& warnings) {
  const auto in_base = read_checksums(base);
  if (!in_base) return in_base.error();
  for (const format::SafeChecksums& file : checksums_) {
    if (std::ranges::find(*in_base, file) == in_base->end()) continue;
    if (auto linked = link_if_equal(base, file.name, sync); !linked) {
      warnings.push_back("a file was stored again instead of sharing it with " +
                         base.path_of(file.name) + ": " + linked.error().message());
    }
  }
  return sync ? directory_.sync() : Result<>();
}

PublishOutcome ModelSave::try_publish(bool sync, std::string& former) {
  const PublishMode mode{.sync = sync, .replace = may_replace_};
  auto identity = directory_.identity();
  if (!identity) return {PublishState::not_published, identity.error()};
  Publication publication{temporary_, name_, {}, *identity};
  publication.is_private = true;
  if (replaces_empty_) {
    // Fails unless the directory is still empty.
    auto removed = parent_.remove_directory(name_);
    const auto is_empty = removed ? false : is_unused_and_empty(parent_, name_);
    if (!is_empty || *is_empty) return {PublishState::not_published, removed.error()};
  }
  auto is_present = parent_.contains(name_);
  if (!is_present) return {PublishState::not_published, is_present.error()};
  if (!*is_present || !may_replace_) {
    PublishOutcome outcome =
        directory::publish(parent_, publication, {.sync = sync, .replace = false});
    if (outcome.error.sys_errno == EEXIST) {
      outcome.error.detail = "another process has created it meanwhile; it was not replaced";
    }
    return outcome;
  }
  if (auto replaceable = require_replaceable(parent_, name_, extras_); !replaceable) {
    return {PublishState::not_published, replaceable.error()};
  }
  publication.exchanges = true;
  PublishOutcome outcome = directory::publish(parent_, publication, mode);
  const int failed = outcome.error.sys_errno;
  const bool is_unsupported = outcome.state == PublishState::not_published &&
                              (failed == EINVAL || failed == ENOSYS || failed == EOPNOTSUPP);
  if (!is_unsupported) {
    former = temporary_;
    return outcome;
  }
  publication.exchanges = false;
  // Not a temporary name: after a crash between the renames, no save may remove the old directory.
  former = publication.aside = former_name(name_);
  return directory::publish(parent_, publication, mode);
}

Result<> ModelSave::remove_former(const std::string& former) const {
  if (auto replaceable = require_replaceable(parent_, former, extras_); !replaceable) {
    if (replaceable.error().sys_errno != EEXIST) return replaceable;
    const std::string kept = former == temporary_ ? former_name(name_) : former;
    if (kept != former) {
      TC_TRY(parent_.rename(former, kept, false));
    }
    return exists(parent_, kept, "another process has added a file to it");
  }
  auto removed = remove_unused(parent_, former);
  return removed ? Result<>() : removed.error();
}

PublishOutcome ModelSave::publish(bool sync, Warnings& warnings) {
  std::string former;
  PublishOutcome outcome = try_publish(sync, former);
  if (outcome.state == PublishState::not_published) {
    discard(warnings);
    return outcome;
  }
  has_ended_ = true;
  if (outcome.state == PublishState::published && !former.empty()) {
    if (auto removed = remove_former(former); !removed) {
      warnings.push_back(
          parent_.path_of(name_) +
          " was replaced, but its former contents remain: " + removed.error().message());
    }
  }
  directory_.close();
  return outcome;
}

void ModelSave::discard(Warnings& warnings) {
  if (std::exchange(has_ended_, true)) return;
  directory_.close();
  if (auto removed = parent_.remove_tree(temporary_); !removed) {
    warnings.push_back("the files of a failed save were not removed: " + removed.error().message());
  }
}

}  // namespace torch_ckpt::directory
