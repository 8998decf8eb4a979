#include "entries.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

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

constexpr std::size_t kMostDims = 64;
constexpr std::uint64_t kGap = 8;
constexpr std::size_t kMostRanges = 16;

std::string check_pickle(Bytes bytes) {
  const auto header = format::decode_tensor_pickle(bytes);
  if (!header) return {};
  if (header->dtype == nullptr) return "a tensor has no dtype";
  if (header->sizes.size() != header->strides.size() || header->sizes.size() > kMostDims) {
    return "a tensor's dimensions are none";
  }
  const std::string encoded = format::encode_tensor_pickle(*header);
  const auto again = format::decode_tensor_pickle(std::as_bytes(std::span(encoded)));
  if (!again || !(*again == *header)) return "a tensor is another after encoding and decoding";
  return {};
}

/// Reads the whole tensor into a row-major target of its own, as a load would.
std::string read_payload(Bytes record, const format::RecordIndex& index) {
  if (!inside(index.payload_offset, index.payload_bytes, record.size())) {
    return "a payload lies outside of its record";
  }
  const Bytes payload = record.subspan(index.payload_offset, index.payload_bytes);
  const format::TensorHeader& header = index.header;
  const std::size_t item = header.dtype->item_bytes;
  const bool plain = header.is_plain_row_major();
  std::uint64_t elements = 1;
  std::vector<std::int64_t> target_strides(header.sizes.size());
  for (std::size_t d = header.sizes.size(); d-- > 0;) {
    // More elements than items in the record overlap or are none; the loader asks for neither.
    target_strides[d] = static_cast<std::int64_t>(elements);
    const auto product = checked_mul(elements, header.sizes[d]);
    if (!product || *product > record.size()) return {};
    elements = *product;
  }
  const std::vector<std::uint64_t> offsets(header.sizes.size(), 0);
  const auto region = planning::Region::of_box(
      header.sizes, plain ? std::span<const std::uint64_t>() : std::span(header.strides), offsets,
      header.sizes, target_strides, item, item);
  if (!region) return plain ? "a row-major tensor cannot be read whole" : "";
  // Views into the middle of a storage are asked for by their offset; torch.save never writes one.
  if (region->covering().end > payload.size()) return "a region leaves its payload";
  std::uint64_t last = 0;
  for (const auto& range : region->ranges(kGap, kMostRanges)) {
    if (range.begin < last || range.end < range.begin || range.end > payload.size()) {
      return "ranges are out of order or outside";
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
  return copied == elements ? "" : "a region does not reach every element";
}

std::string check_record(Bytes bytes) {
  engine::RecordInMemory record(bytes);
  const auto archive = format::check_archive(record);
  if (!archive && archive.error().code != Errc::checksum_mismatch) {
    return "checking an archive fails with something else than a mismatch";
  }
  const auto index = format::index_record(record);
  return index ? read_payload(bytes, *index) : "";
}

std::string check_table(Bytes bytes, Bytes payload) {
  const auto table = format::ChecksumTable::decode(bytes);
  if (!table) return {};
  // Offsets lie at the begin of entries of 16 bytes, behind 8 bytes of head.
  std::size_t found = 0;
  std::vector<format::RecordSums> records;
  for (std::size_t i = 0; i < table->size(); ++i) {
    std::uint64_t offset = 0;
    for (std::size_t b = 0; b < 8; ++b) {
      offset |= static_cast<std::uint64_t>(bytes[8 + 16 * i + b]) << (8 * b);
    }
    const auto sums = table->find(offset);
    if (!sums || sums->offset != offset) return "a table does not find what it holds";
    records.push_back(*sums);
    found += sums->block_crcs.size();
    // What a payload longer or shorter than the blocks' does is the loader's to refuse.
    if (sums->block_bytes == 0) continue;
    const std::uint64_t blocks =
        payload.size() / sums->block_bytes + (payload.size() % sums->block_bytes != 0 ? 1 : 0);
    if (blocks != sums->block_crcs.size()) continue;
    auto check = engine::PayloadCheck::by_blocks(*sums, payload.size());
    static_cast<void>(check.take(0, payload));
  }
  if (found * 4 > bytes.size()) return "a table finds more blocks than it has room for";
  const std::string encoded = format::encode_checksum_table(records);
  if (!std::ranges::equal(std::as_bytes(std::span(encoded)), bytes)) {
    return "a table is another after decoding and encoding";
  }
  return {};
}

}  // namespace

std::string use_record(Bytes bytes) {
  if (auto broken = check_pickle(bytes); !broken.empty()) return broken;
  if (auto broken = check_record(bytes); !broken.empty()) return broken;
  if (auto broken = check_table(bytes, bytes); !broken.empty()) return broken;
  // No mutation finds a CRC-32, so that it is made right here.
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

/// What is wrong with an index that was made of a program.
std::string check_index(const index::CheckpointIndex& index) {
  std::uint32_t number = 0;
  for (const index::CheckpointIndex::Entry& entry : index.entries()) {
    if (index.find(index.name(number)) != number) return "an entry is not found by its name";
    ++number;
    if (entry.is_tensor && entry.dtype >= index.dtypes().size()) return "a tensor has no dtype";
    std::uint64_t elements = 0;
    for (const index::CheckpointIndex::Shard& shard : index.shards(entry)) {
      if (shard.file != index::CheckpointIndex::kNone && shard.file >= index.files().size()) {
        return "a shard lies in a file that is not there";
      }
      if (shard.offset + shard.length > std::uint64_t{1} << 63) return "a record has no end";
      if (!entry.is_tensor) continue;
      const auto whole = index.extents(entry.size);
      const auto offsets = index.extents(shard.offsets);
      const auto sizes = index.extents(shard.sizes);
      if (offsets.size() != whole.size() || sizes.size() != whole.size()) return "another rank";
      for (std::size_t d = 0; d < whole.size(); ++d) {
        if (offsets[d] < 0 || sizes[d] < 0 || sizes[d] > whole[d] - offsets[d]) {
          return "a shard lies outside of its tensor";
        }
      }
      elements += elements_of(sizes);
    }
    if (entry.is_tensor && elements > elements_of(index.extents(entry.size))) {
      return "shards have too much";
    }
  }
  return {};
}

}  // namespace

std::string use_metadata(Bytes bytes) {
  const auto values = index::walk_metadata_pickle(bytes, stock_globals());
  if (!values) {
    return name(values.error().code).starts_with("pickle_") ? "" : "a refusal has another's code";
  }
  const std::size_t end = values->end;
  if (end == 0 || end > bytes.size() || bytes[end - 1] != std::byte{'.'}) {
    return "a program does not end with STOP";
  }
  const auto again = index::walk_metadata_pickle(bytes.first(end), stock_globals());
  if (!again || again->end != end) return "what follows STOP makes a difference";
  if (index::walk_metadata_pickle(bytes.first(end - 1), stock_globals())) {
    return "a program is accepted without its STOP";
  }
  const auto made = index::CheckpointIndex::of(*values);
  if (made) return check_index(*made);
  const Errc code = made.error().code;
  return code == Errc::metadata_inconsistent || code == Errc::outside_directory
             ? ""
             : "what cannot be has another's code";
}

}  // namespace torch_ckpt::test
