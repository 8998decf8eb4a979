#include "engine/fetch_plan.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "checked_math.h"
#include "engine/record_reader.h"
#include "format/record_index.h"

namespace torch_ckpt::engine {
namespace {

using planning::ByteRange;

// Larger than for local reads, because each request takes long.
constexpr std::uint64_t kGapBytes = std::uint64_t{256} << 10;

// A record with more bytes than this around its payload does not have torch's layout for a tensor.
constexpr std::uint64_t kMaxEnvelopeBytes = std::uint64_t{1} << 20;

ByteRange range_at(std::uint64_t offset, std::uint64_t length) {
  return {offset, checked_add(offset, length).value_or(std::numeric_limits<std::uint64_t>::max())};
}

std::vector<RegionRead> reads_of(const std::vector<planning::StoredRecord>& records,
                                 const std::vector<std::optional<planning::Region>>& regions) {
  std::vector<RegionRead> reads;
  reads.reserve(records.size());
  for (std::size_t i = 0; i < records.size(); ++i) {
    RegionRead& read = reads.emplace_back();
    read.record = &records[i];
    const bool is_tensor = i < regions.size() && regions[i].has_value();
    read.kind = is_tensor ? ReadKind::tensor : ReadKind::raw;
    read.region = is_tensor ? *regions[i] : planning::Region::of_bytes(0, records[i].length);
  }
  return reads;
}

bool reads_entire_tensor(const RegionRead& read) {
  return read.region.bytes() >= read.payload_bytes();
}

/// Returns how many bytes to fetch at each end of a record to get everything but the payload; 0 if
/// the entire record must be fetched.
std::uint64_t end_bytes_of(const RegionRead& read) {
  if (read.kind != ReadKind::tensor) return 0;
  const std::uint64_t length = read.record->length;
  if (length <= planning::ReadPlanLimits().small_bytes) return 0;
  const std::uint64_t payload_bytes = read.payload_bytes();
  if (payload_bytes > length) return 0;
  const std::uint64_t envelope = length - payload_bytes;
  if (envelope > kMaxEnvelopeBytes) return 0;
  return std::min(std::max(envelope, kEndsBytes), length);
}

}  // namespace

FetchPlan::FetchPlan(std::vector<LoadFile> files, std::vector<planning::StoredRecord> records,
                     const std::vector<std::optional<planning::Region>>& regions, bool verify)
    : files_(std::move(files)),
      stored_(std::move(records)),
      delivery_(reads_of(stored_, regions), verify) {
  if (verify) {
    std::vector<std::optional<format::ChecksumTable>> tables;
    for (const LoadFile& file : files_) {
      auto table = checksum_table_of(file);
      // The load will report a damaged table.
      tables.push_back(table ? std::move(*table) : std::nullopt);
    }
    delivery_.set_checksums(tables);
  }
  for (planning::WantedRecord& wanted : delivery_.wanted()) {
    const auto& of_record = delivery_.reads_of(records_.size());
    const bool is_partial = std::ranges::none_of(of_record, [&](std::size_t number) {
      return reads_entire_tensor(delivery_.reads()[number]);
    });
    const RegionRead& first = delivery_.reads()[of_record.front()];
    records_.push_back({std::move(wanted), is_partial ? end_bytes_of(first) : 0});
  }
}

// Not inline: the library does not export the table of virtual functions of RecordDelivery.
FetchPlan::~FetchPlan() = default;

std::vector<FileRange> FetchPlan::ends() const {
  std::vector<FileRange> ends;
  for (const auto& [wanted, end_bytes] : records_) {
    if (end_bytes == 0) continue;
    const planning::StoredRecord& stored = *wanted.record;
    const ByteRange record = range_at(stored.offset, stored.length);
    ends.push_back({stored.file, {record.begin, record.begin + end_bytes}});
    ends.push_back({stored.file, {record.end - end_bytes, record.end}});
  }
  return ends;
}

std::vector<ByteRange> FetchPlan::ranges_of(std::size_t number, const Folder& copies) const {
  const auto& [wanted, end_bytes] = records_[number];
  const planning::StoredRecord& stored = *wanted.record;
  const ByteRange record = range_at(stored.offset, stored.length);
  if (end_bytes == 0) return {record};
  const auto file = DataFile::open(copies, files_[stored.file].name, DirectIo::off);
  // The load will report a damaged record, or read it by other means.
  if (!file || !inside(stored.offset, stored.length, file->bytes())) return {record};
  RecordInFile bytes(*file, stored.offset, stored.length);
  const auto archive = format::index_record(bytes);
  if (!archive || archive->header.dtype != stored.dtype || archive->header.sizes != stored.sizes ||
      !archive->header.is_plain_row_major()) {
    return {record};
  }
  std::vector<ByteRange> ranges{{record.begin, record.begin + end_bytes},
                                {record.end - end_bytes, record.end}};
  const std::uint64_t payload = stored.offset + archive->payload_offset;
  for (const ByteRange& range : wanted.ranges) {
    ranges.push_back({payload + range.begin, payload + range.end});
  }
  return ranges;
}

std::vector<FetchPlan::Wave> FetchPlan::waves(const Folder& copies, std::uint64_t max_bytes) const {
  std::vector<Wave> waves;
  std::uint64_t bytes = 0;
  for (std::size_t number = 0; number < records_.size(); ++number) {
    const auto ranges = planning::coalesce(ranges_of(number, copies), kGapBytes);
    std::uint64_t more = 0;
    for (const ByteRange& range : ranges) more += range.bytes();
    if (waves.empty() || bytes + more > max_bytes) {
      waves.emplace_back();
      bytes = 0;
    }
    bytes += more;
    Wave& wave = waves.back();
    const auto& reads = delivery_.reads_of(number);
    wave.reads.insert(wave.reads.end(), reads.begin(), reads.end());
    const std::size_t file = records_[number].wanted.record->file;
    // The load opens the file of an empty record, too.
    if (ranges.empty()) wave.ranges.push_back({file, {}});
    for (const ByteRange& range : ranges) {
      if (wave.ranges.empty() || wave.ranges.back().file != file) {
        wave.ranges.push_back({file, range});
        continue;
      }
      // Records are in ascending order.
      ByteRange& last = wave.ranges.back().bytes;
      if (range.begin > last.end && range.begin - last.end > kGapBytes) {
        wave.ranges.push_back({file, range});
      } else {
        last = {std::min(last.begin, range.begin), std::max(last.end, range.end)};
      }
    }
  }
  return waves;
}

}  // namespace torch_ckpt::engine
