#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "index/extents.h"
#include "index/metadata_pickle.h"
#include "index/name_table.h"

namespace torch_ckpt::index {

/// The entries of a checkpoint and the locations of their data, read from the metadata. Entries are
/// stored in arrays, in the metadata's order. Everything in the index has been checked:
///
/// - sizes and offsets are not negative; shards lie inside their tensor, and together have no more
///   elements than it; a tensor has less than 2^63 bytes;
/// - file names do not lead out of the checkpoint's directory; records end before byte 2^63 and do
///   not overlap.
class CheckpointIndex {
 public:
  /// Maximum per location. A limit is needed because many locations may share one long list.
  static constexpr std::size_t kMaxTransforms = 64;
  /// torch's limit.
  static constexpr std::size_t kMaxDimensions = 64;
  /// Real names are far shorter.
  static constexpr std::size_t kMaxNameBytes = std::size_t{64} << 10;
  static constexpr std::uint32_t kNone = 0xffffffff;

  /// A string in the index; see text().
  struct TextRef {
    std::uint64_t at = 0;
    std::uint32_t bytes = 0;
  };
  /// A tensor with any number of shards, or an object with exactly one.
  struct Entry {
    bool is_tensor = false;
    bool requires_grad = false;
    std::uint32_t dtype = kNone;  // index into dtypes()
    std::uint32_t size = kNone;   // id for extents()
    std::uint32_t first_shard = 0;
    std::uint32_t shard_count = 0;
  };
  /// A part of an entry, and the location of its record. The shard of an object has no extents.
  struct Shard {
    std::uint32_t offsets = kNone;  // id for extents()
    std::uint32_t sizes = kNone;    // id for extents()
    std::uint32_t file = kNone;     // index into files(); kNone: the metadata gives no location
    bool is_transformed = false;
    std::uint64_t offset = 0;  // in bytes
    std::uint64_t length = 0;
  };
  /// A record for an entry or shard that the metadata does not describe.
  struct Stray {
    TextRef name;
    std::uint32_t offsets = kNone;
    Shard shard;
  };
  /// A key or list index in the path to a value in the nested state dict. A value's name is the
  /// parts of its path, joined by dots.
  struct PathPart {
    std::uint32_t bytes = 0;
    bool is_number = false;

    bool operator==(const PathPart&) const = default;
  };
  /// Identifies a shard by its entry's number and its own number within the entry.
  struct ShardId {
    std::uint32_t entry = 0;
    std::uint32_t number = 0;
  };

  /// Builds the index from a decoded metadata pickle, but leaves its paths and located_shards()
  /// empty.
  ///
  /// Fails with Errc::metadata_inconsistent and the entry's name if the metadata contradicts
  /// itself, and with Errc::outside_directory for data outside the checkpoint's directory.
  static Result<CheckpointIndex> build(const PickleValues& values);

  std::span<const Entry> entries() const { return entries_; }
  std::span<const Shard> shards(const Entry& entry) const {
    return std::span(shards_).subspan(entry.first_shard, entry.shard_count);
  }
  std::span<const Stray> strays() const { return strays_; }
  /// Renames all entries; `names` are in the order of the entries. Fails with
  /// Errc::invalid_argument and changes nothing unless there is exactly one name for each entry and
  /// all names differ.
  Result<> rename(std::span<const std::string> names);
  /// Returns the number of the entry with this name.
  std::optional<std::uint32_t> find(std::string_view name) const { return names_.find(name); }
  std::string_view name(std::size_t entry) const { return names_.at(entry); }

  std::string_view text(TextRef text) const {
    return std::string_view(texts_).substr(text.at, text.bytes);
  }
  std::span<const TextRef> files() const { return files_; }
  /// Names of the dtypes in the module torch.
  const std::vector<std::string>& dtypes() const { return dtypes_; }
  std::span<const std::int64_t> extents(std::uint32_t id) const { return extents_.at(id); }
  /// The encoded checksum table of each file; empty for a file without one.
  std::span<const TextRef> tables() const { return tables_; }
  /// Duration of each phase of the save on each rank, as unchecked JSON; empty if unknown.
  std::string_view phases() const { return text(phases_); }

  // --- building an index for a save ---

  void add_tensor(std::string_view name, std::string_view dtype, bool requires_grad,
                  std::span<const std::int64_t> size);
  void add_object(std::string_view name);
  /// Adds a shard to the last entry, and returns its number within the entry. Ignores the extents
  /// if the entry is an object.
  std::uint32_t add_shard(std::span<const std::int64_t> offsets,
                          std::span<const std::int64_t> sizes);
  /// Replaces all files. `files` holds names and encoded checksum tables.
  void set_files(std::span<const std::pair<std::string_view, std::string_view>> files);
  /// Sets the location of a shard. Returns true if it has changed.
  bool set_location(ShardId shard, std::uint32_t file, std::uint64_t offset, std::uint64_t length);
  /// Copies an entry from another index, if it exists there. Drops locations in files that this
  /// index does not have.
  void copy_entry(const CheckpointIndex& other, std::string_view name);
  void add_path(std::string_view name, std::span<const PathPart> parts);

  /// Shards with a location, in the order in which their locations were first set.
  std::span<const ShardId> located_shards() const { return located_shards_; }
  std::size_t paths() const { return path_names_.size(); }
  std::string_view path_name(std::size_t path) const { return path_names_.at(path); }
  std::span<const PathPart> path(std::size_t path) const {
    return std::span(path_parts_)
        .subspan(path_begins_[path], path_begins_[path + 1] - path_begins_[path]);
  }

 private:
  friend class IndexBuilder;

  TextRef add_text(std::string_view text);
  std::uint32_t add_dtype(std::string_view dtype);

  NameTable names_;  // names of entries
  std::string texts_;
  std::vector<Entry> entries_;
  std::vector<Shard> shards_;
  std::vector<Stray> strays_;
  std::vector<TextRef> files_;
  std::vector<TextRef> tables_;
  TextRef phases_;
  std::vector<std::string> dtypes_;
  ExtentsTable extents_;
  NameTable file_names_;  // used only in an index built for a save
  NameTable path_names_;
  std::vector<PathPart> path_parts_;
  std::vector<std::size_t> path_begins_{0};
  std::vector<ShardId> located_shards_;
};

}  // namespace torch_ckpt::index
