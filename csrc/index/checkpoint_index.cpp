#include "index/checkpoint_index.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "checked_math.h"
#include "file_name.h"
#include "format/dtype.h"
#include "index/metadata_seal.h"
#include "seeded_hash.h"
#include "utf8.h"

namespace torch_ckpt::index {
namespace {

// Byte and element counts must fit into a signed 64-bit integer.
constexpr std::uint64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

constexpr std::size_t kMaxPathBytes = 4096;  // Linux's limit

bool is_beneath(std::string_view file) {
  return file.size() <= kMaxPathBytes && !has_surrogates(file) && names_file_beneath(file);
}

/// Formats a file name like Python's repr(), truncated to 200 bytes.
std::string quoted(std::string_view file) {
  constexpr std::size_t kMaxShown = 200;
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text = "'";
  for (const char c : file.substr(0, kMaxShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\\') {
      text += "\\\\";
    } else if (byte < ' ' || byte == 0x7f) {
      text += "\\x";
      text += kDigits[byte >> 4];
      text += kDigits[byte & 15];
    } else {
      text += c;
    }
  }
  return text + (file.size() > kMaxShown ? "..." : "'");
}

Result<CheckpointIndex> named_source(Result<CheckpointIndex> built, const std::string& source) {
  if (built) return built;
  const Error& error = built.error();
  return format_error(error.code, error.message() + " (" + source + ")");
}

}  // namespace

class IndexBuilder {
 public:
  explicit IndexBuilder(const MetadataPickle& pickle)
      : values_(pickle.values), records_(pickle.records) {}

  Result<CheckpointIndex> run() {
    if (values_.type(values_.root) != TorchClass::metadata) {
      fail("expected a checkpoint's metadata, found " + values_.kind(values_.root));
    } else {
      metadata_ = &values_.objects[values_.root.number()];
      index_.extents_ = values_.extents;
      products_.resize(values_.extents.size(), kUnknown);
      add_entries() && add_locations() && check_paths() && check_storage_meta() && add_tables();
    }
    if (error_) return std::move(*error_);
    return std::move(index_);
  }

 private:
  using Entry = CheckpointIndex::Entry;
  using Shard = CheckpointIndex::Shard;
  using UndescribedRecord = CheckpointIndex::UndescribedRecord;
  using TextRef = CheckpointIndex::TextRef;

  static constexpr std::uint32_t kNone = CheckpointIndex::kNone;
  static constexpr std::uint64_t kUnknown = ~std::uint64_t{0};
  static constexpr std::uint64_t kNoOffset = ~std::uint64_t{0};

  // --- errors: the first error ends the run; these functions return false ---

  bool fail(std::string detail) {
    error_ = format_error(Errc::metadata_inconsistent, std::move(detail));
    return false;
  }
  bool fail(std::string_view name, const std::string& detail) {
    return fail(std::string(name) + ": " + detail);
  }
  bool fail_outside(std::string_view name, const std::string& file) {
    error_ = format_error(Errc::outside_directory,
                          std::string(name) + ": the metadata refers to " + file +
                              ", which is not a path inside the checkpoint's directory");
    return false;
  }

  // --- texts ---

  /// Describes a key for a message: by its text or number if it has one, otherwise by its type.
  std::string describe_key(const Value& key) const {
    if (key.kind == ValueKind::text) return std::string(values_.text(key));
    return key.kind == ValueKind::small_integer ? values_.number(key) : values_.kind(key);
  }

  /// Cached results for a long text. Any number of values may refer to the same text, so work
  /// proportional to its length is done only once.
  struct LongText {
    bool is_checked = false;    // check_name() has succeeded
    bool is_looked_up = false;  // `entry` is valid; set after all entries were added
    std::optional<std::uint32_t> entry;
  };
  static constexpr std::size_t kShortBytes = 256;

  LongText* long_text(const Value& value, std::string_view text) {
    return text.size() > kShortBytes ? &long_texts_[value.opcode_at()] : nullptr;
  }
  /// Copies the text to the index once for each opcode that pushes it.
  TextRef added_text(const Value& value) {
    const auto [known, is_new] = added_texts_.try_emplace(value.opcode_at());
    if (is_new) known->second = index_.add_text(values_.text(value));
    return known->second;
  }
  bool check_name(const Value& value, std::string_view name, const char* where) {
    LongText* known = long_text(value, name);
    if (known != nullptr && known->is_checked) return true;
    if (name.size() > CheckpointIndex::kMaxNameBytes) {
      return fail(std::string(where) + " has a name of " + std::to_string(name.size()) +
                  " bytes; the maximum is " + std::to_string(CheckpointIndex::kMaxNameBytes));
    }
    if (!is_text(name)) return fail(std::string(where) + " has a name that is not UTF-8");
    if (known != nullptr) known->is_checked = true;
    return true;
  }

  // --- entries ---

  bool add_entries() {
    const auto stored = values_.attribute(*metadata_, "state_dict_metadata");
    const Object* dict = stored ? values_.object(*stored, ObjectKind::dict) : nullptr;
    if (dict == nullptr) {
      return fail("state_dict_metadata is " + kind_or_none(stored) + ", not a dict");
    }
    const std::size_t count = values_.count(*dict) / 2;
    index_.names_.reserve(count);
    index_.entries_.reserve(count);
    index_.shards_.reserve(std::max(count, records_.storage_infos.size()));
    values_.for_each_pair(*dict, [&](const Value& key, const Value& value) {
      if (!error_) add_entry(key, value);
    });
    return !error_;
  }

  bool add_entry(const Value& key, const Value& value) {
    if (key.kind != ValueKind::text) {
      return fail("state_dict_metadata has a key that is " + values_.kind(key));
    }
    const std::string_view name = values_.text(key);
    if (!check_name(key, name, "state_dict_metadata")) return false;
    Entry entry;
    entry.first_shard = static_cast<std::uint32_t>(index_.shards_.size());
    switch (values_.type(value)) {
      case TorchClass::object:
        index_.shards_.emplace_back();
        break;
      case TorchClass::tensor:
        entry.is_tensor = true;
        if (!add_tensor(name, values_.objects[value.number()], entry)) return false;
        break;
      default:
        return fail(name, "the metadata entry should describe a tensor or an object, but is " +
                              values_.kind(value));
    }
    entry.shard_count = static_cast<std::uint32_t>(index_.shards_.size()) - entry.first_shard;
    if (!index_.names_.add(name).second) {
      return fail(name, "state_dict_metadata contains this name twice");
    }
    index_.entries_.push_back(entry);
    return true;
  }

  bool add_tensor(std::string_view name, const Object& instance, Entry& entry) {
    if (!instance.is_built || !records_.tensors[instance.first].is_complete) {
      return fail(name, "the tensor's description in the metadata is incomplete");
    }
    const TensorRecord& record = records_.tensors[instance.first];
    const Object* chunks = values_.object(record.chunks, ObjectKind::list);
    if (chunks == nullptr) {
      return fail(
          name, "expected a list of shards in the metadata, found " + values_.kind(record.chunks));
    }
    if (!add_properties(name, record.properties, entry)) return false;
    if (!check_extents(name, record.size, "a size")) return false;
    entry.size = record.size.id;
    if (!check_bytes(name, entry)) return false;
    const std::size_t count = values_.count(*chunks);
    if (count > 1) {
      // Refuse a shared list of shards, which torch never writes: a short pickle could otherwise
      // give the same long list to many tensors.
      if (is_list_seen_.empty()) is_list_seen_.resize(values_.objects.size());
      const std::uint32_t number = record.chunks.number();
      if (is_list_seen_[number]) {
        return fail(name,
                    "the tensor shares its list of shards in the metadata with another tensor");
      }
      is_list_seen_[number] = true;
    }
    std::uint64_t held = 0;
    values_.for_each(*chunks, [&](const Value& value) {
      if (!error_) add_shard(name, value, entry, held);
    });
    return !error_;
  }

  bool add_properties(std::string_view name, const Value& value, Entry& entry) {
    if (values_.type(value) != TorchClass::properties) {
      return fail(name, "expected tensor properties in the metadata, found " + values_.kind(value));
    }
    const Object& instance = values_.objects[value.number()];
    const PropertiesRecord none;
    const PropertiesRecord& record = instance.is_built ? records_.properties[instance.first] : none;
    if (record.dtype.kind != ValueKind::global ||
        values_.globals[record.dtype.number()].type != TorchClass::dtype) {
      return fail(name, "expected a dtype in the metadata, found " + values_.kind(record.dtype));
    }
    const auto [known, is_new] =
        dtypes_.try_emplace(record.dtype.number(), static_cast<std::uint32_t>(dtypes_.size()));
    if (is_new) {
      const std::string& full = values_.globals[record.dtype.number()].name;
      index_.dtypes_.push_back(full.substr(full.find(' ') + 1));
      const format::Dtype* dtype = format::find_dtype(index_.dtypes_.back());
      // A tensor of an unknown dtype cannot be loaded; 1 byte is enough for the overflow check.
      item_bytes_.push_back(dtype == nullptr ? 1 : dtype->item_bytes);
    }
    entry.dtype = known->second;
    entry.requires_grad =
        record.requires_grad.kind == ValueKind::boolean && record.requires_grad.is_true;
    return true;
  }

  /// Checks extents and stores their product in products_.
  bool check_extents(std::string_view name, const ExtentsField& field, const char* what) {
    if (field.problem != Object::kNothing) {
      std::string problem = records_.problems[field.problem];
      problem.replace(problem.find('%'), 1, what);
      return fail(name, "the metadata has " + problem);
    }
    std::uint64_t& product = products_[field.id];
    if (product != kUnknown) return true;
    const std::span<const std::int64_t> numbers = values_.extents.at(field.id);
    if (numbers.size() > CheckpointIndex::kMaxDimensions) {
      return fail(name, "the metadata has " + std::string(what) + " of " +
                            std::to_string(numbers.size()) + " dimensions; the maximum is " +
                            std::to_string(CheckpointIndex::kMaxDimensions));
    }
    bool is_empty = false;
    for (const std::int64_t number : numbers) {
      if (number < 0) {
        return fail(name, "the metadata has " + std::string(what) + " of " +
                              std::to_string(number) + "; it must not be negative");
      }
      is_empty = is_empty || number == 0;
    }
    product = is_empty ? 0 : 1;
    for (const std::int64_t number : numbers) {
      if (product > 0 && static_cast<std::uint64_t>(number) > kMaxBytes / product) {
        product = kMaxBytes + 1;
        break;
      }
      product *= static_cast<std::uint64_t>(number);
    }
    return true;
  }

  bool check_bytes(std::string_view name, const Entry& entry) {
    if (products_[entry.size] <= kMaxBytes / item_bytes_[entry.dtype]) return true;
    return fail(name, "according to the metadata, the tensor has 2**63 or more bytes");
  }

  bool add_shard(std::string_view name, const Value& value, const Entry& entry,
                 std::uint64_t& held) {
    if (values_.type(value) != TorchClass::shard) {
      return fail(name, "expected a shard in the metadata, found " + values_.kind(value));
    }
    const Object& instance = values_.objects[value.number()];
    if (!instance.is_built || !records_.shards[instance.first].is_complete) {
      return fail(name, "the metadata has a shard without offsets or sizes");
    }
    const ShardRecord& record = records_.shards[instance.first];
    if (!check_extents(name, record.offsets, "a shard offset") ||
        !check_extents(name, record.sizes, "a shard size")) {
      return false;
    }
    const auto offsets = values_.extents.at(record.offsets.id);
    const auto sizes = values_.extents.at(record.sizes.id);
    const auto whole = values_.extents.at(entry.size);
    if (!lies_inside(offsets, sizes, whole)) {
      return fail(name, "the metadata has a shard of " + listed(sizes) + " at " + listed(offsets) +
                            ", which lies outside the tensor of " + listed(whole));
    }
    held += products_[record.sizes.id];
    if (held > products_[entry.size]) {
      // A short pickle could otherwise repeat one shard many times.
      return fail(name, "the metadata has overlapping shards: together they have more than the " +
                            std::to_string(products_[entry.size]) + " elements of the tensor");
    }
    Shard& shard = index_.shards_.emplace_back();
    shard.offsets = record.offsets.id;
    shard.sizes = record.sizes.id;
    return true;
  }

  // --- locations ---

  struct Range {
    std::uint64_t offset = 0;
    std::uint64_t length = 0;
    std::uint32_t file = 0;
    Value name;
  };

  bool add_locations() {
    const auto stored = values_.attribute(*metadata_, "storage_data");
    if (!stored || stored->kind == ValueKind::none) return true;
    const Object* dict = values_.object(*stored, ObjectKind::dict);
    if (dict == nullptr) return fail("storage_data is " + values_.kind(*stored) + ", not a dict");
    next_shards_.resize(index_.entries_.size());
    is_key_seen_.resize(records_.keys.size());
    ranges_.reserve(values_.count(*dict) / 2);
    values_.for_each_pair(*dict, [&](const Value& key, const Value& value) {
      if (!error_) add_location(key, value);
    });
    if (error_) return false;
    share_locations();
    return check_overlaps();
  }

  bool add_location(const Value& key, const Value& value) {
    if (values_.type(key) != TorchClass::key) {
      return fail("storage_data has a key that is " + values_.kind(key));
    }
    const Object& instance = values_.objects[key.number()];
    const KeyRecord none;
    const KeyRecord& index = instance.is_built ? records_.keys[instance.first] : none;
    if (index.name.kind != ValueKind::text) {
      return fail("storage_data has a MetadataIndex whose fqn is " + values_.kind(index.name));
    }
    const std::string_view name = values_.text(index.name);
    if (!check_name(index.name, name, "storage_data")) return false;
    // A short pickle could otherwise repeat one key many times.
    if (is_key_seen_[instance.first]) return fail(name, "storage_data contains this key twice");
    is_key_seen_[instance.first] = true;
    if (values_.type(value) != TorchClass::storage_info) {
      return fail(name, "expected a location in the metadata, found " + values_.kind(value));
    }
    const Object& stored = values_.objects[value.number()];
    if (!stored.is_built || !records_.storage_infos[stored.first].is_complete) {
      return fail(name, "the location in the metadata is incomplete");
    }
    const StorageInfoRecord& info = records_.storage_infos[stored.first];
    Shard found;
    if (!find_file(name, info.file, found.file)) return false;
    const auto is_count = [](const Value& number) {
      return number.is_integer() && number.integer() >= 0;
    };
    const bool are_counts = is_count(info.offset) && is_count(info.length);
    const auto offset = static_cast<std::uint64_t>(info.offset.integer());
    const auto length = static_cast<std::uint64_t>(info.length.integer());
    if (!are_counts || length > kMaxBytes - offset) {
      return fail(name, "the metadata has an invalid location: file offset " +
                            values_.number(info.offset) + ", length " +
                            values_.number(info.length) +
                            (are_counts ? "; their sum is 2**63 or more" : ""));
    }
    found.offset = offset;
    found.length = length;
    if (!check_transforms(name, info.transforms, found.is_transformed)) return false;
    if (found.length > 0) ranges_.push_back({found.offset, found.length, found.file, index.name});
    assign_location(name, index, found);
    return true;
  }

  /// Sets `number` to the number of the file with this name. Adds the file if it is new.
  bool find_file(std::string_view name, const Value& value, std::uint32_t& number) {
    if (value.kind != ValueKind::text) return fail_outside(name, values_.kind(value));
    // Picklers write most file names once, so the offset of the opcode identifies the file.
    if (value.opcode_at() == last_file_at_) {
      number = last_file_;
      return true;
    }
    const std::string_view file = values_.text(value);
    if (file.size() > kMaxPathBytes) return fail_outside(name, quoted(file));
    const auto [known, is_new] =
        file_numbers_.try_emplace(file, static_cast<std::uint32_t>(index_.files_.size()));
    if (is_new) {
      if (!is_text(file) || !is_beneath(file)) return fail_outside(name, quoted(file));
      index_.files_.push_back(index_.add_text(file));
      if (file.find('/') != std::string_view::npos) {
        const std::string path = normalized_path(file);
        const auto same = normalized_.try_emplace(path, known->second).first;
        same_file_.push_back(same->second);
      } else {
        same_file_.push_back(
            normalized_.try_emplace(std::string(file), known->second).first->second);
      }
    }
    last_file_at_ = value.opcode_at();
    number = last_file_ = known->second;
    return true;
  }

  bool check_transforms(std::string_view name, const Value& value, bool& has_transforms) {
    if (value.kind == ValueKind::none) return true;
    const Object* list = values_.object(value, ObjectKind::list);
    std::size_t count = 0;
    bool are_texts = true;
    const auto visit = [&](const Value& part) {
      are_texts = are_texts && part.kind == ValueKind::text;
      ++count;
    };
    if (list != nullptr) {
      values_.for_each(*list, visit);
    } else if (value.kind == ValueKind::tuple) {
      std::ranges::for_each(values_.tuple(value), visit);
    } else {
      are_texts = value.kind == ValueKind::extents && !value.is_size &&
                  values_.extents.at(value.number()).empty();
    }
    if (count > CheckpointIndex::kMaxTransforms) {
      return fail(name, "the metadata lists " + std::to_string(count) +
                            " transforms; the maximum is " +
                            std::to_string(CheckpointIndex::kMaxTransforms));
    }
    if (!are_texts) {
      return fail(name, "expected a list of transform names in the metadata, found " +
                            (list == nullptr ? values_.kind(value) : "other values"));
    }
    has_transforms = count > 0;
    return true;
  }

  static std::uint64_t shard_hash(std::uint32_t entry, std::uint32_t offsets) {
    return SeededHash()((std::uint64_t{entry} << 32) | offsets);
  }
  auto is_at(std::uint32_t entry, std::uint32_t offsets) const {
    return [this, of = index_.entries_[entry], offsets](std::uint32_t shard) {
      return index_.shards_[shard].offsets == offsets && shard >= of.first_shard &&
             shard - of.first_shard < of.shard_count;
    };
  }

  /// Returns the first shard of an entry with these offsets, or nullptr. The entry must be a tensor
  /// with several shards.
  Shard* shard_at(std::uint32_t entry, std::uint32_t offsets) {
    if (!std::exchange(are_shards_known_, true)) add_shard_ids();
    const auto found = shard_ids_.find(shard_hash(entry, offsets), is_at(entry, offsets));
    return found ? &index_.shards_[*found] : nullptr;
  }
  void add_shard_ids() {
    shard_ids_.reserve(index_.shards_.size());
    for (std::uint32_t number = 0; number < index_.entries_.size(); ++number) {
      const Entry& entry = index_.entries_[number];
      if (!entry.is_tensor || entry.shard_count < 2) continue;
      for (std::uint32_t i = entry.first_shard; i < entry.first_shard + entry.shard_count; ++i) {
        const std::uint32_t offsets = index_.shards_[i].offsets;
        shard_ids_.add(shard_hash(number, offsets), i, is_at(number, offsets));
      }
    }
  }
  /// Returns the number of an entry. Looks up recent names by the offset of their opcode, because
  /// picklers write most names once.
  std::optional<std::uint32_t> entry_of(std::string_view name, const Value& text) {
    Known& known = known_[(text.opcode_at() * 0x9e3779b97f4a7c15) >> (64 - kKnownBits)];
    if (known.at == text.opcode_at()) return known.entry;
    LongText* found = long_text(text, name);
    if (found != nullptr && found->is_looked_up) return found->entry;
    const auto entry = index_.find(name);
    if (entry) known = {text.opcode_at(), *entry};
    if (found != nullptr) {
      found->entry = entry;
      found->is_looked_up = true;
    }
    return entry;
  }

  void assign_location(std::string_view name, const KeyRecord& key, const Shard& location) {
    const std::uint32_t offsets =
        key.has_offsets && key.offsets.problem == Object::kNothing ? key.offsets.id : kNone;
    Shard* shard = nullptr;
    if (const auto number = entry_of(name, key.name)) {
      const Entry& entry = index_.entries_[*number];
      if (!entry.is_tensor || entry.shard_count == 1) {
        Shard& only = index_.shards_[entry.first_shard];
        if (only.offsets == offsets && key.has_offsets == entry.is_tensor) shard = &only;
      } else if (entry.shard_count > 1 && offsets != kNone) {
        // Fast path: most writers store locations in the order of the shards.
        std::uint32_t& next = next_shards_[*number];
        if (next < entry.shard_count &&
            index_.shards_[entry.first_shard + next].offsets == offsets) {
          shard = &index_.shards_[entry.first_shard + next++];
        } else {
          shard = shard_at(*number, offsets);
        }
      }
    }
    if (shard == nullptr) {
      UndescribedRecord& record = index_.undescribed_records_.emplace_back();
      record.name = added_text(key.name);
      record.offsets = offsets;
      shard = &record.shard;
    }
    shard->file = location.file;
    shard->offset = location.offset;
    shard->length = location.length;
    shard->is_transformed = location.is_transformed;
  }

  /// Gives each shard without a location the location of the tensor's first shard with the same
  /// offsets. Empty shards may have equal offsets, and then share one record.
  void share_locations() {
    for (std::uint32_t number = 0; number < index_.entries_.size(); ++number) {
      const Entry& entry = index_.entries_[number];
      if (!entry.is_tensor || entry.shard_count < 2) continue;
      for (std::uint32_t i = entry.first_shard; i < entry.first_shard + entry.shard_count; ++i) {
        Shard& shard = index_.shards_[i];
        if (shard.file != kNone) continue;
        const Shard& first = *shard_at(number, shard.offsets);
        const std::uint32_t sizes = shard.sizes;
        shard = first;
        shard.sizes = sizes;
      }
    }
  }

  bool check_overlaps() {
    // Group the ranges by file with a counting sort, then sort each group by offset.
    std::vector<std::uint32_t> begins(index_.files_.size() + 1);
    for (Range& range : ranges_) {
      range.file = same_file_[range.file];
      ++begins[range.file + 1];
    }
    for (std::size_t file = 1; file < begins.size(); ++file) begins[file] += begins[file - 1];
    std::vector<Range> sorted(ranges_.size());
    std::vector<std::uint32_t> next(begins.begin(), begins.end() - 1);
    for (const Range& range : ranges_) sorted[next[range.file]++] = range;
    for (std::size_t file = 0; file + 1 < begins.size(); ++file) {
      const auto begin = sorted.begin() + begins[file];
      const auto end = sorted.begin() + begins[file + 1];
      std::sort(begin, end, [](const Range& a, const Range& b) { return a.offset < b.offset; });
      for (auto next_one = begin; next_one != end; ++next_one) {
        if (next_one == begin) continue;
        const Range& one = *(next_one - 1);
        // If ranges could overlap, loading a small file could need a lot of memory.
        if (one.length > next_one->offset - one.offset) {
          return fail(values_.text(one.name),
                      "in the metadata, the range of " + std::to_string(one.length) +
                          " bytes at byte " + std::to_string(one.offset) + " of " +
                          std::string(index_.text(index_.files_[file])) +
                          " overlaps the range of " + std::string(values_.text(next_one->name)) +
                          " at byte " + std::to_string(next_one->offset));
        }
      }
    }
    return true;
  }

  // --- paths ---

  // torch's set_element follows each path. It creates a dict or list for each part, and extends a
  // list up to the part's index, so a short pickle could make it create huge lists. All lists
  // together may have as many items as the metadata has bytes, plus kFreeItems. The paths of a real
  // state dict need at most one item for each part. A path without numbers creates no list.

  static constexpr std::uint64_t kFreeItems = std::uint64_t{1} << 16;

  /// The containers that set_element would create, identified by their parent and path part.
  struct Containers {
    struct Step {
      std::uint32_t parent = 0;
      ValueKind kind = ValueKind::none;
      std::uint64_t payload = 0;
      bool operator==(const Step&) const = default;
    };
    struct Hash {
      std::size_t operator()(const Step& step) const {
        return SeededHash()(SeededHash()((std::uint64_t{step.parent} << 8) |
                                         static_cast<std::uint64_t>(step.kind)) ^
                            step.payload);
      }
    };
    std::unordered_map<Step, std::uint32_t, Hash> numbers;
    std::vector<std::uint64_t> items{0};  // by container: number of items if it is a list
  };

  bool check_paths() {
    const auto paths = values_.attribute(*metadata_, "planner_data");
    if (!paths) return true;
    const Object* dict = values_.object(*paths, ObjectKind::dict);
    if (dict == nullptr) dict = values_.object(*paths, ObjectKind::mapping);
    if (dict == nullptr) return true;  // data of a custom planner, which torch does not interpret
    Containers made;
    NameTable words;
    std::uint64_t steps = values_.bytes.size() + kFreeItems;
    std::uint64_t items = steps;
    std::uint32_t at = 0;
    const auto walk = [&](const Value& key, const Value& part) {
      if (error_) return;
      check_index(key, part, made.items[at], items);
      // Texts pushed by different opcodes are the same key if they are equal.
      const std::uint64_t payload =
          part.kind == ValueKind::text ? words.add(values_.text(part)).first : part.payload;
      const auto [known, is_new] = made.numbers.try_emplace(
          {at, part.kind, payload}, static_cast<std::uint32_t>(made.items.size()));
      if (is_new) made.items.push_back(0);
      at = known->second;
    };
    const auto for_each_part = [&](const Value& path, const auto& visit) {
      if (path.kind == ValueKind::extents) {
        for (const std::int64_t number : values_.extents.at(path.number())) {
          Value part;
          part.kind = ValueKind::integer;
          part.payload = static_cast<std::uint64_t>(number);
          visit(part);
        }
      } else if (path.kind == ValueKind::tuple) {
        for (const Value& part : values_.tuple(path)) visit(part);
      } else if (const Object* list = values_.object(path, ObjectKind::list)) {
        values_.for_each(*list, visit);
      } else if (path.kind == ValueKind::object) {
        const Object* keyed = values_.object(path, ObjectKind::dict);
        if (keyed == nullptr) keyed = values_.object(path, ObjectKind::mapping);
        if (keyed == nullptr) return;
        values_.for_each_pair(*keyed, [&](const Value&, const Value& part) { visit(part); });
      }
    };
    values_.for_each_pair(*dict, [&](const Value& key, const Value& path) {
      if (error_) return;
      bool are_texts = true;
      for_each_part(path, [&](const Value& part) {
        are_texts = are_texts && part.kind == ValueKind::text;
        if (steps > 0) --steps;
      });
      if (steps == 0) {
        fail(describe_key(key),
             "together, the paths have too many parts for metadata of this size");
      } else if (!are_texts) {
        at = 0;
        for_each_part(path, [&](const Value& part) { walk(key, part); });
      }
    });
    return !error_;
  }

  /// If the part is a list index, subtracts the number of items that set_element would add to the
  /// list from `left`. Fails if `left` is too small.
  void check_index(const Value& key, const Value& part, std::uint64_t& items, std::uint64_t& left) {
    std::uint64_t end = 0;
    if (part.is_integer() && part.integer() >= 0) {
      end = static_cast<std::uint64_t>(part.integer()) + 1;
    } else if (part.kind == ValueKind::real) {
      // If another part follows, set_element extends the list until it is longer than the number.
      const auto number = part.real();
      if (!(number > 0)) return;
      end = number < 1e18 ? static_cast<std::uint64_t>(number) + 2 : kUnknown;
    } else if (part.is_integer() || part.kind == ValueKind::large_integer) {
      end = kUnknown;
    }
    if (end <= items) return;
    if (end - items > left) {
      fail(describe_key(key),
           "the path in the metadata has the list index " + describe_index(part) +
               "; together, the lists of all paths would be too long for metadata of this size");
      return;
    }
    left -= end - items;
    items = end;
  }

  std::string describe_index(const Value& part) const {
    return part.kind == ValueKind::real ? std::to_string(part.real()) : values_.number(part);
  }

  // --- other attributes ---

  bool check_storage_meta() {
    const auto meta = values_.attribute(*metadata_, "storage_meta");
    if (!meta || meta->kind == ValueKind::none || values_.type(*meta) == TorchClass::storage_meta) {
      return true;
    }
    return fail("storage_meta is " + values_.kind(*meta) + ", not a StorageMeta");
  }

  bool add_tables() {
    const auto ours = values_.attribute(*metadata_, "torch_ckpt");
    index_.tables_.resize(index_.files_.size());
    if (!ours || ours->kind == ValueKind::none) return true;
    const Object* dict = values_.object(*ours, ObjectKind::dict);
    std::optional<Value> version;
    std::optional<Value> checksums;
    if (dict != nullptr) {
      values_.for_each_pair(*dict, [&](const Value& key, const Value& value) {
        if (key.kind != ValueKind::text) return;
        if (values_.text(key) == "version") version = value;
        if (values_.text(key) == "checksums") checksums = value;
      });
    }
    if (!version || !version->is_integer()) {
      return fail("the metadata's attribute torch_ckpt has no valid version");
    }
    if (version->integer() != 1) return true;
    const Object* tables = checksums ? values_.object(*checksums, ObjectKind::dict) : nullptr;
    if (tables == nullptr) {
      return fail("expected a dict of checksum tables, found " + kind_or_none(checksums));
    }
    // Together, tables cannot be longer than the metadata unless several files share one.
    std::size_t table_bytes = 0;
    values_.for_each_pair(*tables, [&](const Value& file, const Value& table) {
      if (error_) return;
      if (file.kind != ValueKind::text || table.kind != ValueKind::bytes) {
        fail("the checksum table of " + describe_key(file) + " should be bytes, but is " +
             values_.kind(table));
        return;
      }
      const std::string_view name = values_.text(file);
      if (name.size() > kMaxPathBytes) return;
      const auto number = file_numbers_.find(name);
      if (number == file_numbers_.end()) return;
      if (index_.tables_[number->second].bytes > 0) {
        fail(quoted(name) + " has two checksum tables");
        return;
      }
      const std::size_t bytes = values_.text(table).size();
      if (bytes > values_.bytes.size() - table_bytes) {
        fail(quoted(name) + " shares its checksum table with another file");
        return;
      }
      table_bytes += bytes;
      index_.tables_[number->second] = added_text(table);
    });
    return !error_;
  }

  std::string kind_or_none(const std::optional<Value>& value) const {
    return values_.kind(value.value_or(Value{}));
  }

  const PickleValues& values_;
  const TorchRecords& records_;
  const Object* metadata_ = nullptr;
  CheckpointIndex index_;
  std::optional<Error> error_;
  std::vector<std::uint64_t> products_;            // by extents id; kMaxBytes + 1 if larger
  std::vector<bool> is_list_seen_;                 // by object number
  std::vector<bool> is_key_seen_;                  // by number of the KeyRecord
  std::map<std::uint32_t, std::uint32_t> dtypes_;  // by global
  std::vector<std::uint64_t> item_bytes_;          // by dtype
  std::vector<Range> ranges_;
  std::map<std::string_view, std::uint32_t> file_numbers_;
  std::map<std::string, std::uint32_t> normalized_;
  std::vector<std::uint32_t> same_file_;  // by file: the first file with the same normalized path
  std::uint64_t last_file_at_ = kNoOffset;
  std::uint32_t last_file_ = 0;
  IdTable shard_ids_;  // shards of tensors with several shards, by entry and offsets
  bool are_shards_known_ = false;
  std::vector<std::uint32_t> next_shards_;  // by entry
  std::unordered_map<std::uint64_t, LongText, SeededHash> long_texts_;
  std::unordered_map<std::uint64_t, TextRef, SeededHash> added_texts_;
  struct Known {
    std::uint64_t at = kNoOffset;
    std::uint32_t entry = 0;
  };
  static constexpr int kKnownBits = 12;
  std::vector<Known> known_ = std::vector<Known>(std::size_t{1} << kKnownBits);
};

Result<CheckpointIndex> CheckpointIndex::renamed(std::span<const std::string> names) const {
  if (names.size() != entries_.size()) {
    return format_error(Errc::invalid_argument, "got " + std::to_string(names.size()) +
                                                    " names for " +
                                                    std::to_string(entries_.size()) + " entries");
  }
  CheckpointIndex made = *this;
  made.names_ = {};
  for (const std::string& name : names) {
    if (!made.names_.add(name).second) {
      return format_error(Errc::invalid_argument, name + ": two entries would have this name");
    }
  }
  return made;
}

std::string normalized_path(std::string_view file) {
  std::string path;
  while (!file.empty()) {
    const std::string_view part = file.substr(0, file.find('/'));
    file.remove_prefix(std::min(file.size(), part.size() + 1));
    if (part.empty() || part == ".") continue;
    if (!path.empty()) path += '/';
    path += part;
  }
  return path;
}

Result<CheckpointIndex> CheckpointIndex::build(const MetadataPickle& pickle) {
  return IndexBuilder(pickle).run();
}

Result<CheckpointIndex> CheckpointIndex::decode(std::span<const std::byte> file,
                                                const std::string& source) {
  const auto refused = [&](const Error& error) {
    // A caller can pass allow_pickle=True only to load a name that is not allowed.
    if (error.code == Errc::pickle_forbidden) {
      return format_error(error.code, source + ": " + error.message() +
                                          "; pass ReadOptions(allow_pickle=True) (to a "
                                          "FileSystemReader: allow_pickle=True) only if you trust "
                                          "the writer");
    }
    return format_error(error.code,
                        source + " is damaged or not a checkpoint's metadata: " + error.message());
  };
  const auto covered = bytes_sealed(file);
  if (!covered) return refused(covered.error());
  const auto pickle = walk_metadata_pickle(file, *allowed_globals());
  if (!pickle) return refused(pickle.error());
  if (pickle->values.end != covered->value_or(file.size())) {
    return refused(format_error(Errc::pickle_truncated,
                                "the pickle ends at byte " + std::to_string(pickle->values.end) +
                                    " but is not followed by a valid checksum seal"));
  }
  return named_source(build(*pickle), source);
}

Result<CheckpointIndex> CheckpointIndex::decode_objects(std::span<const std::byte> pickle,
                                                        const std::string& source) {
  const auto walked = walk_metadata_pickle(pickle, *allowed_globals());
  if (!walked) {
    return format_error(
        Errc::metadata_inconsistent,
        source + ": the metadata contains unsupported values: " + walked.error().message());
  }
  return named_source(build(*walked), source);
}

}  // namespace torch_ckpt::index
