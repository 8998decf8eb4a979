#include "engine/record_delivery.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <tuple>
#include <utility>

#include "engine/record_reader.h"

namespace torch_ckpt::engine {
namespace {

// Compares an archive's tensor with the request. Returns `done` if its payload can be delivered.
Result<ReadStatus> check_header(const ReadRequest& request, const format::RecordIndex& index) {
  // If a planner's transform_object casts a tensor, the stored dtype differs from the metadata.
  // Stock torch converts such a tensor when loading it.
  if (index.header.dtype != request.dtype) return ReadStatus::unknown_record;
  if (index.header.sizes != request.sizes) {
    return tensor_mismatch(shape_text(index.header.sizes), shape_text(request.sizes));
  }
  if (request.kind == ReadKind::tensor) {
    const bool as_asked = request.layout == nullptr ? index.header.is_plain_row_major()
                                                    : index.header == *request.layout;
    if (!as_asked) return ReadStatus::other_layout;
  }
  if (request.region.covering().end > index.payload_bytes) {
    return format_error(Errc::tensor_mismatch,
                        "the record has a payload of " + std::to_string(index.payload_bytes) +
                            " bytes, but the requested region ends at byte " +
                            std::to_string(request.region.covering().end));
  }
  return ReadStatus::done;
}

bool have_same_record(const ReadRequest& a, const ReadRequest& b) {
  return a.kind == b.kind && a.file == b.file && a.offset == b.offset && a.length == b.length &&
         a.dtype == b.dtype && a.sizes == b.sizes && a.layout == b.layout;
}

// True if the region is copied to the target in the pass that checksums it.
bool reads_in_place(const ReadRequest& request) {
  return request.target.device == staging::Source::kHost && !request.target.convert &&
         request.region.is_one_run();
}

}  // namespace

std::uint64_t payload_bytes_of(const ReadRequest& request) {
  if (is_all_payload(request.kind)) return request.length;
  if (request.kind == ReadKind::storage) return request.region.covering().end;
  if (request.layout != nullptr) return request.layout->storage_bytes;
  std::uint64_t bytes = request.dtype->item_bytes;
  for (const std::uint64_t size : request.sizes) bytes *= size;
  return bytes;
}

RecordDelivery::RecordDelivery(std::vector<ReadRequest> requests, bool verify)
    : requests_(std::move(requests)), verify_(verify), outcomes_(requests_.size()) {
  std::vector<std::size_t> order(requests_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tie(requests_[a].file, requests_[a].offset, requests_[a].kind) <
           std::tie(requests_[b].file, requests_[b].offset, requests_[b].kind);
  });
  records_.reserve(requests_.size());
  for (const std::size_t index : order) {
    if (records_.empty() || !have_same_record(first(records_.back()), requests_[index])) {
      records_.emplace_back();
    }
    records_.back().requests.push_back(index);
  }
}

void RecordDelivery::set_checksums(
    const std::vector<std::optional<format::ChecksumTable>>& tables) {
  for (Record& record : records_) {
    // An empty record has the same offset as the next record, and would get that record's
    // checksums.
    if (const auto& table = tables[first(record).file]; table && first(record).length > 0) {
      record.sums = table->find(first(record).offset);
    }
  }
}

std::vector<planning::WantedRecord> RecordDelivery::wanted() const {
  std::vector<planning::WantedRecord> wanted;
  wanted.reserve(records_.size());
  for (const Record& record : records_) {
    const ReadRequest& any = first(record);
    const format::RecordSums* sums = blocks(record);
    planning::WantedPayload payload;
    payload.block_bytes = sums != nullptr ? sums->block_bytes : 0;
    for (const std::size_t index : record.requests) {
      const ReadRequest& request = requests_[index];
      payload.bytes = std::max(payload.bytes, payload_bytes_of(request));
      payload.is_whole |= request.reads_entire_payload;
      payload.regions.push_back(&request.region);
    }
    wanted.push_back({any.file, any.offset, any.length, planning::ranges_of(payload)});
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
  for (const std::size_t index : record.requests) outcomes_[index].status = status;
}

Result<ReadStatus> RecordDelivery::check_headers(const Record& record,
                                                 const format::RecordIndex& archive) {
  ReadStatus status = ReadStatus::done;
  for (const std::size_t index : record.requests) {
    auto checked = check_header(requests_[index], archive);
    if (!checked) return checked;
    status = *checked;
    if (status == ReadStatus::other_layout) outcomes_[index].header = archive.header;
  }
  return status;
}

Result<Payload> RecordDelivery::open(std::size_t number, format::RecordBytes& bytes) {
  const Record& record = records_[number];
  const ReadRequest& request = first(record);
  Payload payload;
  if (is_all_payload(request.kind)) {
    payload.bytes = request.length;
    for (const std::size_t index : record.requests) {
      if (requests_[index].region.covering().end <= request.length) continue;
      return format_error(Errc::range_past_end,
                          "the record has " + std::to_string(request.length) +
                              " bytes, but the requested range ends at byte " +
                              std::to_string(requests_[index].region.covering().end));
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
  const ReadRequest& request = first(record);
  const bool in_place = record.requests.size() == 1 && reads_in_place(request);
  auto intact =
      in_place ? consume_in_place(request, position, bytes, check) : check.update(position, bytes);
  if (!intact) {
    // The check's offset is relative to the payload.
    Error error = std::move(intact).error();
    error.offset += payload.offset;
    return error;
  }
  if (in_place) return {};
  for (const std::size_t index : record.requests) {
    const ReadRequest& wanted = requests_[index];
    auto delivered = scratch.deliver(wanted.region, wanted.target, position, bytes);
    if (!delivered) return delivered.error();
    bytes_done_ += *delivered;
  }
  return {};
}

// Copies and checksums the requested bytes in one pass, and only checksums the others.
Result<> RecordDelivery::consume_in_place(const ReadRequest& request, std::uint64_t position,
                                          std::span<const std::byte> bytes, PayloadCheck& check) {
  const planning::ByteRange run = request.region.covering();
  const std::uint64_t end = position + bytes.size();
  const std::uint64_t begin = std::clamp(run.begin, position, end);
  const std::uint64_t stop = std::clamp(run.end, begin, end);
  if (begin > position) {
    if (auto intact = check.update(position, bytes.first(begin - position)); !intact) return intact;
  }
  if (stop > begin) {
    auto intact = check.update(begin, bytes.subspan(begin - position, stop - begin),
                               request.target.address + (begin - run.begin));
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
    if (auto intact = check_raw(record, payload_bytes); !intact) return intact;
  }
  set_status(record, ReadStatus::done);
  return {};
}

// Checks a raw record that is an archive, such as an object. Does nothing if the record was not
// read entirely.
Result<> RecordDelivery::check_raw(const Record& record, std::span<const std::byte> payload) const {
  for (const std::size_t index : record.requests) {
    const ReadRequest& request = requests_[index];
    if (!payload.empty()) break;
    if (!reads_in_place(request) || request.region.bytes() != request.length) continue;
    payload = {request.target.address, request.length};
  }
  if (payload.empty()) return {};
  RecordInMemory archive(payload);
  return format::check_archive(archive);
}

void RecordDelivery::fail(std::size_t record, Error error) {
  if (first(records_[record]).kind == ReadKind::bare && error.code == Errc::checksum_mismatch) {
    // A program that changes the values of a safetensors file may write the same header.
    error.detail += ". If another program has changed the file, delete torch_ckpt.checksums.";
  }
  if (error.path.empty()) {
    // The decoder's offsets are relative to the record.
    const ReadRequest& request = first(records_[record]);
    if (error.offset == Error::kNoOffset) error.offset = 0;
    error.offset += request.offset;
    error.path = pipeline_->path(request.file);
  }
  pipeline_->fail({std::move(error), record});
}

}  // namespace torch_ckpt::engine
