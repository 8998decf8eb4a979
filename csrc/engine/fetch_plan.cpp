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

bool reads_entire_tensor(const ReadRequest& request) {
  return request.region.bytes() >= payload_bytes_of(request);
}

/// Returns how many bytes to fetch at each end of a record to get everything but the payload; 0 if
/// the entire record must be fetched.
std::uint64_t end_bytes_of(const ReadRequest& request) {
  if (request.kind != ReadKind::tensor) return 0;
  if (request.length <= planning::ReadPlanLimits().small_bytes) return 0;
  const std::uint64_t payload_bytes = payload_bytes_of(request);
  if (payload_bytes > request.length) return 0;
  const std::uint64_t envelope = request.length - payload_bytes;
  if (envelope > kMaxEnvelopeBytes) return 0;
  return std::min(std::max(envelope, kEndsBytes), request.length);
}

}  // namespace

ReadRequest fetch_request(std::size_t file, std::uint64_t offset, std::uint64_t length,
                          const format::Dtype* dtype, std::vector<std::uint64_t> sizes,
                          std::span<const std::uint64_t> offsets,
                          std::span<const std::uint64_t> lengths) {
  ReadRequest request;
  request.file = file;
  request.offset = offset;
  request.length = length;
  request.region = planning::Region::of_bytes(0, length);
  request.dtype = dtype;
  if (request.dtype == nullptr || lengths.empty()) return request;
  std::vector<std::int64_t> strides(lengths.size());
  std::int64_t stride = 1;
  for (std::size_t d = lengths.size(); d-- > 0; stride *= static_cast<std::int64_t>(lengths[d])) {
    strides[d] = stride;
  }
  const std::size_t item_bytes = request.dtype->item_bytes;
  const auto region =
      planning::Region::of_box(sizes, {}, offsets, lengths, strides, item_bytes, item_bytes);
  if (!region) return request;
  request.kind = ReadKind::tensor;
  request.sizes = std::move(sizes);
  request.region = *region;
  return request;
}

/// The copy of one data file. It stays open, because consecutive records are in the same file.
class FetchPlan::Copy {
 public:
  explicit Copy(const os::Directory& copies) : copies_(copies) {}

  const Result<DataFile>& open(std::size_t number, const std::string& name) {
    if (!opened_ || number_ != number) {
      opened_.emplace(DataFile::open(copies_, name, DirectIo::off));
      number_ = number;
    }
    return *opened_;
  }

 private:
  const os::Directory& copies_;
  std::size_t number_ = 0;
  std::optional<Result<DataFile>> opened_;
};

FetchPlan::FetchPlan(std::vector<LoadFile> files, std::vector<ReadRequest> requests, bool verify)
    : files_(std::move(files)), delivery_(std::move(requests), verify) {
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
    const auto& of_record = delivery_.requests_of(records_.size());
    const ReadRequest& first = delivery_.requests()[of_record.front()];
    const bool is_partial = std::ranges::none_of(of_record, [&](std::size_t request) {
      return reads_entire_tensor(delivery_.requests()[request]);
    });
    records_.push_back({std::move(wanted), is_partial ? end_bytes_of(first) : 0});
  }
}

// Not inline: the library does not export the table of virtual functions of RecordDelivery.
FetchPlan::~FetchPlan() = default;

std::vector<FileRange> FetchPlan::ends() const {
  std::vector<FileRange> ends;
  for (const auto& [wanted, end_bytes] : records_) {
    if (end_bytes == 0) continue;
    const ByteRange record = range_at(wanted.offset, wanted.length);
    ends.push_back({wanted.file, {record.begin, record.begin + end_bytes}});
    ends.push_back({wanted.file, {record.end - end_bytes, record.end}});
  }
  return ends;
}

std::vector<ByteRange> FetchPlan::ranges_of(std::size_t number, Copy& copy) const {
  const auto& [wanted, end_bytes] = records_[number];
  const ByteRange record = range_at(wanted.offset, wanted.length);
  if (end_bytes == 0) return {record};
  const Result<DataFile>& file = copy.open(wanted.file, files_[wanted.file].name);
  // The load will report a damaged record, or read it by other means.
  if (!file || !inside(wanted.offset, wanted.length, file->bytes())) return {record};
  RecordInFile bytes(*file, wanted.offset, wanted.length);
  const auto archive = format::index_record(bytes);
  const ReadRequest& request = delivery_.requests()[delivery_.requests_of(number).front()];
  if (!archive || archive->header.dtype != request.dtype ||
      archive->header.sizes != request.sizes || !archive->header.is_plain_row_major()) {
    return {record};
  }
  std::vector<ByteRange> ranges{{record.begin, record.begin + end_bytes},
                                {record.end - end_bytes, record.end}};
  const std::uint64_t payload = wanted.offset + archive->payload_offset;
  for (const ByteRange& range : wanted.ranges) {
    ranges.push_back({payload + range.begin, payload + range.end});
  }
  return ranges;
}

std::vector<FetchPlan::Wave> FetchPlan::waves(const os::Directory& copies,
                                              std::uint64_t max_bytes) const {
  std::vector<Wave> waves;
  Copy copy(copies);
  std::uint64_t bytes = 0;
  for (std::size_t number = 0; number < records_.size(); ++number) {
    const auto ranges = planning::coalesce(ranges_of(number, copy), kGapBytes);
    std::uint64_t more = 0;
    for (const ByteRange& range : ranges) more += range.bytes();
    if (waves.empty() || bytes + more > max_bytes) {
      waves.emplace_back();
      bytes = 0;
    }
    bytes += more;
    Wave& wave = waves.back();
    const auto& requests = delivery_.requests_of(number);
    wave.requests.insert(wave.requests.end(), requests.begin(), requests.end());
    const std::size_t file = records_[number].wanted.file;
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
