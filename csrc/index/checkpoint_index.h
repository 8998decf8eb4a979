#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "index/entry_table.h"
#include "index/metadata_pickle.h"

namespace torch_ckpt::index {

/// The metadata of a checkpoint, decoded and checked:
///
/// - sizes and offsets are not negative; shards lie inside their tensor, and together have no more
///   elements than it; a tensor has less than 2^63 bytes;
/// - file names do not lead out of the checkpoint's directory; records end before byte 2^63 and do
///   not overlap.
class CheckpointIndex : public EntryTable {
 public:
  /// Limits the cost of decoding. The metadata of a million tensors has about 200 MB.
  static constexpr std::uint64_t kMaxFileBytes = std::uint64_t{4} << 30;
  /// Maximum per location. A limit is needed because many locations may share one long list.
  static constexpr std::size_t kMaxTransforms = 64;
  /// torch's limit.
  static constexpr std::size_t kMaxDimensions = 64;
  /// Real names are far shorter.
  static constexpr std::size_t kMaxNameBytes = std::size_t{64} << 10;

  /// A record for an entry or shard that the metadata does not describe.
  struct UndescribedRecord {
    TextRef name;
    std::uint32_t offsets = kNone;
    Shard shard;
  };

  /// Builds the index from a decoded metadata pickle.
  ///
  /// Fails with Errc::metadata_inconsistent and the entry's name if the metadata contradicts
  /// itself, and with Errc::outside_directory for data outside the checkpoint's directory.
  static Result<CheckpointIndex> build(const MetadataPickle& pickle);
  /// Decodes the contents of a metadata file: checks the seal, walks the pickle and builds the
  /// index. `source` is the origin of the bytes, for messages.
  static Result<CheckpointIndex> decode(std::span<const std::byte> file, const std::string& source);
  /// Decodes a pickle of torch's objects that this process has made, without a seal.
  static Result<CheckpointIndex> decode_objects(std::span<const std::byte> pickle,
                                                const std::string& source);

  /// Returns a copy with other names, which are in the order of the entries. Fails with
  /// Errc::invalid_argument unless there is exactly one name for each entry and all names differ.
  Result<CheckpointIndex> renamed(std::span<const std::string> names) const;

  std::span<const UndescribedRecord> undescribed_records() const { return undescribed_records_; }

 private:
  friend class IndexBuilder;
  friend class SafetensorsIndexBuilder;

  CheckpointIndex() = default;

  std::vector<UndescribedRecord> undescribed_records_;
};

/// Removes empty and "." components from a path.
std::string normalized_path(std::string_view file);

}  // namespace torch_ckpt::index
