#include "entries.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "../cpp/failing_allocations.h"
#include "../cpp/stock_metadata.h"
#include "checked_math.h"
#include "engine/payload_check.h"
#include "engine/record_reader.h"
#include "format/checksum_table.h"
#include "format/crc32.h"
#include "format/record_index.h"
#include "format/tensor_pickle.h"
#include "index/checkpoint_index.h"
#include "index/metadata_pickle.h"
#include "planning/region.h"

namespace torch_ckpt::test {
namespace {

using Bytes = std::span<const std::byte>;

constexpr std::size_t kMaxDims = 64;
constexpr std::uint64_t kGap = 8;
constexpr std::size_t kMaxRanges = 16;

std::string check_pickle(Bytes bytes) {
  const auto header = format::decode_tensor_pickle(bytes);
  if (!header) return {};
  if (header->dtype == nullptr) return "a tensor has no dtype";
  if (header->sizes.size() != header->strides.size() || header->sizes.size() > kMaxDims) {
    return "a tensor has invalid dimensions";
  }
  const std::string encoded = format::encode_tensor_pickle(*header);
  const auto again = format::decode_tensor_pickle(std::as_bytes(std::span(encoded)));
  if (!again || !(*again == *header)) return "a tensor does not survive a round trip";
  return {};
}

/// Reads the entire tensor into a new row-major target, as a load would.
std::string read_payload(Bytes record, const format::RecordIndex& index) {
  if (!inside(index.payload_offset, index.payload_bytes, record.size())) {
    return "a payload is outside of its record";
  }
  const Bytes payload = record.subspan(index.payload_offset, index.payload_bytes);
  const format::TensorHeader& header = index.header;
  const std::size_t item = header.dtype->item_bytes;
  const bool plain = header.is_plain_row_major();
  std::uint64_t elements = 1;
  std::vector<std::int64_t> target_strides(header.sizes.size());
  for (std::size_t d = header.sizes.size(); d-- > 0;) {
    // If there are more elements than the record has bytes, they overlap. No load reads these.
    target_strides[d] = static_cast<std::int64_t>(elements);
    const auto product = checked_mul(elements, header.sizes[d]);
    if (!product || *product > record.size()) return {};
    elements = *product;
  }
  const std::vector<std::uint64_t> offsets(header.sizes.size(), 0);
  const auto region = planning::Region::of_box(
      header.sizes, plain ? std::span<const std::uint64_t>() : std::span(header.strides), offsets,
      header.sizes, target_strides, item, item);
  if (!region) return plain ? "a row-major tensor has no region" : "";
  if (region->covering().end > payload.size()) return "a region is not inside its payload";
  std::uint64_t last = 0;
  for (const auto& range : region->ranges(kGap, kMaxRanges)) {
    if (range.begin < last || range.end < range.begin || range.end > payload.size()) {
      return "ranges are out of order or outside of the payload";
    }
    last = range.end;
  }
  std::vector<std::byte> target(elements * item);
  std::uint64_t copied = 0;
  region->for_each_run(region->covering(), [&](const planning::Region::Run& run) {
    for (std::uint64_t i = 0; i < run.count; ++i) {
      std::copy_n(&payload[run.stored + i * run.stored_stride], item,
                  &target[static_cast<std::size_t>(run.target) +
                          i * static_cast<std::size_t>(run.target_stride)]);
      ++copied;
    }
  });
  return copied == elements ? "" : "a region does not contain all elements";
}

std::string check_record(Bytes bytes) {
  engine::RecordInMemory record(bytes);
  const auto archive = format::check_archive(record);
  if (!archive && archive.error().code != Errc::checksum_mismatch) {
    return "check_archive() fails with another code than checksum_mismatch";
  }
  const auto index = format::index_record(record);
  return index ? read_payload(bytes, *index) : "";
}

std::string check_table(Bytes bytes, Bytes payload) {
  const auto table = format::ChecksumTable::decode(bytes);
  if (!table) return {};
  // An entry has 16 bytes and begins with the offset. The entries begin after a head of 8 bytes.
  std::size_t found = 0;
  std::vector<format::RecordSums> records;
  for (std::size_t i = 0; i < table->size(); ++i) {
    std::uint64_t offset = 0;
    for (std::size_t b = 0; b < 8; ++b) {
      offset |= static_cast<std::uint64_t>(bytes[8 + 16 * i + b]) << (8 * b);
    }
    const auto sums = table->find(offset);
    if (!sums || sums->offset != offset) return "a table does not find its own record";
    records.push_back(*sums);
    found += sums->block_crcs.size();
    // A load rejects a payload that does not have this number of blocks.
    if (sums->block_bytes == 0) continue;
    const std::uint64_t blocks =
        payload.size() / sums->block_bytes + (payload.size() % sums->block_bytes != 0 ? 1 : 0);
    if (blocks != sums->block_crcs.size()) continue;
    auto check = engine::PayloadCheck::by_blocks(*sums, payload.size());
    static_cast<void>(check.update(0, payload));
  }
  if (found * 4 > bytes.size()) return "a table has more blocks than fit into it";
  const std::string encoded = format::encode_checksum_table(records);
  if (!std::ranges::equal(std::as_bytes(std::span(encoded)), bytes)) {
    return "a table does not survive a round trip";
  }
  return {};
}

}  // namespace

std::string use_record(Bytes bytes) {
  if (auto broken = check_pickle(bytes); !broken.empty()) return broken;
  if (auto broken = check_record(bytes); !broken.empty()) return broken;
  if (auto broken = check_table(bytes, bytes); !broken.empty()) return broken;
  // A mutation practically never has the right CRC-32, so try again with the right one appended.
  std::vector<std::byte> summed(bytes.begin(), bytes.end());
  const std::uint32_t crc = format::crc32(0, bytes);
  for (int shift = 0; shift < 32; shift += 8) {
    summed.push_back(static_cast<std::byte>((crc >> shift) & 0xff));
  }
  return check_table(summed, bytes);
}

namespace {

std::uint64_t elements_of(std::span<const std::int64_t> sizes) {
  std::uint64_t elements = 1;
  for (const std::int64_t size : sizes) elements *= static_cast<std::uint64_t>(size);
  return elements;
}

/// Checks that storage_data has the location of each shard under the name of its entry.
std::string check_locations(const index::MetadataPickle& pickle,
                            const index::CheckpointIndex& index) {
  const index::PickleValues& values = pickle.values;
  const index::TorchRecords& records = pickle.records;
  using Location = std::tuple<std::uint64_t, std::uint64_t, std::string_view>;
  std::set<std::pair<std::uint32_t, Location>> known;
  const auto stored = values.attribute(values.objects[values.root.number()], "storage_data");
  const index::Object* dict = stored ? values.object(*stored, index::ObjectKind::dict) : nullptr;
  if (dict != nullptr) {
    values.for_each_pair(*dict, [&](const index::Value& key, const index::Value& value) {
      const auto& name = records.keys[values.objects[key.number()].first].name;
      const auto& info = records.storage_infos[values.objects[value.number()].first];
      if (const auto entry = index.find(values.text(name))) {
        known.insert({*entry, {info.offset.payload, info.length.payload, values.text(info.file)}});
      }
    });
  }
  std::uint32_t number = 0;
  for (const index::CheckpointIndex::Entry& entry : index.entries()) {
    for (const index::CheckpointIndex::Shard& shard : index.shards(entry)) {
      if (shard.file == index::CheckpointIndex::kNone) continue;
      const Location location{shard.offset, shard.length, index.text(index.files()[shard.file])};
      if (!known.contains({number, location})) return "a shard has the location of another name";
    }
    ++number;
  }
  return {};
}

std::string check_index(const index::CheckpointIndex& index) {
  std::uint32_t number = 0;
  for (const index::CheckpointIndex::Entry& entry : index.entries()) {
    if (index.find(index.name(number)) != number) return "an entry is not found by its name";
    ++number;
    if (entry.is_tensor && entry.dtype >= index.dtypes().size()) return "a tensor has no dtype";
    std::uint64_t elements = 0;
    for (const index::CheckpointIndex::Shard& shard : index.shards(entry)) {
      if (shard.file != index::CheckpointIndex::kNone && shard.file >= index.files().size()) {
        return "a shard is in a file that does not exist";
      }
      if (shard.offset + shard.length > std::uint64_t{1} << 63) return "a record ends past 2^63";
      if (!entry.is_tensor) continue;
      const auto whole = index.extents(entry.size);
      const auto offsets = index.extents(shard.offsets);
      const auto sizes = index.extents(shard.sizes);
      if (offsets.size() != whole.size() || sizes.size() != whole.size()) {
        return "a shard has another number of dimensions than its tensor";
      }
      for (std::size_t d = 0; d < whole.size(); ++d) {
        if (offsets[d] < 0 || sizes[d] < 0 || sizes[d] > whole[d] - offsets[d]) {
          return "a shard is outside of its tensor";
        }
      }
      elements += elements_of(sizes);
    }
    if (entry.is_tensor && elements > elements_of(index.extents(entry.size))) {
      return "shards have more elements than their tensor";
    }
  }
  return {};
}

}  // namespace

std::string use_metadata(Bytes bytes) {
  const auto pickle = index::walk_metadata_pickle(bytes, stock_globals());
  if (!pickle) {
    return name(pickle.error().code).starts_with("pickle_") ? "" : "an error has the wrong code";
  }
  const std::size_t end = pickle->values.end;
  if (end == 0 || end > bytes.size() || bytes[end - 1] != std::byte{'.'}) {
    return "a program does not end with STOP";
  }
  const auto again = index::walk_metadata_pickle(bytes.first(end), stock_globals());
  if (!again || again->values.end != end) return "bytes after STOP make a difference";
  if (index::walk_metadata_pickle(bytes.first(end - 1), stock_globals())) {
    return "a program is accepted without its STOP";
  }
  const auto made = index::CheckpointIndex::build(*pickle);
  if (made) {
    auto broken = check_index(*made);
    return broken.empty() ? check_locations(*pickle, *made) : broken;
  }
  const Errc code = made.error().code;
  return code == Errc::metadata_inconsistent || code == Errc::outside_directory
             ? ""
             : "inconsistent metadata has the wrong code";
}

namespace {

std::uint64_t steps = 0;

using index::ObjectKind;
using index::PickleValues;
using index::Value;
using index::ValueKind;

/// Counts the steps of torch's set_element, and the items of the lists that it creates for paths.
class ListsOfPaths {
 public:
  explicit ListsOfPaths(const PickleValues& values) : values_(values) {}

  /// Checks that both are in proportion to the program.
  std::string check() {
    const index::Object& root = values_.objects[values_.root.number()];
    const auto paths = values_.attribute(root, "planner_data");
    const index::Object* dict = paths ? values_.object(*paths, ObjectKind::dict) : nullptr;
    if (dict == nullptr) return {};
    const std::uint64_t limit = values_.bytes.size() + (std::uint64_t{1} << 16);
    values_.for_each_pair(*dict, [&](const Value&, const Value& path) {
      std::uint32_t at = 0;
      const auto step = [&](const Value& part) {
        if (++walked_ <= limit) at = descend(at, part);
      };
      if (path.kind == ValueKind::tuple) {
        for (const Value& part : values_.tuple(path)) step(part);
      } else if (path.kind == ValueKind::extents) {
        for (const std::int64_t part : values_.extents.at(path.number())) {
          Value number;
          number.kind = ValueKind::integer;
          number.payload = static_cast<std::uint64_t>(part);
          step(number);
        }
      } else if (const index::Object* list = values_.object(path, ObjectKind::list)) {
        values_.for_each(*list, step);
      }
    });
    if (walked_ > limit) return "paths have more parts than the metadata has bytes";
    double items = 0;
    for (const double end : ends_) items += end;
    return items > static_cast<double>(limit) ? "paths create long lists" : "";
  }

 private:
  /// Returns the container that the part leads to, and extends the list to the part's index.
  std::uint32_t descend(std::uint32_t at, const Value& part) {
    double index = -1;
    if (part.kind == ValueKind::small_integer || part.kind == ValueKind::integer) {
      index = static_cast<double>(part.integer());
    } else if (part.kind == ValueKind::real) {
      index = part.real();
    }
    ends_[at] = std::max(ends_[at], std::ceil(index) + 1);
    const std::string key =
        part.kind == ValueKind::text
            ? "t" + std::string(values_.text(part))
            : std::to_string(static_cast<int>(part.kind)) + " " + std::to_string(part.payload);
    const auto [known, is_new] =
        children_.try_emplace({at, key}, static_cast<std::uint32_t>(ends_.size()));
    if (is_new) ends_.push_back(0);
    return known->second;
  }

  const PickleValues& values_;
  std::map<std::pair<std::uint32_t, std::string>, std::uint32_t> children_;
  std::vector<double> ends_{0};
  std::uint64_t walked_ = 0;
};

}  // namespace

Cost cost_of_metadata(Bytes bytes) {
  static_cast<void>(stock_globals());
  Cost cost;
  const HeapMeter heap;
  steps = 0;
  if (const auto pickle = index::walk_metadata_pickle(bytes, stock_globals())) {
    cost.is_accepted = index::CheckpointIndex::build(*pickle).has_value();
  }
  cost.steps = steps;
  cost.heap_bytes = heap.most();
  return cost;
}

std::string use_metadata_within_cost(Bytes bytes) {
  const Cost cost = cost_of_metadata(bytes);
  if (cost.heap_bytes > kFixedHeapBytes + kHeapBytesPerByte * bytes.size()) {
    return std::to_string(bytes.size()) + " bytes of metadata need " +
           std::to_string(cost.heap_bytes) + " bytes of memory";
  }
  if (cost.steps > kFixedSteps + kStepsPerByte * bytes.size()) {
    return std::to_string(bytes.size()) + " bytes of metadata need " + std::to_string(cost.steps) +
           " steps";
  }
  if (cost.is_accepted) {
    auto broken = ListsOfPaths(index::walk_metadata_pickle(bytes, stock_globals())->values).check();
    if (!broken.empty()) return broken;
  }
  return use_metadata(bytes);
}

}  // namespace torch_ckpt::test

// Called for each basic block of sources that are compiled with -fsanitize-coverage=trace-pc. Weak,
// since libFuzzer defines it too; steps are not counted then.
extern "C" __attribute__((weak)) void __sanitizer_cov_trace_pc();
extern "C" void __sanitizer_cov_trace_pc() { ++torch_ckpt::test::steps; }
