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

/// What a checkpoint holds and where it lies, as its metadata says: entries in arrays, in the
/// metadata's order, and nothing else for each of them. What is in it has been checked, so that
/// who uses it need not:
///
/// - sizes and offsets are not negative, shards lie within their tensor and have together no more
///   elements than it has, and all of it has less than 2^63 bytes;
/// - files lie beneath the checkpoint's directory by their names, records end before byte 2^63,
///   and no two overlap.
class CheckpointIndex {
 public:
  /// More than anybody's; each place may name the same long list.
  static constexpr std::size_t kMostTransforms = 64;
  /// torch's own limit.
  static constexpr std::size_t kMostDimensions = 64;
  /// A name of torch's has far less.
  static constexpr std::size_t kMostNameBytes = std::size_t{64} << 10;
  static constexpr std::uint32_t kNone = 0xffffffff;

  struct Text {
    std::uint64_t at = 0;
    std::uint32_t bytes = 0;
  };
  /// A tensor, or an object: what is not a tensor. Tensors may be without shards, objects have one.
  struct Entry {
    bool is_tensor = false;
    bool requires_grad = false;
    std::uint32_t dtype = kNone;  // of dtypes()
    std::uint32_t size = kNone;   // of extents()
    std::uint32_t first_shard = 0;
    std::uint32_t shard_count = 0;
  };
  /// A part of an entry, and its record. Of objects without extents.
  struct Shard {
    std::uint32_t offsets = kNone;
    std::uint32_t sizes = kNone;
    std::uint32_t file = kNone;  // of files(); none where the metadata says no place
    bool is_transformed = false;
    std::uint64_t offset = 0;  // in bytes
    std::uint64_t length = 0;
  };
  /// A record of a name, or shard, that the metadata does not describe.
  struct Stray {
    Text name;
    std::uint32_t offsets = kNone;
    Shard shard;
  };
  /// A key or number on the way to a value in the nested state dict. The name is all of them,
  /// joined by dots.
  struct PathPart {
    std::uint32_t bytes = 0;
    bool is_number = false;

    bool operator==(const PathPart&) const = default;
  };
  /// A shard that has a place, by its entry and its number in it.
  struct Placed {
    std::uint32_t entry = 0;
    std::uint32_t number = 0;
  };

  /// Checks and takes over what a metadata program makes; all but paths and the order of places.
  ///
  /// Errc::metadata_inconsistent for what cannot be, by the name of the entry;
  /// Errc::outside_directory for data that lies outside of the checkpoint's directory.
  static Result<CheckpointIndex> of(const PickleValues& values);

  std::span<const Entry> entries() const { return entries_; }
  std::span<const Shard> shards(const Entry& entry) const {
    return std::span(shards_).subspan(entry.first_shard, entry.shard_count);
  }
  std::span<const Stray> strays() const { return strays_; }
  /// Gives the entries other names, in their order. Errc::invalid_argument, and the old names stay,
  /// unless there is one for each entry and no two are the same.
  Result<> rename(std::span<const std::string> names);
  /// The number of the entry of a name.
  std::optional<std::uint32_t> find(std::string_view name) const { return names_.find(name); }
  std::string_view name(std::size_t entry) const { return names_.at(entry); }

  std::string_view text(Text text) const {
    return std::string_view(texts_).substr(text.at, text.bytes);
  }
  std::span<const Text> files() const { return files_; }
  /// As torch calls them, without the module.
  const std::vector<std::string>& dtypes() const { return dtypes_; }
  std::span<const std::int64_t> extents(std::uint32_t id) const { return extents_.at(id); }
  /// The encoded checksum table of each file that has one; by the number of the file.
  std::span<const Text> tables() const { return tables_; }
  /// How long each rank took, as JSON that nobody has checked; empty where that is not known.
  std::string_view phases() const { return text(phases_); }

  // --- what is made here, and not read ---

  void add_tensor(std::string_view name, std::string_view dtype, bool requires_grad,
                  std::span<const std::int64_t> size);
  void add_object(std::string_view name);
  /// Of the last entry; of an object without extents. Its number there.
  std::uint32_t add_shard(std::span<const std::int64_t> offsets,
                          std::span<const std::int64_t> sizes);
  /// Names and checksum tables of the files, in the place of those that there were.
  void set_files(std::span<const std::pair<std::string_view, std::string_view>> files);
  /// By the number of the file. Whether it had no place, or another one.
  bool place(Placed shard, std::uint32_t file, std::uint64_t offset, std::uint64_t length);
  /// Adds the entry of a name that another index has, with its places in files that are known here;
  /// nothing if it has none.
  void add_from(const CheckpointIndex& other, std::string_view name);
  void add_path(std::string_view name, std::span<const PathPart> parts);

  /// In the order in which they were placed.
  std::span<const Placed> placed() const { return placed_; }
  std::size_t paths() const { return path_names_.size(); }
  std::string_view path_name(std::size_t path) const { return path_names_.at(path); }
  std::span<const PathPart> path(std::size_t path) const {
    return std::span(path_parts_)
        .subspan(path_begins_[path], path_begins_[path + 1] - path_begins_[path]);
  }

 private:
  friend class IndexBuilder;

  Text add_text(std::string_view text);
  std::uint32_t add_dtype(std::string_view dtype);

  NameTable names_;  // of entries
  std::string texts_;
  std::vector<Entry> entries_;
  std::vector<Shard> shards_;
  std::vector<Stray> strays_;
  std::vector<Text> files_;
  std::vector<Text> tables_;
  Text phases_;
  std::vector<std::string> dtypes_;
  ExtentsTable extents_;
  NameTable file_names_;  // of an index that is made here
  NameTable path_names_;
  std::vector<PathPart> path_parts_;
  std::vector<std::size_t> path_begins_{0};
  std::vector<Placed> placed_;
};

}  // namespace torch_ckpt::index
