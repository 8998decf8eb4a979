#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planning/region.h"

namespace torch_ckpt::planning {

/// A stored record of which some bytes are requested.
struct WantedRecord {
  std::size_t file = 0;
  std::uint64_t offset = 0;       // of the record in the file
  std::uint64_t length = 0;       // of the record
  std::vector<ByteRange> ranges;  // of its payload; ascending, disjoint

  std::uint64_t wanted() const {
    std::uint64_t sum = 0;
    for (const ByteRange& range : ranges) sum += range.bytes();
    return sum;
  }
};

/// The requested regions of one record's payload.
struct WantedPayload {
  std::uint64_t bytes = 0;        // of the payload
  std::uint64_t block_bytes = 0;  // blocks are read entirely or not at all; a power of two;
                                  // 0: there are no blocks
  bool is_whole = false;          // read the entire payload
  std::vector<const Region*> regions;
};

/// The ranges to read. A region outside the payload has no range: it is rejected once the record
/// has been opened.
std::vector<ByteRange> ranges_of(const WantedPayload& payload);

/// One unit of a load: either a batch of small neighbouring records that are read at once, or one
/// piece of the requested bytes of a large record.
struct ReadUnit {
  std::size_t file = 0;
  std::vector<std::size_t> records;  // indices, ascending by offset; a piece has one
  bool is_batch = false;
  std::uint64_t begin = 0;        // of a batch: offset in the file
  std::uint64_t length = 0;       // of a batch: bytes to read
  std::vector<ByteRange> ranges;  // of a piece: ranges of the payload
  std::size_t piece = 0;          // of a piece: its number in the record
  std::size_t pieces = 0;         // of a piece: number of pieces in the record
};

struct ReadPlanLimits {
  std::uint64_t batch_bytes = std::uint64_t{4} << 20;    // a batch must fit into one chunk
  std::uint64_t small_bytes = std::uint64_t{256} << 10;  // larger records are not in batches
  std::uint64_t gap_bytes = std::uint64_t{64} << 10;     // largest gap that one read spans
  std::uint64_t piece_bytes = std::uint64_t{16} << 20;   // of a large record, for one thread
  std::uint64_t cut_bytes = std::uint64_t{1} << 20;      // pieces end at multiples of this, a power
                                                         // of two
};

/// The piece size with which `wanted` bytes keep `threads` threads busy, but not less than is worth
/// a separate read.
std::uint64_t piece_bytes_for(std::uint64_t wanted, std::size_t threads);

/// Orders the records by file and offset and divides them into units. A small record that is
/// requested only in part is read like a large one, unless the other part is small, or the record
/// is smaller than a gap that a read may span.
std::vector<ReadUnit> plan_reads(std::span<const WantedRecord> records,
                                 const ReadPlanLimits& limits);

}  // namespace torch_ckpt::planning
