#include "index/metadata_encoder.h"

#include <map>
#include <string_view>
#include <unordered_map>

#include "format/pickle_writer.h"

namespace torch_ckpt::index {
namespace {

namespace op = format::op;

// As Python's picklers do: one opcode puts so many values into a list or dict.
constexpr std::size_t kBatch = 1000;

constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kFileSystem = "torch.distributed.checkpoint.filesystem";

class Encoder {
 public:
  Encoder(const CheckpointIndex& index, const MetadataExtras& extras)
      : index_(index), extras_(extras), names_(index.entries().size()) {}

  std::string run() {
    begin_object(kMetadata, "Metadata");
    key("state_dict_metadata");
    put_entries();
    key("planner_data");
    put_paths();
    key("storage_data");
    put_places();
    key("storage_meta");
    put_storage_meta();
    key("version");
    pickle_.text(extras_.version);
    put_tables();
    end_object();
    return std::move(pickle_).take();
  }

 private:
  using Entry = CheckpointIndex::Entry;
  using Shard = CheckpointIndex::Shard;

  // --- what occurs again and again is written once ---

  void key(std::string_view text) {
    const auto [known, is_new] = keys_.try_emplace(text, 0);
    if (!is_new) return pickle_.fetch(known->second);
    pickle_.text(text);
    known->second = pickle_.memoize();
  }
  void global(std::string_view module, std::string_view name) {
    const auto [known, is_new] = globals_.try_emplace({module, name}, 0);
    if (!is_new) return pickle_.fetch(known->second);
    pickle_.global(module, name);
    known->second = pickle_.memoize();
  }
  void begin_object(std::string_view module, std::string_view name) {
    global(module, name);
    pickle_.put(op::kEmptyTuple);
    pickle_.put(op::kNewobj);
    pickle_.put(op::kEmptyDict);
    pickle_.put(op::kMark);
  }
  void end_object() {
    pickle_.put(op::kSetitems);
    pickle_.put(op::kBuild);
  }
  void begin_tuple(std::size_t size) {
    if (size > 3) pickle_.put(op::kMark);
  }
  void end_tuple(std::size_t size) {
    constexpr unsigned char kShort[] = {op::kEmptyTuple, op::kTuple1, op::kTuple2, op::kTuple3};
    pickle_.put(size > 3 ? op::kTuple : kShort[size]);
  }
  void name(std::uint32_t entry) {
    if (names_[entry] != 0) return pickle_.fetch(names_[entry] - 1);
    pickle_.text(index_.name(entry));
    names_[entry] = pickle_.memoize() + 1;
  }
  void file(std::uint32_t number) {
    if (files_.empty()) files_.resize(index_.files().size());
    if (files_[number] != 0) return pickle_.fetch(files_[number] - 1);
    pickle_.text(index_.text(index_.files()[number]));
    files_[number] = pickle_.memoize() + 1;
  }
  void extents(std::uint32_t id) {
    const auto [known, is_new] = extents_.try_emplace(id, 0);
    if (!is_new) return pickle_.fetch(known->second);
    global("torch", "Size");
    const auto numbers = index_.extents(id);
    begin_tuple(numbers.size());
    for (const std::int64_t number : numbers) {
      pickle_.number(static_cast<std::uint64_t>(number));
    }
    end_tuple(numbers.size());
    pickle_.put(op::kTuple1);
    pickle_.put(op::kReduce);
    known->second = pickle_.memoize();
  }
  void shard(const Shard& shard) {
    const std::uint64_t place = (std::uint64_t{shard.offsets} << 32) | shard.sizes;
    const auto [known, is_new] = shards_.try_emplace(place, 0);
    if (!is_new) return pickle_.fetch(known->second);
    begin_object(kMetadata, "ChunkStorageMetadata");
    key("offsets");
    extents(shard.offsets);
    key("sizes");
    extents(shard.sizes);
    end_object();
    known->second = pickle_.memoize();
  }
  /// The first five fields, which every torch knows; 2.15 has a sixth.
  void properties(const Entry& entry) {
    const auto [known, is_new] = properties_.try_emplace({entry.dtype, entry.requires_grad}, 0);
    if (!is_new) return pickle_.fetch(known->second);
    global(kMetadata, "TensorProperties");
    pickle_.put(op::kEmptyTuple);
    pickle_.put(op::kNewobj);
    pickle_.put(op::kMark);
    global("torch", index_.dtypes()[entry.dtype]);
    global("torch.serialization", "_get_layout");
    key("torch.strided");
    pickle_.put(op::kTuple1);
    pickle_.put(op::kReduce);
    pickle_.boolean(entry.requires_grad);
    global(kMetadata, "_MEM_FORMAT_ENCODING");
    pickle_.number(0);  // torch.contiguous_format
    pickle_.put(op::kTuple1);
    pickle_.put(op::kReduce);
    pickle_.boolean(false);  // not pinned
    pickle_.put(op::kTuple);
    pickle_.put(op::kBuild);
    known->second = pickle_.memoize();
  }

  // --- dicts and lists ---

  /// Calls put(i), which puts a key and a value on the stack, for each i below `count`.
  template <class Put>
  void items(std::size_t count, Put put) {
    pickle_.put(op::kEmptyDict);
    in_batches(count, op::kSetitems, put);
  }
  template <class Put>
  void in_batches(std::size_t count, unsigned char code, Put put) {
    for (std::size_t i = 0; i < count; ++i) {
      if (i % kBatch == 0) pickle_.put(op::kMark);
      put(i);
      if (i % kBatch == kBatch - 1 || i + 1 == count) pickle_.put(code);
    }
  }

  void put_entries() {
    items(index_.entries().size(), [&](std::size_t i) {
      const Entry& entry = index_.entries()[i];
      name(static_cast<std::uint32_t>(i));
      if (!entry.is_tensor) {
        global(kMetadata, "BytesStorageMetadata");
        pickle_.put(op::kEmptyTuple);
        pickle_.put(op::kNewobj);
        return;
      }
      begin_object(kMetadata, "TensorStorageMetadata");
      key("properties");
      properties(entry);
      key("size");
      extents(entry.size);
      key("chunks");
      pickle_.put(op::kEmptyList);
      const auto shards = index_.shards(entry);
      in_batches(shards.size(), op::kAppends, [&](std::size_t n) { shard(shards[n]); });
      end_object();
    });
  }

  void put_paths() {
    items(index_.paths(), [&](std::size_t i) {
      const std::string_view text = index_.path_name(i);
      name_or_text(text);
      const auto parts = index_.path(i);
      begin_tuple(parts.size());
      std::size_t at = 0;
      for (const CheckpointIndex::PathPart& part : parts) {
        const std::string_view word = text.substr(at, part.bytes);
        at += part.bytes + 1;
        if (part.is_number) {
          std::uint64_t number = 0;
          for (const char digit : word)
            number = 10 * number + static_cast<std::uint64_t>(digit - '0');
          pickle_.number(number);
        } else if (parts.size() == 1) {
          name_or_text(text);
        } else {
          word_of_path(word);
        }
      }
      end_tuple(parts.size());
    });
  }
  void name_or_text(std::string_view text) {
    if (const auto entry = index_.find(text)) return name(*entry);
    pickle_.text(text);
  }
  void word_of_path(std::string_view word) {
    const auto [known, is_new] = words_.try_emplace(word, 0);
    if (!is_new) return pickle_.fetch(known->second);
    pickle_.text(word);
    known->second = pickle_.memoize();
  }

  void put_places() {
    const auto order = index_.placed();
    items(order.size(), [&](std::size_t i) {
      const CheckpointIndex::Placed& placed = order[i];
      const Entry& entry = index_.entries()[placed.entry];
      const Shard& shard = index_.shards(entry)[placed.number];
      begin_object(kMetadata, "MetadataIndex");
      key("fqn");
      name(placed.entry);
      key("offset");
      if (entry.is_tensor) {
        extents(shard.offsets);
      } else {
        pickle_.put(op::kNone);
      }
      key("index");
      if (entry.is_tensor) {
        pickle_.number(placed.number);
      } else {
        pickle_.put(op::kNone);
      }
      end_object();
      begin_object(kFileSystem, "_StorageInfo");
      key("relative_path");
      file(shard.file);
      key("offset");
      pickle_.number(shard.offset);
      key("length");
      pickle_.number(shard.length);
      end_object();
    });
  }

  void put_storage_meta() {
    if (extras_.storage_meta.empty()) return pickle_.put(op::kNone);
    begin_object(kMetadata, "StorageMeta");
    for (const auto& [attribute, value] : extras_.storage_meta) {
      key(attribute);
      if (value) {
        pickle_.text(*value);
      } else {
        pickle_.put(op::kNone);
      }
    }
    key("modules");
    pickle_.put(op::kEmptyList);
    end_object();
  }

  void put_tables() {
    std::vector<std::uint32_t> having;
    for (std::uint32_t i = 0; i < index_.files().size(); ++i) {
      if (index_.tables()[i].bytes > 0) having.push_back(i);
    }
    if (having.empty() && extras_.phases.empty()) return;
    key("torch_ckpt");
    pickle_.put(op::kEmptyDict);
    pickle_.put(op::kMark);
    key("version");
    pickle_.number(1);
    key("checksums");
    items(having.size(), [&](std::size_t i) {
      file(having[i]);
      pickle_.bytes(index_.text(index_.tables()[having[i]]));
    });
    if (!extras_.phases.empty()) {
      key("phases");
      pickle_.text(extras_.phases);
    }
    pickle_.put(op::kSetitems);
  }

  const CheckpointIndex& index_;
  const MetadataExtras& extras_;
  format::PickleWriter pickle_;
  std::map<std::string_view, std::uint32_t> keys_;
  std::map<std::pair<std::string_view, std::string_view>, std::uint32_t> globals_;
  std::vector<std::uint32_t> names_;  // number + 1
  std::vector<std::uint32_t> files_;
  std::unordered_map<std::uint32_t, std::uint32_t> extents_;
  std::unordered_map<std::uint64_t, std::uint32_t> shards_;
  std::map<std::pair<std::uint32_t, bool>, std::uint32_t> properties_;
  std::unordered_map<std::string_view, std::uint32_t> words_;
};

}  // namespace

std::string encode_metadata(const CheckpointIndex& index, const MetadataExtras& extras) {
  return Encoder(index, extras).run();
}

}  // namespace torch_ckpt::index
