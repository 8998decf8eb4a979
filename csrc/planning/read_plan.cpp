#include "planning/read_plan.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "checked_math.h"

namespace torch_ckpt::planning {
namespace {

// Maximum per record. Larger records get larger pieces, so that a record with an absurd size in the
// metadata does not exhaust memory.
constexpr std::uint64_t kMaxPieces = 4096;

// Maximum per record. Beyond it, ranges are merged, so more is read than was requested.
constexpr std::size_t kMaxRanges = std::size_t{1} << 20;

bool is_small(const WantedRecord& wanted, const ReadPlanLimits& limits) {
  const std::uint64_t length = wanted.record->length;
  if (length > std::min(limits.small_bytes, limits.batch_bytes)) return false;
  return length <= limits.gap_bytes || wanted.wanted() >= length / 8 * 7;
}

// Returns true if `record` of the same file can be added to `batch` without a large gap and without
// exceeding a chunk.
bool continues(const ReadUnit& batch, const StoredRecord& record, const ReadPlanLimits& limits) {
  const std::uint64_t end = batch.begin + batch.length;
  if (record.offset > end && record.offset - end > limits.gap_bytes) return false;
  return record.offset - batch.begin + record.length <= limits.batch_bytes;
}

// Groups the record's ranges into pieces, in order. Divides ranges only at multiples of cut_bytes,
// so that each block with a checksum lies within one piece.
std::vector<std::vector<ByteRange>> cut(const WantedRecord& record, const ReadPlanLimits& limits) {
  std::vector<std::vector<ByteRange>> pieces(1);
  const std::uint64_t piece_bytes = std::max(limits.piece_bytes, record.wanted() / kMaxPieces);
  std::uint64_t room = piece_bytes;
  const auto next_piece = [&] {
    pieces.emplace_back();
    room = piece_bytes;
  };
  for (ByteRange range : record.ranges) {
    while (range.bytes() > room) {
      const std::uint64_t end = align_down(range.begin + room, limits.cut_bytes);
      if (end > range.begin) {
        pieces.back().push_back({range.begin, end});
        range.begin = end;
      } else if (pieces.back().empty()) {
        break;  // there is no place to cut, so the piece exceeds its size
      }
      next_piece();
    }
    pieces.back().push_back(range);
    room -= std::min(room, range.bytes());
    if (room == 0) next_piece();
  }
  // Keep one empty piece if no byte of the payload is requested: the record's archive is checked
  // nevertheless.
  if (pieces.back().empty() && pieces.size() > 1) pieces.pop_back();
  return pieces;
}

void add_pieces(std::vector<ReadUnit>& units, std::size_t index, const WantedRecord& record,
                const ReadPlanLimits& limits) {
  std::vector<std::vector<ByteRange>> pieces = cut(record, limits);
  for (std::size_t piece = 0; piece < pieces.size(); ++piece) {
    ReadUnit unit;
    unit.records = {index};
    unit.ranges = std::move(pieces[piece]);
    unit.piece = piece;
    unit.pieces = pieces.size();
    units.push_back(std::move(unit));
  }
}

}  // namespace

std::vector<ByteRange> ranges_of(const WantedPayload& payload) {
  const std::uint64_t gap_bytes = ReadPlanLimits().gap_bytes;
  std::vector<ByteRange> ranges;
  for (const Region* region : payload.regions) {
    if (region->covering().end > payload.bytes) continue;
    const auto of_region = region->ranges(gap_bytes, kMaxRanges);
    ranges.insert(ranges.end(), of_region.begin(), of_region.end());
  }
  if (payload.is_whole) ranges = {{0, payload.bytes}};
  if (payload.block_bytes != 0) {
    const std::uint64_t last_block = align_down(payload.bytes, payload.block_bytes);
    for (ByteRange& range : ranges) {
      range.begin = align_down(range.begin, payload.block_bytes);
      range.end = range.end > last_block ? payload.bytes : align_up(range.end, payload.block_bytes);
    }
  }
  return ranges.size() > 1 ? coalesce(std::move(ranges), gap_bytes) : ranges;
}

std::uint64_t piece_bytes_for(std::uint64_t wanted, std::size_t threads) {
  const ReadPlanLimits usual;
  return std::clamp(wanted / threads, usual.cut_bytes, usual.piece_bytes);
}

std::vector<ReadUnit> plan_reads(std::span<const WantedRecord> records,
                                 const ReadPlanLimits& limits) {
  std::vector<std::size_t> order(records.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tie(records[a].record->file, records[a].record->offset) <
           std::tie(records[b].record->file, records[b].record->offset);
  });

  std::vector<ReadUnit> units;
  bool open = false;  // true if units.back() is a batch to which records can be added
  for (const std::size_t index : order) {
    const StoredRecord& record = *records[index].record;
    if (!is_small(records[index], limits)) {
      add_pieces(units, index, records[index], limits);
      open = false;
      continue;
    }
    open = open && records[units.back().records.back()].record->file == record.file &&
           continues(units.back(), record, limits);
    if (!open) {
      ReadUnit& unit = units.emplace_back();
      unit.is_batch = true;
      unit.begin = record.offset;
      open = true;
    }
    ReadUnit& batch = units.back();
    batch.records.push_back(index);
    batch.length = std::max(batch.length, record.offset + record.length - batch.begin);
  }
  return units;
}

std::vector<ReadUnit> with_ends_ahead(std::vector<ReadUnit> units,
                                      std::span<const WantedRecord> records) {
  // A task reads the ends of a few neighbours, because the tail of one record and the head of the
  // next are one request.
  constexpr std::size_t kRecordsOfUnit = 4, kUnitsAhead = 2;
  struct Ends {
    ReadUnit unit;
    std::size_t first_piece;  // in `units`
  };
  std::vector<Ends> all;
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (units[i].is_batch || units[i].piece != 0) continue;
    const std::size_t record = units[i].records.front();
    const auto continues = [&](const ReadUnit& ends) {
      return ends.records.size() < kRecordsOfUnit &&
             records[ends.records.front()].record->file == records[record].record->file;
    };
    if (all.empty() || !continues(all.back().unit)) {
      all.push_back({{}, i});
      all.back().unit.is_of_ends = true;
    }
    all.back().unit.records.push_back(record);
  }
  std::vector<ReadUnit> ordered;
  ordered.reserve(units.size() + all.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    while (next < all.size() && (next < kUnitsAhead || all[next - kUnitsAhead].first_piece <= i)) {
      ordered.push_back(std::move(all[next++].unit));
    }
    ordered.push_back(std::move(units[i]));
  }
  return ordered;
}

}  // namespace torch_ckpt::planning
