#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "format/little_endian.h"
#include "os/shared_memory.h"

namespace torch_ckpt::planning {

/// Size of the smallest long run. A rank writes a long run with direct I/O if the file system
/// supports direct I/O. The ranks of a machine collect short runs before they write them.
inline constexpr std::uint64_t kLongRunBytes = std::uint64_t{64} << 10;

/// The bytes of a file that a rank writes.
struct FilePart {
  std::size_t rank = 0;
  std::uint32_t file = 0;
  std::uint64_t begin = 0;  // offset of the first byte in the file
  std::uint64_t end = 0;    // offset behind the last byte; other ranks may write bytes in between
  std::uint64_t run_bytes = 0;
};

/// Ranges of files that the ranks of one machine write together (engine/collective_buffer.h).
struct CollectiveRanges {
  struct Range {
    std::uint32_t file = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;

    bool operator==(const Range&) const = default;
  };

  os::MemoryFile::Address memory;
  std::vector<Range> ranges;  // by file and offset; they do not overlap

  void encode_to(std::string& out) const;
  /// Reads what encode_to() has written. Fails with Errc::frame_damaged.
  static Result<CollectiveRanges> decode_from(format::ByteReader& reader);
};

std::string encode_address(const os::MemoryFile::Address& address);
/// Fails with Errc::frame_damaged.
Result<os::MemoryFile::Address> decode_address(std::string_view bytes);

// Chooses the ranges of files that several ranks of a machine write in short runs, such as tensors
// that are sharded by columns.
//
//   1. Parts whose ranges overlap form a cluster. The parts of a tensor cover it exactly once, so a
//      cluster has no gaps.
//   2. A cluster is chosen if all of its parts have short runs, and if they belong to at least two
//      ranks, which are all on one machine.
//   3. Adjacent clusters of a machine are joined. Small ranges are dropped.
//
// parts: of all ranks; they do not share bytes. offers: for each rank, the address of memory that
// it offers, or nullopt. Returns the ranges of each rank's machine; nullptr if there are none. The
// ranks of a machine use the memory of the first of them.
std::vector<std::shared_ptr<const CollectiveRanges>> choose_collective_ranges(
    std::vector<FilePart> parts, std::span<const std::optional<os::MemoryFile::Address>> offers);

/// Returns true if ranks of several hosts write parts whose ranges overlap, and one of these parts
/// has short runs. Shared file systems are slow then, because the hosts take turns for each block.
/// parts: of all ranks; they do not share bytes. hosts: the host of each rank.
bool are_interleaved(std::vector<FilePart> parts, std::span<const std::string> hosts);

/// Returns true if ranks of several hosts write to one file. parts, hosts: as in are_interleaved().
bool are_shared(std::span<const FilePart> parts, std::span<const std::string> hosts);

}  // namespace torch_ckpt::planning
