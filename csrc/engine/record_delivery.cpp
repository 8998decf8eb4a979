#include "engine/record_delivery.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <tuple>
#include <utility>

#include "engine/record_reader.h"

namespace torch_ckpt::engine {
namespace {

// What the archive says against what is asked; `done` where the payload can be used as it lies.
Result<ReadStatus> check_header(const ReadRequest& request, const format::RecordIndex& index) {
  // A planner may store another dtype than the metadata says (a cast in its transform_object), and
  // stock torch converts it on the way in.
  if (index.header.dtype != request.dtype) return ReadStatus::unknown_record;
  if (index.header.sizes != request.sizes) {
    return format_error(Errc::tensor_mismatch,
                        "the record holds a tensor of another shape than the metadata says");
  }
  if (request.kind == ReadKind::tensor) {
    const bool as_asked = request.layout == nullptr ? index.header.is_plain_row_major()
                                                    : index.header == *request.layout;
    if (!as_asked) return ReadStatus::other_layout;
  }
  if (request.region.covering().end > index.payload_bytes) {
    return format_error(Errc::tensor_mismatch, "the record is shorter than the wanted region");
  }
  return ReadStatus::done;
}

bool of_one_record(const ReadRequest& a, const ReadRequest& b) {
  return a.kind == b.kind && a.file == b.file && a.offset == b.offset && a.length == b.length &&
         a.dtype == b.dtype && a.sizes == b.sizes && a.layout == b.layout;
}

// How many bytes the payload of what is asked has.
std::uint64_t payload_bytes_of(const ReadRequest& request) {
  if (request.kind == ReadKind::raw) return request.length;
  if (request.kind == ReadKind::storage) return request.region.covering().end;
  if (request.layout != nullptr) return request.layout->storage_bytes;
  std::uint64_t bytes = request.dtype->item_bytes;
  for (const std::uint64_t size : request.sizes) bytes *= size;
  return bytes;
}

// Whether the region is read straight into the target's memory.
bool is_straight(const ReadRequest& request) {
  return request.target.device == staging::Source::kHost && !request.target.convert &&
         request.region.is_one_run();
}

}  // namespace

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
    if (records_.empty() || !of_one_record(first(records_.back()), requests_[index])) {
      records_.emplace_back();
    }
    records_.back().requests.push_back(index);
  }
}

void RecordDelivery::set_checksums(
    const std::vector<std::optional<format::ChecksumTable>>& tables) {
  for (Record& record : records_) {
    // At the place of an item without bytes begins the next one, whose checksums these would be.
    if (const auto& table = tables[first(record).file]; table && first(record).length > 0) {
      record.sums = table->find(first(record).offset);
    }
  }
}

std::vector<planning::WantedRecord> RecordDelivery::wanted() const {
  std::vector<planning::WantedRecord> wanted;
  wanted.reserve(records_.size());
  for (const Record& record : records_) {
    const ReadRequest& of = first(record);
    const format::RecordSums* sums = blocks(record);
    planning::WantedPayload payload;
    payload.block_bytes = sums != nullptr ? sums->block_bytes : 0;
    for (const std::size_t index : record.requests) {
      const ReadRequest& request = requests_[index];
      payload.bytes = std::max(payload.bytes, payload_bytes_of(request));
      payload.is_whole |= request.whole;
      payload.regions.push_back(&request.region);
    }
    wanted.push_back({of.file, of.offset, of.length, planning::ranges_of(payload)});
  }
  return wanted;
}

std::uint64_t RecordDelivery::block_bytes() const {
  std::uint64_t most = 0;
  for (const Record& record : records_) {
    if (const auto* sums = blocks(record)) most = std::max(most, sums->block_bytes);
  }
  return most;
}

void RecordDelivery::set_status(const Record& record, ReadStatus status) {
  for (const std::size_t index : record.requests) outcomes_[index].status = status;
}

Result<ReadStatus> RecordDelivery::check_headers(const Record& record,
                                                 const format::RecordIndex& archive) {
  ReadStatus status = ReadStatus::done;
  for (const std::size_t index : record.requests) {
    auto found = check_header(requests_[index], archive);
    if (!found) return found;
    status = *found;
    if (status == ReadStatus::other_layout) outcomes_[index].header = archive.header;
  }
  return status;
}

// Decodes the archive around a payload and checks it.
Result<Payload> RecordDelivery::open(std::size_t number, format::RecordBytes& bytes) {
  const Record& record = records_[number];
  const ReadRequest& request = first(record);
  Payload payload;
  if (request.kind == ReadKind::raw) {
    payload.bytes = request.length;
    for (const std::size_t index : record.requests) {
      if (requests_[index].region.covering().end <= request.length) continue;
      return format_error(Errc::range_past_end, "the record is shorter than the wanted range");
    }
  } else {
    const bool is_ours = record.sums && !record.sums->raw;
    auto archive = format::index_record(bytes);
    if (!archive) {
      if (archive.error().code != Errc::pickle_unknown) return archive.error();
      if (is_ours) {
        // Of a tensor that the engine wrote, which it would know.
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
    if (verify_ && is_known(archive->payload_crc, payload.bytes)) {
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
                        "the metadata has the checksums of a record of another size");
  }
  return payload;
}

std::span<std::byte> RecordDelivery::place(std::size_t number, std::uint64_t position,
                                           std::uint64_t& bytes) {
  const Record& record = records_[number];
  const ReadRequest& request = first(record);
  if (record.requests.size() > 1 || !is_straight(request)) return {};
  const planning::ByteRange run = request.region.covering();
  if (position >= run.end) return {};
  bytes = std::min(bytes, (position < run.begin ? run.begin : run.end) - position);
  if (position < run.begin) return {};
  return {request.target.address + (position - run.begin), bytes};
}

Result<> RecordDelivery::take(std::size_t number, const Payload& payload, std::uint64_t position,
                              std::span<const std::byte> bytes, PayloadCheck& check,
                              Scratch* scratch) {
  if (auto intact = check.take(position, bytes); !intact) {
    // A check counts from the payload's begin.
    Error error = std::move(intact).error();
    error.offset += payload.offset;
    return error;
  }
  if (scratch == nullptr) {
    bytes_done_ += bytes.size();
    return {};
  }
  for (const std::size_t index : records_[number].requests) {
    const ReadRequest& request = requests_[index];
    auto delivered = scratch->deliver(request.region, request.target, position, bytes);
    if (!delivered) return delivered.error();
    bytes_done_ += *delivered;
  }
  return {};
}

Result<> RecordDelivery::end(std::size_t number, const Payload& payload,
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

// Objects: only a record that was read whole can be checked.
Result<> RecordDelivery::check_raw(const Record& record, std::span<const std::byte> payload) const {
  for (const std::size_t index : record.requests) {
    const ReadRequest& request = requests_[index];
    if (!payload.empty()) break;
    if (!is_straight(request) || request.region.bytes() != request.length) continue;
    payload = {request.target.address, request.length};
  }
  if (payload.empty()) return {};
  RecordInMemory archive(payload);
  return format::check_archive(archive);
}

void RecordDelivery::fail(std::size_t record, Error error) {
  if (error.path.empty()) {
    // The decoder counts from the record's begin.
    const ReadRequest& request = first(records_[record]);
    if (error.offset == Error::kNoOffset) error.offset = 0;
    error.offset += request.offset;
    error.path = pipeline_->path(request.file);
  }
  pipeline_->fail({std::move(error), record});
}

}  // namespace torch_ckpt::engine
