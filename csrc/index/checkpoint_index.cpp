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
#include "format/dtype.h"
#include "os/beneath.h"
#include "seeded_hash.h"

namespace torch_ckpt::index {
namespace {

// Bytes and elements are counted in 63 bits.
constexpr std::uint64_t kMostBytes = std::numeric_limits<std::int64_t>::max();

constexpr std::size_t kMostPathBytes = 4096;  // Linux's own limit

/// As Python's decoder of pickled strings takes it, which lets surrogates pass.
bool is_text(std::string_view bytes) {
  for (std::size_t i = 0; i < bytes.size();) {
    const auto lead = static_cast<unsigned char>(bytes[i]);
    if (lead < 0x80) {
      ++i;
      continue;
    }
    const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || i + length > bytes.size()) return false;
    for (std::size_t k = 1; k < length; ++k) {
      if ((static_cast<unsigned char>(bytes[i + k]) & 0xc0) != 0x80) return false;
    }
    const auto second = static_cast<unsigned char>(bytes[i + 1]);
    if ((lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90) ||
        (lead == 0xf4 && second >= 0x90)) {
      return false;
    }
    i += length;
  }
  return true;
}

bool has_surrogates(std::string_view text) {
  for (std::size_t i = 0; i + 1 < text.size(); ++i) {
    if (text[i] == '\xed' && static_cast<unsigned char>(text[i + 1]) >= 0xa0) return true;
  }
  return false;
}

bool lies_beneath(std::string_view file) {
  return file.size() <= kMostPathBytes && !has_surrogates(file) && os::names_file_beneath(file);
}

/// Of several spellings of a path, one.
std::string plain(std::string_view file) {
  std::string spelled;
  while (!file.empty()) {
    const std::string_view part = file.substr(0, file.find('/'));
    file.remove_prefix(std::min(file.size(), part.size() + 1));
    if (part.empty() || part == ".") continue;
    if (!spelled.empty()) spelled += '/';
    spelled += part;
  }
  return spelled;
}

/// As Python shows a string.
std::string quoted(std::string_view file) {
  constexpr std::size_t kMost = 200;
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text = "'";
  for (const char c : file.substr(0, kMost)) {
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
  return text + (file.size() > kMost ? "..." : "'");
}

}  // namespace

class IndexBuilder {
 public:
  explicit IndexBuilder(const PickleValues& values) : values_(values) {}

  Result<CheckpointIndex> run() {
    if (values_.type(values_.root) != Class::metadata) {
      fail("it holds " + values_.kind(values_.root) + ", not a checkpoint's metadata");
    } else {
      metadata_ = &values_.objects[values_.root.number()];
      index_.extents_ = values_.extents;
      products_.resize(values_.extents.size(), kUnknown);
      add_entries() && add_places() && check_paths() && check_storage_meta() && add_tables();
    }
    if (error_) return std::move(*error_);
    return std::move(index_);
  }

 private:
  using Entry = CheckpointIndex::Entry;
  using Shard = CheckpointIndex::Shard;
  using Stray = CheckpointIndex::Stray;
  using Text = CheckpointIndex::Text;

  static constexpr std::uint32_t kNone = CheckpointIndex::kNone;
  static constexpr std::uint64_t kUnknown = ~std::uint64_t{0};
  /// The offset of no opcode.
  static constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

  // --- errors: the first one ends it; all return false ---

  bool fail(std::string detail) {
    error_ = format_error(Errc::metadata_inconsistent, std::move(detail));
    return false;
  }
  bool fail(std::string_view name, const std::string& detail) {
    return fail(std::string(name) + ": " + detail);
  }
  bool fail_outside(std::string_view name, const std::string& file) {
    error_ = format_error(Errc::outside_directory,
                          std::string(name) + ": the metadata says that its data lies in " + file +
                              ", which is not a file in the checkpoint's directory");
    return false;
  }

  // --- texts ---

  /// Of a key that is no text what there is to show.
  std::string shown(const Value& key) const {
    if (key.kind == Kind::text) return std::string(values_.text(key));
    return key.kind == Kind::small_integer ? values_.number(key) : values_.kind(key);
  }

  /// A long text, by the offset of its opcode. Any number of pairs may refer to one text, so what
  /// costs time or memory in proportion to its bytes is done once.
  struct LongText {
    bool is_checked = false;    // as a name
    bool is_looked_up = false;  // in the complete list of entries
    std::optional<std::uint32_t> entry;
  };
  static constexpr std::size_t kShortBytes = 256;

  LongText* long_text(const Value& value, std::string_view text) {
    return text.size() > kShortBytes ? &long_texts_[value.payload] : nullptr;
  }
  /// The text in the index's memory, where it is put once.
  Text added_text(const Value& value) {
    const auto [known, is_new] = added_texts_.try_emplace(value.payload);
    if (is_new) known->second = index_.add_text(values_.text(value));
    return known->second;
  }
  bool check_name(const Value& value, std::string_view name, const char* where) {
    LongText* known = long_text(value, name);
    if (known != nullptr && known->is_checked) return true;
    if (name.size() > CheckpointIndex::kMostNameBytes) {
      return fail(std::string(where) + " has a name of " + std::to_string(name.size()) +
                  " bytes, more than " + std::to_string(CheckpointIndex::kMostNameBytes));
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
    index_.shards_.reserve(std::max(count, values_.places.size()));
    values_.for_each_pair(*dict, [&](const Value& key, const Value& value) {
      if (!error_) add_entry(key, value);
    });
    return !error_;
  }

  bool add_entry(const Value& key, const Value& value) {
    if (key.kind != Kind::text) {
      return fail("state_dict_metadata has a key that is " + values_.kind(key));
    }
    const std::string_view name = values_.text(key);
    if (!check_name(key, name, "state_dict_metadata")) return false;
    Entry entry;
    entry.first_shard = static_cast<std::uint32_t>(index_.shards_.size());
    switch (values_.type(value)) {
      case Class::object:
        index_.shards_.emplace_back();
        break;
      case Class::tensor:
        entry.is_tensor = true;
        if (!add_tensor(name, values_.objects[value.number()], entry)) return false;
        break;
      default:
        return fail(name, "the metadata describes it by " + values_.kind(value));
    }
    entry.shard_count = static_cast<std::uint32_t>(index_.shards_.size()) - entry.first_shard;
    // A pickler writes each key of a dict once.
    if (!index_.names_.add(name).second) {
      return fail(name, "state_dict_metadata has this name twice");
    }
    index_.entries_.push_back(entry);
    return true;
  }

  bool add_tensor(std::string_view name, const Object& instance, Entry& entry) {
    if (!instance.built || !values_.tensors[instance.first].is_whole) {
      return fail(name, "the metadata does not have all of its description");
    }
    const TensorRecord& record = values_.tensors[instance.first];
    const Object* chunks = values_.object(record.chunks, ObjectKind::list);
    if (chunks == nullptr) {
      return fail(name,
                  "the metadata has " + values_.kind(record.chunks) + " instead of its shards");
    }
    if (!add_properties(name, record.properties, entry)) return false;
    if (!check_extents(name, record.size, "a size")) return false;
    entry.size = record.size.id;
    if (!check_bytes(name, entry)) return false;
    const std::size_t count = values_.count(*chunks);
    if (count > 1) {
      // Each name would ask for the work of all of them, and torch shares none.
      if (is_list_seen_.empty()) is_list_seen_.resize(values_.objects.size());
      const std::uint32_t number = record.chunks.number();
      if (is_list_seen_[number]) {
        return fail(name, "the metadata gives it the shards of another tensor");
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
    if (values_.type(value) != Class::properties) {
      return fail(name, "the metadata has " + values_.kind(value) + " instead of its properties");
    }
    const Object& instance = values_.objects[value.number()];
    const PropertiesRecord none;
    const PropertiesRecord& record = instance.built ? values_.properties[instance.first] : none;
    if (record.dtype.kind != Kind::global ||
        values_.globals[record.dtype.number()].type != Class::dtype) {
      return fail(name, "the metadata says that its dtype is " + values_.kind(record.dtype));
    }
    const auto [known, is_new] =
        dtypes_.try_emplace(record.dtype.number(), static_cast<std::uint32_t>(dtypes_.size()));
    if (is_new) {
      const std::string& full = values_.globals[record.dtype.number()].name;
      index_.dtypes_.push_back(full.substr(full.find(' ') + 1));
      const format::Dtype* dtype = format::find_dtype(index_.dtypes_.back());
      // Of dtypes without a size of their own, which cannot be loaded.
      item_bytes_.push_back(dtype == nullptr ? 1 : dtype->item_bytes);
    }
    entry.dtype = known->second;
    entry.requires_grad =
        record.requires_grad.kind == Kind::boolean && record.requires_grad.is(Value::kIs);
    return true;
  }

  /// Sets products_ of the extents.
  bool check_extents(std::string_view name, const ExtentsField& field, const char* what) {
    if (field.problem != Object::kNothing) {
      std::string problem = values_.problems[field.problem];
      problem.replace(problem.find('%'), 1, what);
      return fail(name, "the metadata has " + problem);
    }
    std::uint64_t& product = products_[field.id];
    if (product != kUnknown) return true;
    const std::span<const std::int64_t> numbers = values_.extents.at(field.id);
    if (numbers.size() > CheckpointIndex::kMostDimensions) {
      return fail(name, "the metadata has " + std::string(what) + " of " +
                            std::to_string(numbers.size()) + " dimensions, more than " +
                            std::to_string(CheckpointIndex::kMostDimensions));
    }
    bool is_empty = false;
    for (const std::int64_t number : numbers) {
      if (number < 0) {
        return fail(name, "the metadata has " + std::string(what) + " of " +
                              std::to_string(number) + ", which is not a count");
      }
      is_empty = is_empty || number == 0;
    }
    product = is_empty ? 0 : 1;
    for (const std::int64_t number : numbers) {
      if (product > 0 && static_cast<std::uint64_t>(number) > kMostBytes / product) {
        product = kMostBytes + 1;
        break;
      }
      product *= static_cast<std::uint64_t>(number);
    }
    return true;
  }

  bool check_bytes(std::string_view name, const Entry& entry) {
    if (products_[entry.size] <= kMostBytes / item_bytes_[entry.dtype]) return true;
    return fail(name, "the metadata says that it has 2**63 or more bytes");
  }

  bool add_shard(std::string_view name, const Value& value, const Entry& entry,
                 std::uint64_t& held) {
    if (values_.type(value) != Class::shard) {
      return fail(name, "the metadata has " + values_.kind(value) + " instead of a shard");
    }
    const Object& instance = values_.objects[value.number()];
    if (!instance.built || !values_.shards[instance.first].is_whole) {
      return fail(name, "the metadata has a shard without a place");
    }
    const ShardRecord& record = values_.shards[instance.first];
    if (!check_extents(name, record.offsets, "a shard's offset") ||
        !check_extents(name, record.sizes, "a shard's size")) {
      return false;
    }
    const auto offsets = values_.extents.at(record.offsets.id);
    const auto sizes = values_.extents.at(record.sizes.id);
    const auto whole = values_.extents.at(entry.size);
    if (!lies_inside(offsets, sizes, whole)) {
      return fail(name, "the metadata has a shard of " + listed(sizes) + " at " + listed(offsets) +
                            ", which is outside of the tensor of " + listed(whole));
    }
    held += products_[record.sizes.id];
    if (held > products_[entry.size]) {
      // One shard many times over is how little metadata asks for much work.
      return fail(name, "the metadata has shards with more elements than the " +
                            std::to_string(products_[entry.size]) + " of the tensor; they overlap");
    }
    Shard& shard = index_.shards_.emplace_back();
    shard.offsets = record.offsets.id;
    shard.sizes = record.sizes.id;
    return true;
  }

  // --- places ---

  struct Range {
    std::uint64_t offset = 0;
    std::uint64_t length = 0;
    std::uint32_t file = 0;
    Value name;
  };

  bool add_places() {
    const auto stored = values_.attribute(*metadata_, "storage_data");
    if (!stored || stored->kind == Kind::none) return true;
    const Object* dict = values_.object(*stored, ObjectKind::dict);
    if (dict == nullptr) return fail("storage_data is " + values_.kind(*stored) + ", not a dict");
    next_shards_.resize(index_.entries_.size());
    is_key_seen_.resize(values_.keys.size());
    ranges_.reserve(values_.count(*dict) / 2);
    values_.for_each_pair(*dict, [&](const Value& key, const Value& value) {
      if (!error_) add_place(key, value);
    });
    if (error_) return false;
    share_places();
    return check_overlaps();
  }

  bool add_place(const Value& key, const Value& value) {
    if (values_.type(key) != Class::key) {
      return fail("storage_data has a key that is " + values_.kind(key));
    }
    const Object& instance = values_.objects[key.number()];
    const KeyRecord none;
    const KeyRecord& index = instance.built ? values_.keys[instance.first] : none;
    if (index.name.kind != Kind::text) {
      return fail("storage_data has an index whose name is " + values_.kind(index.name));
    }
    const std::string_view name = values_.text(index.name);
    if (!check_name(index.name, name, "storage_data")) return false;
    // Again and again, it would be little metadata and many records.
    if (is_key_seen_[instance.first]) return fail(name, "storage_data has the same key twice");
    is_key_seen_[instance.first] = true;
    if (values_.type(value) != Class::place) {
      return fail(name, "the metadata has " + values_.kind(value) + ", not its place in a file");
    }
    const Object& info = values_.objects[value.number()];
    if (!info.built || !values_.places[info.first].is_whole) {
      return fail(name, "the metadata says only in part where it is stored");
    }
    const PlaceRecord& place = values_.places[info.first];
    Shard found;
    if (!find_file(name, place.file, found.file)) return false;
    const bool are_counts = is_integer(place.offset) && is_integer(place.length);
    if (!are_counts || place.offset.integer() < 0 || place.length.integer() < 0 ||
        place.length.payload > kMostBytes - place.offset.payload) {
      const std::string end = are_counts ? "; that ends nowhere in a file" : "";
      return fail(name, "the metadata says that it is stored at byte " +
                            values_.number(place.offset) + ", in " + values_.number(place.length) +
                            " bytes" + end);
    }
    found.offset = place.offset.payload;
    found.length = place.length.payload;
    if (!check_transforms(name, place.transforms, found.is_transformed)) return false;
    if (found.length > 0) ranges_.push_back({found.offset, found.length, found.file, index.name});
    put(name, index, found);
    return true;
  }

  static bool is_integer(const Value& value) {
    return value.kind == Kind::small_integer || value.kind == Kind::integer;
  }

  /// The number of a file.
  bool find_file(std::string_view name, const Value& value, std::uint32_t& number) {
    if (value.kind != Kind::text) return fail_outside(name, values_.kind(value));
    // Its name is written once by most picklers.
    if (value.payload == last_file_at_) {
      number = last_file_;
      return true;
    }
    const std::string_view file = values_.text(value);
    if (file.size() > kMostPathBytes) return fail_outside(name, quoted(file));
    const auto [known, is_new] =
        file_numbers_.try_emplace(file, static_cast<std::uint32_t>(index_.files_.size()));
    if (is_new) {
      if (!is_text(file) || !lies_beneath(file)) return fail_outside(name, quoted(file));
      index_.files_.push_back(index_.add_text(file));
      if (file.find('/') != std::string_view::npos) {
        const std::string spelled = plain(file);
        const auto same = spellings_.try_emplace(spelled, known->second).first;
        same_file_.push_back(same->second);
      } else {
        same_file_.push_back(
            spellings_.try_emplace(std::string(file), known->second).first->second);
      }
    }
    last_file_at_ = value.payload;
    number = last_file_ = known->second;
    return true;
  }

  bool check_transforms(std::string_view name, const Value& value, bool& has_some) {
    if (value.kind == Kind::none) return true;
    const Object* list = values_.object(value, ObjectKind::list);
    std::size_t count = 0;
    bool are_texts = true;
    const auto look_at = [&](const Value& part) {
      are_texts = are_texts && part.kind == Kind::text;
      ++count;
    };
    if (list != nullptr) {
      values_.for_each(*list, look_at);
    } else if (value.kind == Kind::tuple) {
      std::ranges::for_each(values_.tuple(value), look_at);
    } else {
      are_texts = value.kind == Kind::extents && value.is(Value::kIs) &&
                  values_.extents.at(value.number()).empty();
    }
    if (count > CheckpointIndex::kMostTransforms) {
      return fail(name, "the metadata has " + std::to_string(count) + " transforms, more than " +
                            std::to_string(CheckpointIndex::kMostTransforms));
    }
    if (!are_texts) {
      return fail(name, "the metadata has " + values_.kind(value) + " instead of its transforms");
    }
    has_some = count > 0;
    return true;
  }

  // Shards of tensors by entry and offsets.

  static std::uint64_t shard_key(std::uint32_t entry, std::uint32_t offsets) {
    return (std::uint64_t{entry} << 32) | offsets;
  }
  /// The slot of a shard, or the free one for it. A slot holds the shard's number + 1.
  std::uint32_t& slot_of(std::uint64_t key) {
    if (shard_slots_.empty()) fill_shard_slots();
    const std::size_t mask = shard_slots_.size() - 1;
    std::size_t slot = SeededHash()(key) & mask;
    while (shard_slots_[slot].second != 0 && shard_slots_[slot].first != key) {
      slot = (slot + 1) & mask;
    }
    shard_slots_[slot].first = key;
    return shard_slots_[slot].second;
  }
  void fill_shard_slots() {
    std::size_t slots = 64;
    while (slots < 2 * index_.shards_.size()) slots *= 2;
    shard_slots_.assign(slots, {});
    for (std::uint32_t number = 0; number < index_.entries_.size(); ++number) {
      const Entry& entry = index_.entries_[number];
      if (!entry.is_tensor || entry.shard_count < 2) continue;
      for (std::uint32_t i = entry.first_shard; i < entry.first_shard + entry.shard_count; ++i) {
        std::uint32_t& slot = slot_of(shard_key(number, index_.shards_[i].offsets));
        if (slot == 0) slot = i + 1;
      }
    }
  }

  /// The number of an entry. Its name is written once by most picklers, and then known by its
  /// place.
  std::optional<std::uint32_t> entry_of(std::string_view name, const Value& text) {
    Known& known = known_[(text.payload * 0x9e3779b97f4a7c15) >> (64 - kKnownBits)];
    if (known.at == text.payload) return known.entry;
    LongText* found = long_text(text, name);
    if (found != nullptr && found->is_looked_up) return found->entry;
    const auto entry = index_.find(name);
    if (entry) known = {text.payload, *entry};
    if (found != nullptr) {
      found->entry = entry;
      found->is_looked_up = true;
    }
    return entry;
  }

  void put(std::string_view name, const KeyRecord& key, const Shard& place) {
    const std::uint32_t offsets =
        key.has_offsets && key.offsets.problem == Object::kNothing ? key.offsets.id : kNone;
    Shard* shard = nullptr;
    if (const auto number = entry_of(name, key.name)) {
      const Entry& entry = index_.entries_[*number];
      if (!entry.is_tensor || entry.shard_count == 1) {
        Shard& only = index_.shards_[entry.first_shard];
        if (only.offsets == offsets && key.has_offsets == entry.is_tensor) shard = &only;
      } else if (entry.shard_count > 1 && offsets != kNone) {
        // Most writers list places in the order of the shards.
        std::uint32_t& next = next_shards_[*number];
        if (next < entry.shard_count &&
            index_.shards_[entry.first_shard + next].offsets == offsets) {
          shard = &index_.shards_[entry.first_shard + next++];
        } else if (const std::uint32_t found = slot_of(shard_key(*number, offsets)); found != 0) {
          shard = &index_.shards_[found - 1];
        }
      }
    }
    if (shard == nullptr) {
      Stray& stray = index_.strays_.emplace_back();
      stray.name = added_text(key.name);
      stray.offsets = offsets;
      shard = &stray.shard;
    }
    shard->file = place.file;
    shard->offset = place.offset;
    shard->length = place.length;
    shard->is_transformed = place.is_transformed;
  }

  /// Empty shards of a tensor may lie at the same offsets, and have one record then.
  void share_places() {
    for (std::uint32_t number = 0; number < index_.entries_.size(); ++number) {
      const Entry& entry = index_.entries_[number];
      if (!entry.is_tensor || entry.shard_count < 2) continue;
      for (std::uint32_t i = entry.first_shard; i < entry.first_shard + entry.shard_count; ++i) {
        Shard& shard = index_.shards_[i];
        if (shard.file != kNone) continue;
        const Shard& first = index_.shards_[slot_of(shard_key(number, shard.offsets)) - 1];
        const std::uint32_t sizes = shard.sizes;
        shard = first;
        shard.sizes = sizes;
      }
    }
  }

  bool check_overlaps() {
    // Each file's together, without sorting what is one file's already.
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
        // A small file could stand for a large load.
        if (one.length > next_one->offset - one.offset) {
          return fail(values_.text(one.name),
                      "the metadata says that it has " + std::to_string(one.length) +
                          " bytes from " + std::to_string(one.offset) + " on in " +
                          std::string(index_.text(index_.files_[file])) + ", and " +
                          std::string(values_.text(next_one->name)) + " begins amid them, at " +
                          std::to_string(next_one->offset));
        }
      }
    }
    return true;
  }

  // --- the rest ---

  // torch's set_element walks each path, makes a dict or list for each part, and fills lists up to
  // the number that it finds there. The lists of all paths together may have an item for each byte
  // of the metadata, and kFreeItems more. A state dict makes lists with at most one item for each
  // part of a path. A path of texts makes no list.

  static constexpr std::uint64_t kFreeItems = std::uint64_t{1} << 16;

  /// The containers that paths lead to, by their parent and the part that leads there.
  struct Containers {
    struct Step {
      std::uint32_t parent = 0;
      Kind kind = Kind::none;
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
    std::vector<std::uint64_t> items{0};  // if it is a list
  };

  bool check_paths() {
    const auto paths = values_.attribute(*metadata_, "planner_data");
    if (!paths) return true;
    const Object* dict = values_.object(*paths, ObjectKind::dict);
    if (dict == nullptr) dict = values_.object(*paths, ObjectKind::mapping);
    if (dict == nullptr) return true;  // some planner's own, which torch makes nothing of
    Containers made;
    NameTable words;
    std::uint64_t steps = values_.bytes.size() + kFreeItems;
    std::uint64_t items = steps;
    std::uint32_t at = 0;
    const auto walk = [&](const Value& key, const Value& part) {
      if (error_) return;
      check_index(key, part, made.items[at], items);
      // Texts of the same bytes are one key, wherever they are written.
      const std::uint64_t payload =
          part.kind == Kind::text ? words.add(values_.text(part)).first : part.payload;
      const auto [known, is_new] = made.numbers.try_emplace(
          {at, part.kind, payload}, static_cast<std::uint32_t>(made.items.size()));
      if (is_new) made.items.push_back(0);
      at = known->second;
    };
    const auto for_each_part = [&](const Value& path, const auto& visit) {
      if (path.kind == Kind::extents) {
        for (const std::int64_t number : values_.extents.at(path.number())) {
          visit(Value{Kind::integer, 0, 0, 1, static_cast<std::uint64_t>(number)});
        }
      } else if (path.kind == Kind::tuple) {
        for (const Value& part : values_.tuple(path)) visit(part);
      } else if (const Object* list = values_.object(path, ObjectKind::list)) {
        values_.for_each(*list, visit);
      } else if (path.kind == Kind::object) {
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
        are_texts = are_texts && part.kind == Kind::text;
        if (steps > 0) --steps;
      });
      if (steps == 0) {
        fail(shown(key), "the metadata gives many names one long path");
      } else if (!are_texts) {
        at = 0;
        for_each_part(path, [&](const Value& part) { walk(key, part); });
      }
    });
    return !error_;
  }

  /// Takes from `left` the items that a list gets if the part is an index into it.
  void check_index(const Value& key, const Value& part, std::uint64_t& items, std::uint64_t& left) {
    std::uint64_t end = 0;
    if (is_integer(part) && part.integer() >= 0) {
      end = part.payload + 1;
    } else if (part.kind == Kind::real) {
      // set_element compares the length of the list with it, if a further part follows.
      const auto number = std::bit_cast<double>(part.payload);
      if (!(number > 0)) return;
      end = number < 1e18 ? static_cast<std::uint64_t>(number) + 2 : kUnknown;
    } else if (is_integer(part) || part.kind == Kind::large_integer) {
      end = kUnknown;
    }
    if (end <= items) return;
    if (end - items > left) {
      fail(shown(key), "the metadata places it in a list at " + shown_index(part) +
                           "; the lists of all paths would have more items than the metadata has "
                           "bytes");
      return;
    }
    left -= end - items;
    items = end;
  }

  std::string shown_index(const Value& part) const {
    return part.kind == Kind::real ? std::to_string(std::bit_cast<double>(part.payload))
                                   : values_.number(part);
  }

  bool check_storage_meta() {
    const auto meta = values_.attribute(*metadata_, "storage_meta");
    if (!meta || meta->kind == Kind::none || values_.type(*meta) == Class::storage_meta) {
      return true;
    }
    return fail("storage_meta is " + values_.kind(*meta) + ", not a StorageMeta");
  }

  bool add_tables() {
    const auto ours = values_.attribute(*metadata_, "torch_ckpt");
    index_.tables_.resize(index_.files_.size());
    if (!ours || ours->kind == Kind::none) return true;
    const Object* dict = values_.object(*ours, ObjectKind::dict);
    std::optional<Value> version;
    std::optional<Value> checksums;
    std::optional<Value> phases;
    if (dict != nullptr) {
      values_.for_each_pair(*dict, [&](const Value& key, const Value& value) {
        if (key.kind != Kind::text) return;
        if (values_.text(key) == "version") version = value;
        if (values_.text(key) == "checksums") checksums = value;
        if (values_.text(key) == "phases") phases = value;
      });
    }
    if (!version || !is_integer(*version)) {
      return fail("torch_ckpt, which has the checksums, is damaged");
    }
    if (version->integer() != 1) return true;
    if (phases && phases->kind == Kind::text) {
      index_.phases_ = index_.add_text(values_.text(*phases));
    }
    const Object* tables = checksums ? values_.object(*checksums, ObjectKind::dict) : nullptr;
    if (tables == nullptr) {
      return fail("the checksums are " + kind_or_none(checksums) + ", not a dict");
    }
    // Each has bytes of its own in the metadata.
    std::size_t table_bytes = 0;
    values_.for_each_pair(*tables, [&](const Value& file, const Value& table) {
      if (error_) return;
      if (file.kind != Kind::text || table.kind != Kind::bytes) {
        fail("the checksums of " + shown(file) + " are " + values_.kind(table));
        return;
      }
      const std::string_view name = values_.text(file);
      if (name.size() > kMostPathBytes) return;
      const auto number = file_numbers_.find(name);
      if (number == file_numbers_.end()) return;
      if (index_.tables_[number->second].bytes > 0) {
        fail(quoted(name) + " has two checksum tables");
        return;
      }
      const std::size_t bytes = values_.text(table).size();
      if (bytes > values_.bytes.size() - table_bytes) {
        fail(quoted(name) + " has the checksum table of another file");
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
  const Object* metadata_ = nullptr;
  CheckpointIndex index_;
  std::optional<Error> error_;
  std::vector<std::uint64_t> products_;  // of extents; kMostBytes + 1 for all that is more
  std::vector<bool> is_list_seen_;       // by the object's number
  std::vector<bool> is_key_seen_;        // by the record's number
  std::map<std::uint32_t, std::uint32_t> dtypes_;  // by the global's number
  std::vector<std::uint64_t> item_bytes_;          // by dtype
  std::vector<Range> ranges_;
  std::map<std::string_view, std::uint32_t> file_numbers_;
  std::map<std::string, std::uint32_t> spellings_;
  std::vector<std::uint32_t> same_file_;  // by file: the first one of its spelling
  std::uint64_t last_file_at_ = kNowhere;
  std::uint32_t last_file_ = 0;
  std::vector<std::pair<std::uint64_t, std::uint32_t>> shard_slots_;
  std::vector<std::uint32_t> next_shards_;  // by entry
  std::unordered_map<std::uint64_t, LongText, SeededHash> long_texts_;
  std::unordered_map<std::uint64_t, Text, SeededHash> added_texts_;
  struct Known {
    std::uint64_t at = kNowhere;
    std::uint32_t entry = 0;
  };
  static constexpr int kKnownBits = 12;
  std::vector<Known> known_ = std::vector<Known>(std::size_t{1} << kKnownBits);
};

CheckpointIndex::Text CheckpointIndex::add_text(std::string_view text) {
  const Text added{texts_.size(), static_cast<std::uint32_t>(text.size())};
  texts_ += text;
  return added;
}

std::uint32_t CheckpointIndex::add_dtype(std::string_view dtype) {
  const auto found = std::ranges::find(dtypes_, dtype);
  if (found != dtypes_.end()) return static_cast<std::uint32_t>(found - dtypes_.begin());
  dtypes_.emplace_back(dtype);
  return static_cast<std::uint32_t>(dtypes_.size() - 1);
}

void CheckpointIndex::add_tensor(std::string_view name, std::string_view dtype, bool requires_grad,
                                 std::span<const std::int64_t> size) {
  names_.add(name);
  entries_.push_back({true, requires_grad, add_dtype(dtype), extents_.intern(size),
                      static_cast<std::uint32_t>(shards_.size()), 0});
}

void CheckpointIndex::add_object(std::string_view name) {
  names_.add(name);
  entries_.push_back({false, false, kNone, kNone, static_cast<std::uint32_t>(shards_.size()), 0});
}

std::uint32_t CheckpointIndex::add_shard(std::span<const std::int64_t> offsets,
                                         std::span<const std::int64_t> sizes) {
  Shard& shard = shards_.emplace_back();
  if (entries_.back().is_tensor) {
    shard.offsets = extents_.intern(offsets);
    shard.sizes = extents_.intern(sizes);
  }
  return entries_.back().shard_count++;
}

void CheckpointIndex::set_files(
    std::span<const std::pair<std::string_view, std::string_view>> files) {
  texts_.clear();
  files_.clear();
  tables_.clear();
  file_names_ = {};
  for (const auto& [name, table] : files) {
    files_.push_back(add_text(name));
    tables_.push_back(add_text(table));
    file_names_.add(name);
  }
}

bool CheckpointIndex::place(Placed shard, std::uint32_t file, std::uint64_t offset,
                            std::uint64_t length) {
  Shard& placed = shards_[entries_[shard.entry].first_shard + shard.number];
  if (placed.file == file && placed.offset == offset && placed.length == length) return false;
  if (placed.file == kNone) placed_.push_back(shard);
  placed.file = file;
  placed.offset = offset;
  placed.length = length;
  return true;
}

void CheckpointIndex::add_from(const CheckpointIndex& other, std::string_view name) {
  const auto found = other.find(name);
  if (!found) return;
  const Entry& entry = other.entries_[*found];
  if (entry.is_tensor) {
    add_tensor(name, other.dtypes_[entry.dtype], entry.requires_grad, other.extents(entry.size));
  } else {
    add_object(name);
  }
  const auto here = static_cast<std::uint32_t>(entries_.size() - 1);
  for (const Shard& shard : other.shards(entry)) {
    const bool has_extents = shard.offsets != kNone;
    const std::uint32_t number =
        has_extents ? add_shard(other.extents(shard.offsets), other.extents(shard.sizes))
                    : add_shard({}, {});
    if (shard.file == kNone) continue;
    if (const auto file = file_names_.find(other.text(other.files_[shard.file]))) {
      place({here, number}, *file, shard.offset, shard.length);
    }
  }
}

void CheckpointIndex::add_path(std::string_view name, std::span<const PathPart> parts) {
  path_names_.add(name);
  path_parts_.insert(path_parts_.end(), parts.begin(), parts.end());
  path_begins_.push_back(path_parts_.size());
}

Result<> CheckpointIndex::rename(std::span<const std::string> names) {
  if (names.size() != entries_.size()) {
    return format_error(Errc::invalid_argument, std::to_string(names.size()) + " names for " +
                                                    std::to_string(entries_.size()) + " entries");
  }
  NameTable renamed;
  for (const std::string& name : names) {
    if (!renamed.add(name).second) {
      return format_error(Errc::invalid_argument, name + ": two entries would have this name");
    }
  }
  names_ = std::move(renamed);
  return {};
}

Result<CheckpointIndex> CheckpointIndex::of(const PickleValues& values) {
  return IndexBuilder(values).run();
}

}  // namespace torch_ckpt::index
