#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "index/extents.h"
#include "index/name_table.h"

namespace torch_ckpt::index {

/// The entries of a checkpoint and the locations of their data, in arrays, in the metadata's order.
/// Saves fill a MetadataDraft, and loads decode a CheckpointIndex; both are EntryTables.
class EntryTable {
 public:
  static constexpr std::uint32_t kNone = 0xffffffff;

  /// A string in the table; see text().
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

  std::span<const Entry> entries() const { return entries_; }
  std::span<const Shard> shards(const Entry& entry) const {
    return std::span(shards_).subspan(entry.first_shard, entry.shard_count);
  }
  /// Returns the total length of all shards in their files.
  std::uint64_t stored_bytes() const {
    std::uint64_t total = 0;
    for (const Shard& shard : shards_) total += shard.length;
    return total;
  }
  /// Returns true if stream transforms have changed any record. Only torch can read such records.
  bool has_transformed() const { return std::ranges::any_of(shards_, &Shard::is_transformed); }
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
  /// Returns true if each record consists of a tensor's row-major elements, without an archive.
  bool is_bare() const { return is_bare_; }

 protected:
  EntryTable() = default;

  TextRef add_text(std::string_view text) {
    const TextRef added{texts_.size(), static_cast<std::uint32_t>(text.size())};
    texts_ += text;
    return added;
  }

  NameTable names_;  // names of entries
  std::string texts_;
  std::vector<Entry> entries_;
  std::vector<Shard> shards_;
  std::vector<TextRef> files_;
  std::vector<TextRef> tables_;
  std::vector<std::string> dtypes_;
  ExtentsTable extents_;
  bool is_bare_ = false;
};

}  // namespace torch_ckpt::index
