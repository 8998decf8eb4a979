#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planning/region.h"

namespace torch_ckpt::planning {

/// One stored record that is wanted, wholly or in part.
struct WantedRecord {
  std::size_t file = 0;
  std::uint64_t offset = 0;       // of the record in the file
  std::uint64_t length = 0;       // of the record
  std::vector<ByteRange> ranges;  // of its payload; ascending, apart from each other

  std::uint64_t wanted() const {
    std::uint64_t sum = 0;
    for (const ByteRange& range : ranges) sum += range.bytes();
    return sum;
  }
};

/// What is wanted of one record's payload.
struct WantedPayload {
  std::uint64_t bytes = 0;        // of the payload
  std::uint64_t block_bytes = 0;  // of which each is wanted wholly or not at all, a power of two;
                                  // 0: there are no blocks
  bool is_whole = false;          // all of it is wanted
  std::vector<const Region*> regions;
};

/// The ranges to read. A region that is not within the payload has none: it is refused once the
/// record has been opened.
std::vector<ByteRange> ranges_of(const WantedPayload& payload);

/// One step of a load: either a run of small records that lie close together and are read at once,
/// or one piece of the wanted bytes of one large record.
struct ReadUnit {
  std::size_t file = 0;
  std::vector<std::size_t> records;  // a batch: indices, ascending by offset; one for a piece
  bool is_batch = false;
  std::uint64_t begin = 0;        // of a batch, in the file
  std::uint64_t length = 0;       // of a batch: bytes to read
  std::vector<ByteRange> ranges;  // of a piece, within the payload
  std::size_t piece = 0;          // number of the piece within its record
  std::size_t pieces = 0;         // how many the record has
};

struct ReadPlanLimits {
  std::uint64_t batch_bytes = std::uint64_t{4} << 20;    // a batch must fit into one chunk
  std::uint64_t small_bytes = std::uint64_t{256} << 10;  // larger records are read by themselves
  std::uint64_t gap_bytes = std::uint64_t{64} << 10;     // unwanted bytes worth reading over
  std::uint64_t piece_bytes = std::uint64_t{16} << 20;   // of a large record, for one thread
  std::uint64_t cut_bytes = std::uint64_t{1} << 20;      // pieces are cut at multiples of this,
                                                         // a power of two
};

/// Bytes of a piece so that of `wanted` bytes each of `threads` has one at the same time, as far as
/// pieces are worth a read of their own.
std::uint64_t piece_bytes_for(std::uint64_t wanted, std::size_t threads);

/// Orders the wanted records by file and offset and cuts them into units. A small record of which
/// a part is not wanted is read like a large one, unless that part is a small one, or the record is
/// smaller than the gap that would be read over anyway.
std::vector<ReadUnit> plan_reads(std::span<const WantedRecord> records,
                                 const ReadPlanLimits& limits);

}  // namespace torch_ckpt::planning
