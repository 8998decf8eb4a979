#include "index/metadata_encoder.h"

#include <string_view>

#include "index/metadata_seal.h"

namespace torch_ckpt::index {
namespace {

namespace op = format::op;

// Maximum number of items per APPENDS or SETITEMS opcode, as in Python's picklers.
constexpr std::size_t kBatch = 1000;

constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kFileSystem = "torch.distributed.checkpoint.filesystem";

}  // namespace

void MetadataEncoder::describe() {
  if (description_) return;
  names_.resize(draft_.entries().size());
  begin_object(kMetadata, "Metadata");
  key("state_dict_metadata");
  put_entries();
  key("planner_data");
  put_paths();
  description_ = end_part(after_description_);
}

EncodedMetadata MetadataEncoder::encode(const MetadataExtras& extras) {
  describe();
  if (!locations_) locations_ = encode_locations();
  EncodedMetadata encoded;
  encoded.add(description_);
  const std::string_view locations = *locations_;
  std::size_t at = 0;
  for (const FileNameGap& gap : gaps_) {
    encoded.add(locations_, locations.substr(at, gap.at - at));
    format::PickleWriter file(0);
    file.text(draft_.text(draft_.files()[gap.file]));
    encoded.add(std::make_shared<const std::string>(file.take_part()));
    at = gap.at;
  }
  encoded.add(locations_, locations.substr(at));
  encoded.add(std::make_shared<const std::string>(encode_tail(extras)));
  encoded.add(std::make_shared<const std::string>(seal_of(encoded.pieces())));
  return encoded;
}

void MetadataEncoder::begin_part(const Memo& memo) {
  memo_ = memo;
  pickle_ = format::PickleWriter(memo.size);
}

MetadataEncoder::Part MetadataEncoder::end_part(Memo& memo) {
  memo = memo_;
  memo.size = pickle_.memoized();
  return std::make_shared<const std::string>(pickle_.take_part());
}

MetadataEncoder::Part MetadataEncoder::encode_locations() {
  begin_part(after_description_);
  memo_.files.resize(draft_.files().size());
  gaps_.clear();
  key("storage_data");
  const auto order = draft_.located_shards();
  items(order.size(), [&](std::size_t i) {
    const MetadataDraft::ShardId& id = order[i];
    const Entry& entry = draft_.entries()[id.entry];
    const Shard& shard = draft_.shards(entry)[id.number];
    begin_object(kMetadata, "MetadataIndex");
    key("fqn");
    name(id.entry);
    key("offset");
    if (entry.is_tensor) {
      extents(shard.offsets);
    } else {
      pickle_.put(op::kNone);
    }
    key("index");
    if (entry.is_tensor) {
      pickle_.number(id.number);
    } else {
      pickle_.put(op::kNone);
    }
    end_object();
    begin_object(kFileSystem, "_StorageInfo");
    key("relative_path");
    if (std::uint32_t& file = memo_.files[shard.file]; file != 0) {
      pickle_.fetch(file - 1);
    } else {
      gaps_.push_back({pickle_.size(), shard.file});
      file = pickle_.memoize() + 1;
    }
    key("offset");
    pickle_.number(shard.offset);
    key("length");
    pickle_.number(shard.length);
    end_object();
  });
  return end_part(after_locations_);
}

std::string MetadataEncoder::encode_tail(const MetadataExtras& extras) {
  begin_part(after_locations_);
  key("storage_meta");
  put_storage_meta(extras);
  key("version");
  pickle_.text(extras.version);
  put_tables();
  end_object();
  pickle_.put(op::kStop);
  return pickle_.take_part();
}

// --- values written once and then fetched from the memo ---

void MetadataEncoder::key(std::string_view text) {
  const auto [known, is_new] = memo_.keys.try_emplace(text, 0);
  if (!is_new) return pickle_.fetch(known->second);
  pickle_.text(text);
  known->second = pickle_.memoize();
}
void MetadataEncoder::global(std::string_view module, std::string_view name) {
  const auto [known, is_new] = memo_.globals.try_emplace({module, name}, 0);
  if (!is_new) return pickle_.fetch(known->second);
  pickle_.global(module, name);
  known->second = pickle_.memoize();
}
void MetadataEncoder::begin_object(std::string_view module, std::string_view name) {
  global(module, name);
  pickle_.put(op::kEmptyTuple);
  pickle_.put(op::kNewobj);
  pickle_.put(op::kEmptyDict);
  pickle_.put(op::kMark);
}
void MetadataEncoder::end_object() {
  pickle_.put(op::kSetitems);
  pickle_.put(op::kBuild);
}
void MetadataEncoder::begin_tuple(std::size_t size) {
  if (size > 3) pickle_.put(op::kMark);
}
void MetadataEncoder::end_tuple(std::size_t size) {
  constexpr unsigned char kShort[] = {op::kEmptyTuple, op::kTuple1, op::kTuple2, op::kTuple3};
  pickle_.put(size > 3 ? op::kTuple : kShort[size]);
}
void MetadataEncoder::name(std::uint32_t entry) {
  if (names_[entry] != 0) return pickle_.fetch(names_[entry] - 1);
  pickle_.text(draft_.name(entry));
  names_[entry] = pickle_.memoize() + 1;
}
void MetadataEncoder::extents(std::uint32_t id) {
  const auto [known, is_new] = extents_.try_emplace(id, 0);
  if (!is_new) return pickle_.fetch(known->second);
  global("torch", "Size");
  const auto numbers = draft_.extents(id);
  begin_tuple(numbers.size());
  for (const std::int64_t number : numbers) {
    pickle_.number(static_cast<std::uint64_t>(number));
  }
  end_tuple(numbers.size());
  pickle_.put(op::kTuple1);
  pickle_.put(op::kReduce);
  known->second = pickle_.memoize();
}
void MetadataEncoder::shard(const Shard& shard) {
  const std::uint64_t ids = (std::uint64_t{shard.offsets} << 32) | shard.sizes;
  const auto [known, is_new] = shards_.try_emplace(ids, 0);
  if (!is_new) return pickle_.fetch(known->second);
  begin_object(kMetadata, "ChunkStorageMetadata");
  key("offsets");
  extents(shard.offsets);
  key("sizes");
  extents(shard.sizes);
  end_object();
  known->second = pickle_.memoize();
}
/// Writes the five fields that all versions of torch have; torch 2.15 added a sixth.
void MetadataEncoder::properties(const Entry& entry) {
  const auto [known, is_new] = properties_.try_emplace({entry.dtype, entry.requires_grad}, 0);
  if (!is_new) return pickle_.fetch(known->second);
  global(kMetadata, "TensorProperties");
  pickle_.put(op::kEmptyTuple);
  pickle_.put(op::kNewobj);
  pickle_.put(op::kMark);
  global("torch", draft_.dtypes()[entry.dtype]);
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

/// Writes a dict of `count` items. put(i) pushes the key and value of item i.
template <class Put>
void MetadataEncoder::items(std::size_t count, Put put) {
  pickle_.put(op::kEmptyDict);
  in_batches(count, op::kSetitems, put);
}
template <class Put>
void MetadataEncoder::in_batches(std::size_t count, unsigned char code, Put put) {
  for (std::size_t i = 0; i < count; ++i) {
    if (i % kBatch == 0) pickle_.put(op::kMark);
    put(i);
    if (i % kBatch == kBatch - 1 || i + 1 == count) pickle_.put(code);
  }
}

void MetadataEncoder::put_entries() {
  items(draft_.entries().size(), [&](std::size_t i) {
    const Entry& entry = draft_.entries()[i];
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
    const auto shards = draft_.shards(entry);
    in_batches(shards.size(), op::kAppends, [&](std::size_t n) { shard(shards[n]); });
    end_object();
  });
}

void MetadataEncoder::put_paths() {
  items(draft_.entries().size(), [&](std::size_t i) {
    const auto entry = static_cast<std::uint32_t>(i);
    name(entry);
    const std::string_view text = draft_.name(i);
    const auto parts = draft_.path(i);
    begin_tuple(parts.size());
    std::size_t at = 0;
    for (const MetadataDraft::PathPart& part : parts) {
      const std::string_view word = text.substr(at, part.bytes);
      at += part.bytes + 1;
      if (part.is_number) {
        std::uint64_t number = 0;
        for (const char digit : word)
          number = 10 * number + static_cast<std::uint64_t>(digit - '0');
        pickle_.number(number);
      } else if (parts.size() == 1) {
        name(entry);
      } else {
        path_word(word);
      }
    }
    end_tuple(parts.size());
  });
}
void MetadataEncoder::path_word(std::string_view word) {
  const auto [known, is_new] = path_words_.try_emplace(word, 0);
  if (!is_new) return pickle_.fetch(known->second);
  pickle_.text(word);
  known->second = pickle_.memoize();
}

void MetadataEncoder::put_storage_meta(const MetadataExtras& extras) {
  if (extras.storage_meta.empty()) return pickle_.put(op::kNone);
  begin_object(kMetadata, "StorageMeta");
  for (const auto& [attribute, value] : extras.storage_meta) {
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

void MetadataEncoder::put_tables() {
  std::vector<std::uint32_t> files;
  std::size_t bytes = 0;
  for (std::uint32_t i = 0; i < draft_.files().size(); ++i) {
    if (draft_.tables()[i].bytes == 0) continue;
    files.push_back(i);
    // 20 bytes suffice for the opcodes.
    bytes += draft_.files()[i].bytes + draft_.tables()[i].bytes + 20;
  }
  if (files.empty()) return;
  pickle_.reserve(bytes);
  key("torch_ckpt");
  pickle_.put(op::kEmptyDict);
  pickle_.put(op::kMark);
  key("version");
  pickle_.number(1);
  key("checksums");
  items(files.size(), [&](std::size_t i) {
    if (const std::uint32_t file = memo_.files[files[i]]; file != 0) {
      pickle_.fetch(file - 1);
    } else {
      pickle_.text(draft_.text(draft_.files()[files[i]]));
    }
    pickle_.bytes(draft_.text(draft_.tables()[files[i]]));
  });
  pickle_.put(op::kSetitems);
}

}  // namespace torch_ckpt::index
