#include "engine/record_delivery.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <tuple>
#include <utility>

#include "engine/record_reader.h"

namespace torch_ckpt::engine {
namespace {

// Compares an archive's tensor with the metadata. Returns `done` if its payload can be delivered.
Result<ReadStatus> check_header(const RegionRead& read, const format::RecordIndex& index) {
  // If a planner's transform_object casts a tensor, the stored dtype differs from the metadata.
  // Stock torch converts such a tensor when loading it.
  if (index.header.dtype != read.record->dtype) return ReadStatus::unknown_record;
  if (index.header.sizes != read.record->sizes) {
    return tensor_mismatch(shape_text(index.header.sizes), shape_text(read.record->sizes));
  }
  if (read.kind == ReadKind::tensor) {
    const bool as_asked =
        read.layout == nullptr ? index.header.is_plain_row_major() : index.header == *read.layout;
    if (!as_asked) return ReadStatus::other_layout;
  }
  if (read.region.covering().end > index.payload_bytes) {
    return format_error(Errc::tensor_mismatch,
                        "the record has a payload of " + std::to_string(index.payload_bytes) +
                            " bytes, but the requested region ends at byte " +
                            std::to_string(read.region.covering().end));
  }
  return ReadStatus::done;
}

bool have_same_record(const RegionRead& a, const RegionRead& b) {
  const planning::StoredRecord& left = *a.record;
  const planning::StoredRecord& right = *b.record;
  return a.kind == b.kind && left.file == right.file && left.offset == right.offset &&
         left.length == right.length && left.dtype == right.dtype && left.sizes == right.sizes &&
         a.layout == b.layout;
}

// True if the region is copied to the target in the pass that checksums it.
bool reads_in_place(const RegionRead& read) {
  return read.target.device == staging::Source::kHost && !read.target.convert &&
         read.region.is_one_run();
}

}  // namespace

RecordDelivery::RecordDelivery(std::vector<RegionRead> reads, bool verify)
    : reads_(std::move(reads)), verify_(verify), outcomes_(reads_.size()) {
  std::vector<std::size_t> order(reads_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tie(reads_[a].record->file, reads_[a].record->offset, reads_[a].kind) <
           std::tie(reads_[b].record->file, reads_[b].record->offset, reads_[b].kind);
  });
  records_.reserve(reads_.size());
  for (const std::size_t index : order) {
    if (records_.empty() || !have_same_record(first(records_.back()), reads_[index])) {
      records_.emplace_back();
    }
    records_.back().reads.push_back(index);
  }
}

void RecordDelivery::set_checksums(
    const std::vector<std::optional<format::ChecksumTable>>& tables) {
  for (Record& record : records_) {
    // An empty record has the same offset as the next record, and would get that record's
    // checksums.
    const planning::StoredRecord& stored = *first(record).record;
    if (const auto& table = tables[stored.file]; table && stored.length > 0) {
      record.sums = table->find(stored.offset);
    }
  }
}

std::vector<planning::WantedRecord> RecordDelivery::wanted() const {
  std::vector<planning::WantedRecord> wanted;
  wanted.reserve(records_.size());
  for (const Record& record : records_) {
    const format::RecordSums* sums = blocks(record);
    planning::WantedPayload payload;
    payload.block_bytes = sums != nullptr ? sums->block_bytes : 0;
    for (const std::size_t index : record.reads) {
      const RegionRead& read = reads_[index];
      payload.bytes = std::max(payload.bytes, read.payload_bytes());
      payload.is_whole |= read.reads_entire_payload;
      payload.regions.push_back(&read.region);
    }
    wanted.push_back({first(record).record, planning::ranges_of(payload)});
  }
  return wanted;
}

std::uint64_t RecordDelivery::block_bytes() const {
  std::uint64_t largest = 0;
  for (const Record& record : records_) {
    if (const auto* sums = blocks(record)) largest = std::max(largest, sums->block_bytes);
  }
  return largest;
}

void RecordDelivery::set_status(const Record& record, ReadStatus status) {
  for (const std::size_t index : record.reads) outcomes_[index].status = status;
}

Result<ReadStatus> RecordDelivery::check_headers(const Record& record,
                                                 const format::RecordIndex& archive) {
  ReadStatus status = ReadStatus::done;
  for (const std::size_t index : record.reads) {
    auto checked = check_header(reads_[index], archive);
    if (!checked) return checked;
    status = *checked;
    if (status == ReadStatus::other_layout) outcomes_[index].header = archive.header;
  }
  return status;
}

Result<Payload> RecordDelivery::open(std::size_t number, format::RecordBytes& bytes) {
  const Record& record = records_[number];
  const RegionRead& read = first(record);
  Payload payload;
  if (read.is_all_payload()) {
    payload.bytes = read.record->length;
    for (const std::size_t index : record.reads) {
      if (reads_[index].region.covering().end <= read.record->length) continue;
      return format_error(Errc::range_past_end,
                          "the record has " + std::to_string(read.record->length) +
                              " bytes, but the requested range ends at byte " +
                              std::to_string(reads_[index].region.covering().end));
    }
  } else {
    // True if the checksum table shows that the engine wrote this archive.
    const bool is_ours = record.sums && !record.sums->raw;
    auto archive = format::index_record(bytes);
    if (!archive) {
      if (archive.error().code != Errc::pickle_unknown) return archive.error();
      if (is_ours) {
        // The decoder handles every archive that the engine writes, so an unknown one is damaged.
        return format_error(Errc::checksum_mismatch,
                            "the archive is damaged: " + archive.error().detail);
      }
      set_status(record, ReadStatus::unknown_record);
      return payload;
    }
    payload.offset = archive->payload_offset;
    payload.bytes = archive->payload_bytes;
    if (is_ours) {
      auto intact = check_envelope(*record.sums, bytes, payload.offset, payload.bytes);
      if (!intact) return intact.error();
    }
    auto status = check_headers(record, *archive);
    if (!status) return status.error();
    if (*status != ReadStatus::done) {
      set_status(record, *status);
      return payload;
    }
    if (verify_ && has_checksum(archive->payload_crc, payload.bytes)) {
      payload.crc = archive->payload_crc;
    }
  }
  payload.is_read = true;
  payload.blocks = blocks(record);
  if (payload.blocks == nullptr) return payload;
  payload.crc.reset();
  const std::uint64_t block_bytes = payload.blocks->block_bytes;
  if (payload.blocks->block_crcs.size() != (payload.bytes + block_bytes - 1) / block_bytes) {
    return format_error(Errc::checksum_mismatch,
                        "the metadata's checksums are for a record of a different size");
  }
  return payload;
}

Result<> RecordDelivery::consume(std::size_t number, const Payload& payload, std::uint64_t position,
                                 std::span<const std::byte> bytes, PayloadCheck& check,
                                 Scratch& scratch) {
  const Record& record = records_[number];
  const RegionRead& read = first(record);
  const bool in_place = record.reads.size() == 1 && reads_in_place(read);
  auto intact =
      in_place ? consume_in_place(read, position, bytes, check) : check.update(position, bytes);
  if (!intact) {
    // The check's offset is relative to the payload.
    Error error = std::move(intact).error();
    error.offset += payload.offset;
    return error;
  }
  if (in_place) return {};
  for (const std::size_t index : record.reads) {
    const RegionRead& wanted = reads_[index];
    auto delivered = scratch.deliver(wanted.region, wanted.target, position, bytes);
    if (!delivered) return delivered.error();
    bytes_done_ += *delivered;
  }
  return {};
}

// Copies and checksums the requested bytes in one pass, and only checksums the others.
Result<> RecordDelivery::consume_in_place(const RegionRead& read, std::uint64_t position,
                                          std::span<const std::byte> bytes, PayloadCheck& check) {
  const planning::ByteRange run = read.region.covering();
  const std::uint64_t end = position + bytes.size();
  const std::uint64_t begin = std::clamp(run.begin, position, end);
  const std::uint64_t stop = std::clamp(run.end, begin, end);
  if (begin > position) {
    TC_TRY(check.update(position, bytes.first(begin - position)));
  }
  if (stop > begin) {
    auto intact = check.update(begin, bytes.subspan(begin - position, stop - begin),
                               read.target.address + (begin - run.begin));
    if (!intact) return intact;
    bytes_done_ += stop - begin;
  }
  return stop < end ? check.update(stop, bytes.subspan(stop - position)) : Result<>();
}

Result<> RecordDelivery::finish(std::size_t number, const Payload& payload,
                                std::optional<std::uint32_t> crc,
                                std::span<const std::byte> payload_bytes) {
  const Record& record = records_[number];
  if (crc && *crc != *payload.crc) return checksum_error(*payload.crc, *crc, "the archive");
  if (verify_ && payload.blocks == nullptr && first(record).kind == ReadKind::raw) {
    TC_TRY(check_raw(record, payload_bytes));
  }
  set_status(record, ReadStatus::done);
  return {};
}

// Checks a raw record that is an archive, such as an object. Does nothing if the record was not
// read entirely.
Result<> RecordDelivery::check_raw(const Record& record, std::span<const std::byte> payload) const {
  for (const std::size_t index : record.reads) {
    const RegionRead& read = reads_[index];
    if (!payload.empty()) break;
    if (!reads_in_place(read) || read.region.bytes() != read.record->length) continue;
    payload = {read.target.address, read.record->length};
  }
  if (payload.empty()) return {};
  RecordInMemory archive(payload);
  return format::check_archive(archive);
}

void RecordDelivery::fail(std::size_t record, Error error) {
  const RegionRead& read = first(records_[record]);
  if (read.kind == ReadKind::bare && error.code == Errc::checksum_mismatch) {
    // A program that changes the values of a safetensors file may write the same header.
    error.detail += ". If another program has changed the file, delete torch_ckpt.checksums.";
  }
  if (error.path.empty()) {
    // The decoder's offsets are relative to the record.
    if (error.offset == Error::kNoOffset) error.offset = 0;
    error.offset += read.record->offset;
    error.path = pipeline_->path(read.record->file);
  }
  error.subject = read.record->name;
  pipeline_->fail(std::move(error));
}

}  // namespace torch_ckpt::engine
