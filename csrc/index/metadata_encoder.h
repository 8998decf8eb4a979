#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "format/pickle_writer.h"
#include "index/checkpoint_index.h"

namespace torch_ckpt::index {

/// What metadata says beside its index.
struct MetadataExtras {
  /// Attributes of the StorageMeta, by name; it is left out where there are none.
  std::vector<std::pair<std::string, std::optional<std::string>>> storage_meta;
  std::string version;      // of DCP's format
  std::string phases = {};  // how long each rank took, as JSON; empty: not known
};

// The pickle of torch's Metadata, which every torch from 2.6 on reads. Equal parts are one object:
// most tensors of a model share a handful of shapes, and with them their shards.
//
// It has three parts, and what has been encoded of the first two is kept: the entries and paths;
// the places of shards, without the names of files; what is another one in each save.
class MetadataEncoder {
 public:
  /// Of an index that stays, and whose entries and paths do not change once they are described.
  explicit MetadataEncoder(const CheckpointIndex& index) : index_(index) {}

  /// Encodes the entries and paths.
  void describe();
  /// Places have changed; files may have other names and tables without that.
  void forget_places() { are_placed_ = false; }
  /// All of the pickle and its seal (index/metadata_seal.h), in pieces that hold until the next
  /// call.
  const std::vector<std::string_view>& encode(const MetadataExtras& extras);

 private:
  using Entry = CheckpointIndex::Entry;
  using Shard = CheckpointIndex::Shard;

  /// What has been written, by its number in the pickle; that of entries and files is one more.
  struct Memo {
    std::map<std::string_view, std::uint32_t> keys;
    std::map<std::pair<std::string_view, std::string_view>, std::uint32_t> globals;
    std::vector<std::uint32_t> files;
    std::uint32_t size = 0;
  };
  /// Where the name of a file belongs in the places.
  struct Gap {
    std::size_t at = 0;  // in bytes
    std::uint32_t file = 0;
  };

  /// As it was behind the part before.
  void begin_part(const Memo& memo);
  std::string end_part(Memo& memo);
  std::string encode_places();
  std::string encode_rest(const MetadataExtras& extras);

  void key(std::string_view text);
  void global(std::string_view module, std::string_view name);
  void begin_object(std::string_view module, std::string_view name);
  void end_object();
  void begin_tuple(std::size_t size);
  void end_tuple(std::size_t size);
  void name(std::uint32_t entry);
  void extents(std::uint32_t id);
  void shard(const Shard& shard);
  void properties(const Entry& entry);
  template <class Put>
  void items(std::size_t count, Put put);
  template <class Put>
  void in_batches(std::size_t count, unsigned char code, Put put);
  void put_entries();
  void put_paths();
  void name_or_text(std::string_view text);
  void word_of_path(std::string_view word);
  void put_storage_meta(const MetadataExtras& extras);
  void put_tables(const MetadataExtras& extras);

  const CheckpointIndex& index_;
  format::PickleWriter pickle_;
  Memo memo_;
  std::vector<std::uint32_t> names_;
  std::unordered_map<std::uint32_t, std::uint32_t> extents_;
  std::unordered_map<std::uint64_t, std::uint32_t> shards_;
  std::map<std::pair<std::uint32_t, bool>, std::uint32_t> properties_;
  std::unordered_map<std::string_view, std::uint32_t> words_;

  bool is_described_ = false;
  std::string described_;
  Memo after_description_;
  bool are_placed_ = false;
  std::string placed_;
  std::vector<Gap> gaps_;
  Memo after_places_;
  // Of the last pickle.
  std::vector<std::string> file_names_;
  std::string rest_;
  std::string seal_;
  std::vector<std::string_view> pieces_;
};

}  // namespace torch_ckpt::index
