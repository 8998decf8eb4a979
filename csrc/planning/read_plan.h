#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planning/region.h"
#include "planning/stored_record.h"

namespace torch_ckpt::planning {

/// A stored record, and the byte ranges requested from it.
struct WantedRecord {
  const StoredRecord* record = nullptr;  // must outlive the plan
  std::vector<ByteRange> ranges;         // requested ranges of the payload, ascending and disjoint

  std::uint64_t wanted() const {
    std::uint64_t sum = 0;
    for (const ByteRange& range : ranges) sum += range.bytes();
    return sum;
  }
};

/// The requested regions of one record's payload.
struct WantedPayload {
  std::uint64_t bytes = 0;        // size of the payload
  std::uint64_t block_bytes = 0;  // each block is read entirely or not at all; a power of two;
                                  // 0: no blocks
  bool is_whole = false;          // true: read the entire payload
  std::vector<const Region*> regions;
};

/// Returns the ranges to read. Skips regions outside the payload: they are rejected when the record
/// is opened.
std::vector<ByteRange> ranges_of(const WantedPayload& payload);

/// One unit of a load: a batch of small neighbouring records, read at once; one piece of the
/// requested bytes of a large record; or the ends of some large records, whose pieces follow.
struct ReadUnit {
  std::vector<std::size_t> records;  // indices, ascending by offset; a piece has only one
  bool is_batch = false;
  bool is_of_ends = false;
  std::uint64_t begin = 0;        // batch only: offset in the file
  std::uint64_t length = 0;       // batch only: number of bytes to read
  std::vector<ByteRange> ranges;  // piece only: ranges of the payload
  std::size_t piece = 0;          // piece only: its index within the record
  std::size_t pieces = 0;         // piece only: number of pieces in the record
};

struct ReadPlanLimits {
  std::uint64_t batch_bytes = std::uint64_t{4} << 20;    // maximum for a batch: one chunk
  std::uint64_t small_bytes = std::uint64_t{256} << 10;  // larger records are not put in batches
  std::uint64_t gap_bytes = std::uint64_t{64} << 10;     // largest gap spanned by one read
  std::uint64_t piece_bytes = std::uint64_t{16} << 20;   // maximum for a piece, read by one thread
  std::uint64_t cut_bytes = std::uint64_t{1} << 20;      // pieces end at multiples of this power of
                                                         // two
};

/// Returns the piece size that lets `threads` threads share `wanted` bytes, but no size too small
/// to be worth a separate read.
std::uint64_t piece_bytes_for(std::uint64_t wanted, std::size_t threads);

/// Inserts units that read the ends of large records before the pieces need them. Each read of a
/// store is a request, and otherwise all tasks of a record wait for the requests of its ends.
std::vector<ReadUnit> with_ends_ahead(std::vector<ReadUnit> units,
                                      std::span<const WantedRecord> records);

/// Sorts the records by file and offset and divides them into units. A small record that is only
/// partly requested is treated like a large one, unless nearly all of it is requested or the record
/// is no larger than a gap that a read may span.
std::vector<ReadUnit> plan_reads(std::span<const WantedRecord> records,
                                 const ReadPlanLimits& limits);

}  // namespace torch_ckpt::planning
