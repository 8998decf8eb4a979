#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "index/pickle_values.h"

namespace torch_ckpt::index {

/// A field that should hold extents. If it does not, `problem` is the index of a message, in which
/// '%' stands for the name of the field.
struct ExtentsField {
  std::uint32_t id = 0;
  std::uint32_t problem = Object::kNothing;
};

struct ShardRecord {
  ExtentsField offsets, sizes;
  bool is_complete = true;  // has both fields
};
struct KeyRecord {
  Value name;
  ExtentsField offsets;
  bool has_offsets = false;
};
struct StorageInfoRecord {
  Value file, offset, length, transforms;
  bool is_complete = true;  // has file, offset and length
};
struct TensorRecord {
  Value properties, chunks;
  ExtentsField size;
  bool is_complete = true;
};
struct PropertiesRecord {
  Value dtype, requires_grad;
};

/// Returns the class of a global with the name "module name".
TorchClass torch_class(std::string_view name, GlobalRole role);

/// The fields of the instances of torch's classes, by class. Object::first is an instance's number
/// in the vector of its class.
struct TorchRecords {
  std::vector<std::string> problems;
  std::vector<ShardRecord> shards;
  std::vector<KeyRecord> keys;
  std::vector<StorageInfoRecord> storage_infos;
  std::vector<TensorRecord> tensors;
  std::vector<PropertiesRecord> properties;

  /// Reserves memory for tensors with one shard each.
  void reserve(std::size_t tensor_count);
  /// Adds the record of an instance with this state. Returns the record's number, or nullopt if the
  /// class has no records.
  std::optional<std::uint32_t> add(TorchClass type, const Value& state, const PickleValues& values);
};

}  // namespace torch_ckpt::index
