#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "format/pickle_writer.h"
#include "index/encoded_metadata.h"
#include "index/metadata_draft.h"

namespace torch_ckpt::index {

/// Parts of the metadata that a MetadataDraft does not contain.
struct MetadataExtras {
  /// Names and values of the StorageMeta's attributes; empty: no StorageMeta.
  std::vector<std::pair<std::string, std::optional<std::string>>> storage_meta;
  std::string version;  // version of DCP's format
};

// Encodes the pickle of torch's Metadata in a form that torch 2.6 and later can read. Equal values
// are written once: most tensors of a model share a few shapes, and so also their shards.
//
// The pickle has three parts:
//
//   1. the entries and paths, encoded once;
//   2. the locations of shards, encoded again only after they have changed. File names are filled
//      in for each save;
//   3. the tail, which differs in each save.
class MetadataEncoder {
 public:
  /// `draft` must outlive the encoder. Its entries and paths must not change after describe().
  explicit MetadataEncoder(const MetadataDraft& draft) : draft_(draft) {}

  /// Encodes the entries and paths.
  void describe();
  /// Must be called after locations have changed. Changes to file names or checksum tables do not
  /// require it.
  void forget_locations() { locations_.reset(); }
  /// Returns the pickle, followed by its seal (index/metadata_seal.h).
  EncodedMetadata encode(const MetadataExtras& extras);

 private:
  using Entry = MetadataDraft::Entry;
  using Shard = MetadataDraft::Shard;
  using Part = std::shared_ptr<const std::string>;

  /// Memo indices of the values written so far.
  struct Memo {
    std::map<std::string_view, std::uint32_t> keys;
    std::map<std::pair<std::string_view, std::string_view>, std::uint32_t> globals;
    std::vector<std::uint32_t> files;  // memo index + 1; 0: not written
    std::uint32_t size = 0;
  };
  /// A position in the encoded locations where the name of a file is inserted.
  struct FileNameGap {
    std::size_t at = 0;  // in bytes
    std::uint32_t file = 0;
  };

  /// memo: the memo at the end of the previous part.
  void begin_part(const Memo& memo);
  Part end_part(Memo& memo);
  Part encode_locations();
  std::string encode_tail(const MetadataExtras& extras);

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
  void path_word(std::string_view word);
  void put_storage_meta(const MetadataExtras& extras);
  void put_tables();

  const MetadataDraft& draft_;
  format::PickleWriter pickle_;
  Memo memo_;
  // Memo indices of values that occur only in the first two parts.
  std::vector<std::uint32_t> names_;  // by entry number: memo index + 1; 0: not written
  std::unordered_map<std::uint32_t, std::uint32_t> extents_;
  std::unordered_map<std::uint64_t, std::uint32_t> shards_;
  std::map<std::pair<std::uint32_t, bool>, std::uint32_t> properties_;
  std::unordered_map<std::string_view, std::uint32_t> path_words_;

  Part description_;  // nullptr before describe()
  Memo after_description_;
  Part locations_;  // nullptr if they must be encoded
  std::vector<FileNameGap> gaps_;
  Memo after_locations_;
};

}  // namespace torch_ckpt::index
