#include "index/allowed_globals.h"

#include <initializer_list>
#include <mutex>
#include <string_view>
#include <utility>

namespace torch_ckpt::index {
namespace {

using enum GlobalRole;

struct Module {
  std::string_view name;
  GlobalRole role;
  std::initializer_list<std::string_view> names;
};

std::shared_ptr<const Globals> known_globals() {
  constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata";
  constexpr std::string_view kPlanner = "torch.distributed.checkpoint.planner";
  constexpr std::string_view kSharded = "torch.distributed._shard.sharded_tensor.metadata";
  const Module modules[] = {
      {"builtins", member, {"getattr"}},
      {"pathlib", function, {"Path", "PosixPath", "PurePosixPath"}},
      {"pathlib._local", function, {"Path", "PosixPath", "PurePosixPath"}},
      {"collections", mapping, {"OrderedDict"}},
      {"torch", function, {"Size"}},
      {"torch.serialization", function, {"_get_layout"}},
      {kMetadata,
       dict_class,
       {"BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "StorageMeta",
        "TensorStorageMetadata"}},
      {kMetadata, key_class, {"MetadataIndex"}},
      {kMetadata, tuple_class, {"TensorProperties"}},
      {kMetadata, enumeration, {"_MEM_FORMAT_ENCODING"}},
      {"torch.distributed.checkpoint.filesystem", dict_class, {"_StorageInfo", "_StoragePrefix"}},
      // Plans, which Megatron stores in the metadata (`all_local_plans`).
      {kPlanner, dict_class, {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem"}},
      {kPlanner, enumeration, {"WriteItemType"}},
      // ShardedTensors in checkpoints of older torch versions.
      {"torch.distributed._shard.metadata", slots_class, {"ShardMetadata"}},
      {kSharded, dict_class, {"ShardedTensorMetadata"}},
      {kSharded, tuple_class, {"TensorProperties"}},
      {kSharded, enumeration, {"MEM_FORMAT_ENCODING"}},
      {"torch",
       value,
       {"bfloat16",
        "float16",
        "float32",
        "float64",
        "half",
        "float",
        "double",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
        "complex32",
        "complex64",
        "complex128",
        "bcomplex32",
        "chalf",
        "cfloat",
        "cdouble",
        "bool",
        "short",
        "int",
        "long",
        "int1",
        "int2",
        "int3",
        "int4",
        "int5",
        "int6",
        "int7",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint1",
        "uint2",
        "uint3",
        "uint4",
        "uint5",
        "uint6",
        "uint7",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "qint8",
        "qint32",
        "quint8",
        "quint4x2",
        "quint2x4",
        "bit",
        "bits8",
        "bits16",
        "bits1x8",
        "bits2x4",
        "bits4x2"}},
  };
  auto globals = std::make_shared<Globals>();
  for (const Module& module : modules) {
    for (const std::string_view name : module.names) {
      globals->emplace(std::string(module.name) + " " + std::string(name), module.role);
    }
  }
  return globals;
}

// Initialized when the library is loaded, so that a forked child never waits for the
// initialization.
std::mutex mutex;
std::shared_ptr<const Globals> current = known_globals();

}  // namespace

std::string_view name(GlobalRole role) {
  constexpr std::string_view kNames[] = {"value",     "function",    "enumeration",
                                         "member",    "mapping",     "dict_class",
                                         "key_class", "tuple_class", "slots_class"};
  return kNames[static_cast<std::size_t>(role)];
}

std::shared_ptr<const Globals> allowed_globals() {
  const std::lock_guard lock(mutex);
  return current;
}

void allow_dtypes(std::span<const std::string> names) {
  const std::lock_guard lock(mutex);
  auto globals = std::make_shared<Globals>(*current);
  for (const std::string& name : names) globals->emplace("torch " + name, value);
  current = std::move(globals);
}

}  // namespace torch_ckpt::index
