#include "index/torch_records.h"

#include <algorithm>
#include <span>
#include <utility>

namespace torch_ckpt::index {
namespace {

constexpr std::uint32_t kNothing = Object::kNothing;

/// Reads the fields of torch's classes from the states of instances.
class Extraction {
 public:
  Extraction(const PickleValues& values, TorchRecords& records)
      : values_(values), records_(records) {}

  ShardRecord shard_of(const Object& dict) {
    ShardRecord record;
    int has = 0;
    values_.for_each_pair(dict, [&](const Value& key, const Value& value) {
      const std::string_view name = values_.text(key);
      if (name == "offsets") {
        record.offsets = extents_of(value);
        has |= 1;
      } else if (name == "sizes") {
        record.sizes = extents_of(value);
        has |= 2;
      }
    });
    record.is_complete = has == 3;
    return record;
  }

  KeyRecord key_of(const Object& dict) {
    KeyRecord record;
    values_.for_each_pair(dict, [&](const Value& key, const Value& value) {
      const std::string_view name = values_.text(key);
      if (name == "fqn") record.name = value;
      if (name == "offset" && value.kind != ValueKind::none) {
        record.offsets = extents_of(value);
        record.has_offsets = true;
      }
    });
    return record;
  }

  StorageInfoRecord storage_info_of(const Object& dict) {
    StorageInfoRecord record;
    int has = 0;
    values_.for_each_pair(dict, [&](const Value& key, const Value& value) {
      const std::string_view name = values_.text(key);
      if (name == "relative_path") {
        record.file = value;
        has |= 1;
      } else if (name == "offset") {
        record.offset = value;
        has |= 2;
      } else if (name == "length") {
        record.length = value;
        has |= 4;
      } else if (name == "transform_descriptors") {
        record.transforms = value;
      }
    });
    record.is_complete = has == 7;
    return record;
  }

  TensorRecord tensor_of(const Object& dict) {
    TensorRecord record;
    int has = 0;
    values_.for_each_pair(dict, [&](const Value& key, const Value& value) {
      const std::string_view name = values_.text(key);
      if (name == "properties") {
        record.properties = value;
        has |= 1;
      } else if (name == "size") {
        record.size = extents_of(value);
        has |= 2;
      } else if (name == "chunks") {
        record.chunks = value;
        has |= 4;
      }
    });
    record.is_complete = has == 7;
    return record;
  }

  PropertiesRecord properties_of(const Value& state) {
    PropertiesRecord record;
    if (state.kind != ValueKind::tuple) return record;
    const std::span<const Value> fields = values_.tuple(state);
    record.dtype = fields[0];
    if (fields.size() > 2) record.requires_grad = fields[2];
    return record;
  }

 private:
  ExtentsField extents_of(const Value& value) {
    if (value.kind == ValueKind::extents) return {value.number(), kNothing};
    std::string problem = "% that is " + values_.kind(value);
    if (value.kind == ValueKind::tuple) {
      const std::span<const Value> parts = values_.tuple(value);
      const auto bad = std::ranges::find_if_not(parts, &Value::is_integer);
      problem = (bad->kind == ValueKind::large_integer ? "% of " : "% that contains ") +
                values_.number(*bad);
    }
    records_.problems.push_back(std::move(problem));
    return {0, static_cast<std::uint32_t>(records_.problems.size() - 1)};
  }

  const PickleValues& values_;
  TorchRecords& records_;
};

template <class Record>
std::uint32_t added(std::vector<Record>& records, Record record) {
  records.push_back(std::move(record));
  return static_cast<std::uint32_t>(records.size() - 1);
}

}  // namespace

TorchClass torch_class(std::string_view name, GlobalRole role) {
  struct Known {
    std::string_view name;
    TorchClass type;
  };
  static constexpr Known kKnown[] = {
      {"torch.distributed.checkpoint.metadata Metadata", TorchClass::metadata},
      {"torch.distributed.checkpoint.metadata TensorStorageMetadata", TorchClass::tensor},
      {"torch.distributed.checkpoint.metadata BytesStorageMetadata", TorchClass::object},
      {"torch.distributed.checkpoint.metadata ChunkStorageMetadata", TorchClass::shard},
      {"torch.distributed.checkpoint.metadata TensorProperties", TorchClass::properties},
      {"torch.distributed.checkpoint.metadata MetadataIndex", TorchClass::key},
      {"torch.distributed.checkpoint.metadata StorageMeta", TorchClass::storage_meta},
      {"torch.distributed.checkpoint.filesystem _StorageInfo", TorchClass::storage_info},
      {"torch.distributed._shard.sharded_tensor.metadata TensorProperties", TorchClass::properties},
      {"torch Size", TorchClass::size},
  };
  for (const Known& known : kKnown) {
    if (known.name == name) return known.type;
  }
  return role == GlobalRole::value && name.starts_with("torch ") ? TorchClass::dtype
                                                                 : TorchClass::other;
}

void TorchRecords::reserve(std::size_t tensor_count) {
  shards.reserve(tensor_count);
  keys.reserve(tensor_count);
  storage_infos.reserve(tensor_count);
  tensors.reserve(tensor_count);
}

std::optional<std::uint32_t> TorchRecords::add(TorchClass type, const Value& state,
                                               const PickleValues& values) {
  Extraction extraction(values, *this);
  if (type == TorchClass::properties) return added(properties, extraction.properties_of(state));
  const Object* dict = values.object(state, ObjectKind::dict);
  if (dict == nullptr) return std::nullopt;
  switch (type) {
    case TorchClass::shard:
      return added(shards, extraction.shard_of(*dict));
    case TorchClass::key:
      return added(keys, extraction.key_of(*dict));
    case TorchClass::storage_info:
      return added(storage_infos, extraction.storage_info_of(*dict));
    case TorchClass::tensor:
      return added(tensors, extraction.tensor_of(*dict));
    default:
      return std::nullopt;
  }
}

}  // namespace torch_ckpt::index
