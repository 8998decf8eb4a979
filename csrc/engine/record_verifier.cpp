#include "engine/record_verifier.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "checked_math.h"

namespace torch_ckpt::engine {
namespace {

constexpr std::string_view kPayloadEntry = "data/0";

// True if `next` concerns the bytes directly after the bytes of `before`.
bool continues(const Finding& before, const Finding& next) {
  return before.record == next.record && before.file == next.file && before.bytes > 0 &&
         next.bytes > 0 && before.error.offset + before.bytes == next.error.offset &&
         before.error.code == next.error.code;
}

}  // namespace

RecordVerifier::RecordVerifier(const std::vector<LoadFile>& files,
                               std::vector<planning::StoredRecord> records,
                               std::function<void(Error)> on_read_error)
    : on_read_error_(std::move(on_read_error)) {
  std::vector<std::optional<format::ChecksumTable>> tables(files.size());
  for (std::size_t file = 0; file < files.size(); ++file) {
    auto table = checksum_table_of(files[file]);
    if (table) {
      tables[file] = std::move(*table);
    } else {
      findings_.push_back({file, Finding::kWholeFile, 0, table.error()});
    }
  }
  records_.reserve(records.size());
  for (std::size_t number = 0; number < records.size(); ++number) {
    planning::StoredRecord& stored = records[number];
    if (!checked_add(stored.offset, stored.length)) {
      Error error = format_error(Errc::range_past_end,
                                 "the metadata lists a record of " + std::to_string(stored.length) +
                                     " bytes, which ends beyond the maximum file size",
                                 stored.offset);
      findings_.push_back({stored.file, number, 0, std::move(error)});
      continue;
    }
    const bool is_bare = files[stored.file].is_bare;
    Record record{number, std::move(stored), std::nullopt, is_bare};
    // An empty record has the same offset as the next record, and would get that record's
    // checksums.
    if (const auto& table = tables[record.stored.file]; table && record.stored.length > 0) {
      record.sums = table->find(record.stored.offset);
    }
    records_.push_back(std::move(record));
  }
}

std::vector<planning::WantedRecord> RecordVerifier::wanted() const {
  std::vector<planning::WantedRecord> wanted;
  wanted.reserve(records_.size());
  for (const auto& [number, stored, sums, is_bare] : records_) {
    // Ranges are relative to the payload, whose offset is not known yet. The pipeline ignores the
    // part of a range beyond the payload's end.
    wanted.push_back({&stored, {{0, stored.length}}});
  }
  return wanted;
}

std::uint64_t RecordVerifier::block_bytes() const {
  std::uint64_t largest = 0;
  for (const Record& record : records_) {
    if (record.sums) largest = std::max(largest, record.sums->block_bytes);
  }
  return largest;
}

Result<Payload> RecordVerifier::open(std::size_t record, format::RecordBytes& bytes) {
  const auto& [number, stored, sums, is_bare] = records_[record];
  const bool raw = is_bare || (sums && sums->raw);
  Payload payload;
  if (!stored.is_tensor && !sums) {
    check_entries(record, bytes, {});
    return payload;
  }
  std::uint32_t crc = 0;
  if (raw) {
    payload.bytes = stored.length;
  } else {
    auto archive = format::index_record(bytes);
    if (!archive) {
      if (archive.error().code == Errc::pickle_unknown && !sums) {
        // Only torch.load can read this, e.g. a quantized tensor or a tensor subclass.
        check_entries(record, bytes, {});
      } else {
        add_finding(record, archive.error());
      }
      return payload;
    }
    payload.offset = archive->payload_offset;
    payload.bytes = archive->payload_bytes;
    crc = archive->payload_crc;
    if (sums) {
      auto intact = check_envelope(*sums, bytes, payload.offset, payload.bytes);
      if (!intact) add_finding(record, intact.error());
    } else {
      check_entries(record, bytes, kPayloadEntry);
    }
    if (stored.is_tensor) check_header(record, archive->header);
  }
  if (const format::RecordSums* blocks = block_sums(sums, raw)) {
    const std::uint64_t count = divide_up(payload.bytes, blocks->block_bytes);
    payload.is_read = count == blocks->block_crcs.size();
    payload.blocks = blocks;
    if (payload.is_read) return payload;
    add_finding(record,
                format_error(Errc::checksum_mismatch,
                             "the metadata's checksums are for a record of a different size"));
  } else if (raw) {
    // An empty record needs no blocks.
    if (payload.bytes > 0) add_unverifiable(record);
  } else if (sums || has_checksum(crc, payload.bytes)) {
    payload.is_read = true;
    payload.crc = crc;
  } else {
    add_unverifiable(record);
  }
  return payload;
}

void RecordVerifier::check_header(std::size_t record, const format::TensorHeader& header) {
  const auto& [number, stored, sums, is_bare] = records_[record];
  if (header.sizes != stored.sizes) {
    add_finding(record, tensor_mismatch(shape_text(header.sizes), shape_text(stored.sizes)));
  }
  if (!sums && stored.dtype != nullptr && header.dtype != stored.dtype) {
    add_finding(record, tensor_mismatch("dtype " + std::string(header.dtype->name),
                                        "dtype " + std::string(stored.dtype->name)));
  }
}

void RecordVerifier::check_entries(std::size_t record, format::RecordBytes& bytes,
                                   std::string_view skip) {
  auto checked = format::check_entries(bytes, skip);
  if (!checked) {
    add_finding(record, checked.error());
  } else if (checked->without_crc > 0 || (!checked->is_archive && bytes.size() > 0)) {
    add_unverifiable(record);
  }
}

Result<> RecordVerifier::consume(std::size_t record, const Payload& payload, std::uint64_t position,
                                 std::span<const std::byte> bytes, PayloadCheck& check,
                                 Scratch& /*scratch*/) {
  if (payload.blocks == nullptr) return check.update(position, bytes);
  // Check one block at a time, because update() returns at the first damaged block.
  const std::uint64_t block_bytes = payload.blocks->block_bytes;
  while (!bytes.empty()) {
    const std::uint64_t begin = align_down(position, block_bytes);
    const std::uint64_t end = begin + std::min(block_bytes, payload.bytes - begin);
    const auto part = bytes.first(std::min<std::uint64_t>(bytes.size(), end - position));
    if (auto intact = check.update(position, part); !intact) {
      Error error = intact.error();
      error.offset += payload.offset;
      add_finding(record, std::move(error), end - begin);
    }
    position += part.size();
    bytes = bytes.subspan(part.size());
  }
  return {};
}

std::uint64_t RecordVerifier::skip(std::size_t record, const Payload& payload,
                                   planning::ByteRange range, const Error& error) {
  // Skip to the end of the block: its checksum can no longer be verified.
  if (payload.blocks != nullptr) {
    range.end = std::min(align_up(range.end, payload.blocks->block_bytes), payload.bytes);
  }
  add_finding(record, error, range.bytes());
  return range.bytes();
}

Result<> RecordVerifier::finish(std::size_t record, const Payload& payload,
                                std::optional<std::uint32_t> crc, std::span<const std::byte>) {
  if (crc && *crc != *payload.crc) {
    add_finding(record, checksum_error(*payload.crc, *crc, "the archive", payload.offset),
                payload.bytes);
  }
  return {};
}

void RecordVerifier::add_finding(std::size_t record, Error error, std::uint64_t bytes) {
  const auto& [number, stored, sums, is_bare] = records_[record];
  if (error.code == Errc::system || error.code == Errc::store) on_read_error_(error);
  // System errors have a path and an offset in the file. Decoder errors have an offset in the
  // record.
  if (error.path.empty()) {
    const std::uint64_t in_record = error.offset == Error::kNoOffset ? 0 : error.offset;
    error.offset = checked_add(stored.offset, in_record).value_or(stored.offset);
  } else if (error.offset == Error::kNoOffset) {
    error.offset = stored.offset;
  }
  const os::MutexLock lock(mutex_);
  findings_.push_back({stored.file, number, bytes, std::move(error)});
}

void RecordVerifier::add_unverifiable(std::size_t record) {
  const os::MutexLock lock(mutex_);
  unverifiable_.push_back(records_[record].number);
}

std::vector<Finding> RecordVerifier::findings() const {
  std::vector<Finding> sorted;
  {
    const os::MutexLock lock(mutex_);
    sorted = findings_;
  }
  std::stable_sort(sorted.begin(), sorted.end(), [](const Finding& a, const Finding& b) {
    return std::tie(a.file, a.error.offset, a.record) < std::tie(b.file, b.error.offset, b.record);
  });
  std::vector<Finding> merged;
  for (Finding& finding : sorted) {
    if (merged.empty() || !continues(merged.back(), finding)) {
      merged.push_back(std::move(finding));
      continue;
    }
    merged.back().bytes += finding.bytes;
    if (merged.back().error.code != Errc::checksum_mismatch) continue;
    merged.back().error.detail =
        "the bytes are damaged: the CRC-32s of their blocks differ from those in the checkpoint's "
        "metadata";
  }
  return merged;
}

std::vector<std::size_t> RecordVerifier::unverifiable() const {
  const os::MutexLock lock(mutex_);
  std::vector<std::size_t> sorted = unverifiable_;
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  return sorted;
}

}  // namespace torch_ckpt::engine
