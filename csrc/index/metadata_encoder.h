#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "index/checkpoint_index.h"

namespace torch_ckpt::index {

/// What metadata says beside its index.
struct MetadataExtras {
  /// Attributes of the StorageMeta, by name; it is left out where there are none.
  std::vector<std::pair<std::string, std::optional<std::string>>> storage_meta;
  std::string version;      // of DCP's format
  std::string phases = {};  // how long each rank took, as JSON; empty: not known
};

/// The pickle of torch's Metadata, which every torch from 2.6 on reads. Equal parts are one object:
/// most tensors of a model share a handful of shapes, and with them their shards.
std::string encode_metadata(const CheckpointIndex& index, const MetadataExtras& extras);

}  // namespace torch_ckpt::index
