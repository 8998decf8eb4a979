#include "engine/record_verifier.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "checked_math.h"

namespace torch_ckpt::engine {
namespace {

constexpr std::string_view kPayloadEntry = "data/0";

std::string text_of(const std::vector<std::uint64_t>& sizes) {
  std::string text = "[";
  for (const std::uint64_t size : sizes) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

bool continues(const Finding& before, const Finding& next) {
  return before.record == next.record && before.file == next.file && before.bytes > 0 &&
         next.bytes > 0 && before.error.offset + before.bytes == next.error.offset &&
         before.error.code == next.error.code;
}

}  // namespace

RecordVerifier::RecordVerifier(const std::vector<LoadFile>& files,
                               std::vector<NamedRecord> records) {
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
    NamedRecord& named = records[number];
    if (!checked_add(named.offset, named.length)) {
      Error error = format_error(Errc::range_past_end, "no file has so many bytes", named.offset);
      findings_.push_back({named.file, number, 0, std::move(error)});
      continue;
    }
    Record record{number, std::move(named), std::nullopt};
    // At the place of an item without bytes begins the next one, whose checksums these would be.
    if (const auto& table = tables[record.named.file]; table && record.named.length > 0) {
      record.sums = table->find(record.named.offset);
    }
    records_.push_back(std::move(record));
  }
}

std::vector<planning::WantedRecord> RecordVerifier::wanted() const {
  std::vector<planning::WantedRecord> wanted;
  wanted.reserve(records_.size());
  for (const auto& [number, named, sums] : records_) {
    // Where in the record the payload begins is not known yet; pieces count from there.
    wanted.push_back({named.file, named.offset, named.length, {{0, named.length}}});
  }
  return wanted;
}

std::uint64_t RecordVerifier::block_bytes() const {
  std::uint64_t most = 0;
  for (const Record& record : records_) {
    if (record.sums) most = std::max(most, record.sums->block_bytes);
  }
  return most;
}

// Checks a record's archive, but for the payload, and says how that is checked.
Result<Payload> RecordVerifier::open(std::size_t record, format::RecordBytes& bytes) {
  const auto& [number, named, sums] = records_[record];
  const bool raw = sums && sums->raw;
  Payload payload;
  if (!named.tensor && !sums) {
    check_entries(record, bytes, {});
    return payload;
  }
  std::uint32_t crc = 0;
  if (raw) {
    payload.bytes = named.length;
  } else {
    auto archive = format::index_record(bytes);
    if (!archive) {
      if (archive.error().code == Errc::pickle_unknown && !sums) {
        // A quantized tensor, a subclass and the like, which only torch.load knows.
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
    if (named.tensor) check_header(record, archive->header);
  }
  if (const format::RecordSums* blocks = blocks_of(sums, raw)) {
    const std::uint64_t count =
        payload.bytes / blocks->block_bytes + (payload.bytes % blocks->block_bytes != 0 ? 1 : 0);
    payload.is_read = count == blocks->block_crcs.size();
    payload.blocks = blocks;
    if (payload.is_read) return payload;
    add_finding(record, format_error(Errc::checksum_mismatch,
                                     "the metadata has the checksums of a record of another size"));
  } else if (raw) {
    // No blocks are those of no bytes.
    if (payload.bytes > 0) add_unverifiable(record);
  } else if (sums || is_known(crc, payload.bytes)) {
    payload.is_read = true;
    payload.crc = crc;
  } else {
    add_unverifiable(record);
  }
  return payload;
}

void RecordVerifier::check_header(std::size_t record, const format::TensorHeader& header) {
  const auto& [number, named, sums] = records_[record];
  const auto differs = [&](const std::string& found, const std::string& expected) {
    add_finding(record,
                format_error(Errc::tensor_mismatch, "the record holds a tensor of " + found +
                                                        ", the metadata says " + expected));
  };
  if (header.sizes != named.sizes) differs(text_of(header.sizes), text_of(named.sizes));
  if (!sums && named.dtype != nullptr && header.dtype != named.dtype) {
    differs(std::string(header.dtype->name), std::string(named.dtype->name));
  }
}

void RecordVerifier::check_entries(std::size_t record, format::RecordBytes& bytes,
                                   std::string_view skip) {
  auto found = format::check_entries(bytes, skip);
  if (!found) {
    add_finding(record, found.error());
  } else if (found->unknown > 0 || (!found->archive && bytes.size() > 0)) {
    add_unverifiable(record);
  }
}

Result<> RecordVerifier::take(std::size_t record, const Payload& payload, std::uint64_t position,
                              std::span<const std::byte> bytes, PayloadCheck& check, Scratch*) {
  if (payload.blocks == nullptr) return check.take(position, bytes);
  // Block by block, since a check ends at the first that is damaged.
  const std::uint64_t block_bytes = payload.blocks->block_bytes;
  while (!bytes.empty()) {
    const std::uint64_t begin = align_down(position, block_bytes);
    const std::uint64_t end = begin + std::min(block_bytes, payload.bytes - begin);
    const auto part = bytes.first(std::min<std::uint64_t>(bytes.size(), end - position));
    if (auto intact = check.take(position, part); !intact) {
      Error error = intact.error();
      error.offset += payload.offset;
      add_finding(record, std::move(error), end - begin);
    }
    position += part.size();
    bytes = bytes.subspan(part.size());
  }
  return {};
}

std::uint64_t RecordVerifier::leave_out(std::size_t record, const Payload& payload,
                                        planning::ByteRange range, const Error& error) {
  // With the rest of the block, of which no more can be said.
  if (payload.blocks != nullptr) {
    range.end = std::min(align_up(range.end, payload.blocks->block_bytes), payload.bytes);
  }
  add_finding(record, error, range.bytes());
  return range.bytes();
}

Result<> RecordVerifier::end(std::size_t record, const Payload& payload,
                             std::optional<std::uint32_t> crc, std::span<const std::byte>) {
  if (crc && *crc != *payload.crc) {
    add_finding(record, checksum_error(*payload.crc, *crc, "the archive", payload.offset),
                payload.bytes);
  }
  return {};
}

void RecordVerifier::add_finding(std::size_t record, Error error, std::uint64_t bytes) {
  const auto& [number, named, sums] = records_[record];
  // Errors of the system have a path and count from the file's begin, the decoder's count from the
  // record's.
  if (error.path.empty()) {
    const std::uint64_t in_record = error.offset == Error::kNoOffset ? 0 : error.offset;
    error.offset = checked_add(named.offset, in_record).value_or(named.offset);
  } else if (error.offset == Error::kNoOffset) {
    error.offset = named.offset;
  }
  const os::MutexLock lock(mutex_);
  findings_.push_back({named.file, number, bytes, std::move(error)});
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
        "the bytes are damaged: their blocks' CRC-32s are not those in the checkpoint's metadata";
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
