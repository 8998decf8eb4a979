#include "planning/read_plan.h"

#include <algorithm>
#include <tuple>

namespace torch_ckpt::planning {
namespace {

bool is_small(const WantedRecord& record, const ReadPlanLimits& limits) {
  if (record.length > std::min(limits.small_bytes, limits.batch_bytes)) return false;
  return record.length <= limits.gap_bytes || record.wanted >= record.length / 2;
}

// Whether `record` continues `batch` without reading too much in between or growing too long.
bool continues(const ReadUnit& batch, const WantedRecord& record, const ReadPlanLimits& limits) {
  if (batch.file != record.file) return false;
  const std::uint64_t end = batch.begin + batch.length;
  if (record.offset > end && record.offset - end > limits.gap_bytes) return false;
  return record.offset - batch.begin + record.length <= limits.batch_bytes;
}

void add_pieces(std::vector<ReadUnit>& units, std::size_t index, const WantedRecord& record,
                const ReadPlanLimits& limits) {
  // A record of which no byte is wanted still has its archive looked at, once.
  const std::uint64_t pieces =
      std::max<std::uint64_t>(1, (record.wanted + limits.piece_bytes - 1) / limits.piece_bytes);
  for (std::uint64_t piece = 0; piece < pieces; ++piece) {
    ReadUnit unit;
    unit.file = record.file;
    unit.records = {index};
    unit.begin = piece * limits.piece_bytes;
    unit.length = std::min(limits.piece_bytes, record.wanted - unit.begin);
    unit.piece = piece;
    unit.pieces = pieces;
    units.push_back(std::move(unit));
  }
}

}  // namespace

std::vector<ReadUnit> plan_reads(std::span<const WantedRecord> records,
                                 const ReadPlanLimits& limits) {
  std::vector<std::size_t> order(records.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tie(records[a].file, records[a].offset) <
           std::tie(records[b].file, records[b].offset);
  });

  std::vector<ReadUnit> units;
  bool open = false;  // whether units.back() is a batch that may grow
  for (const std::size_t index : order) {
    const WantedRecord& record = records[index];
    if (!is_small(record, limits)) {
      add_pieces(units, index, record, limits);
      open = false;
      continue;
    }
    if (!open || !continues(units.back(), record, limits)) {
      ReadUnit unit;
      unit.file = record.file;
      unit.is_batch = true;
      unit.begin = record.offset;
      units.push_back(std::move(unit));
      open = true;
    }
    ReadUnit& batch = units.back();
    batch.records.push_back(index);
    batch.length = std::max(batch.length, record.offset + record.length - batch.begin);
  }
  return units;
}

}  // namespace torch_ckpt::planning
