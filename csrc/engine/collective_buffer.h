#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "error.h"
#include "os/shared_memory.h"
#include "planning/collective_ranges.h"

namespace torch_ckpt::engine {

// Collects the short runs that the ranks of a machine write to the same ranges of files, so that
// each range is written in large blocks with direct I/O. In ROMIO this is called collective
// buffering, or two-phase I/O (Thakur, Gropp and Lusk, "Data Sieving and Collective I/O in ROMIO",
// Frontiers 1999).
//
//   1. The ranges are divided into windows, at multiples of kWindowBytes in the file. The ranks
//      share memory with a state for each window, and kBlocks blocks of memory.
//   2. The first rank that comes to a window assigns a free block to it. Each rank copies its bytes
//      of the window to the block, and adds their number to the window's state. When the window is
//      complete, the block is ready to be written.
//   3. A rank that finds no free block writes a ready one to the file and frees it, so that several
//      ranks write at once. At the end of the file, each rank writes the blocks that are ready.
//   4. If no block is ready either, the other ranks are behind this one, and it waits for them. They
//      may also have failed, or need a block themselves to go on. So the rank waits only for a
//      limited time. Then it marks the window as written directly, and all ranks write their own
//      bytes of this window to the file. Each time, the limit is halved.
//
// No rank depends on another one to complete its writes. If a rank ends before it has copied its
// bytes or written a block, the save fails, because the rank does not report to the coordinator. A
// rank fsyncs the file after its last write, and reports after that, so the file is durable once
// all ranks have reported.
//
// Safe for concurrent use by multiple threads.
class CollectiveBuffer {
 public:
  static constexpr std::uint64_t kWindowBytes = std::uint64_t{4} << 20;
  static constexpr std::size_t kBlocks = 8;
  using Clock = std::chrono::steady_clock;

  struct Window {
    std::size_t number = 0;
    std::uint64_t begin = 0;  // offsets in the file
    std::uint64_t end = 0;
  };
  /// The way to write bytes of a window.
  struct Access {
    enum class Kind { block, file, wait };
    Kind kind = Kind::wait;
    std::span<std::byte> block = {};  // the window's bytes
  };
  struct ReadyBlock {
    std::size_t number = 0;
    Window window;
    std::span<const std::byte> bytes;  // the window's
  };

  static Result<std::shared_ptr<CollectiveBuffer>> open(const planning::CollectiveRanges& ranges);

  /// Returns the window that contains an offset of a file, or nullopt if no range contains it.
  std::optional<Window> window_at(std::uint32_t file, std::uint64_t offset) const;
  /// waiting_since: when this access to the window was first tried.
  Access access(const Window& window, Clock::time_point waiting_since);
  /// Counts bytes that the caller has copied to the window's block.
  void add(const Window& window, std::uint64_t bytes);
  /// Returns a block that is ready to be written to a file, if there is one. The caller must write
  /// it, and then release it.
  std::optional<ReadyBlock> take_ready(std::uint32_t file);
  void release(const ReadyBlock& block);

 private:
  using Word = std::atomic<std::uint64_t>;
  static_assert(Word::is_always_lock_free, "processes share the words");

  struct Range {
    planning::CollectiveRanges::Range range;
    std::size_t first_window = 0;
  };

  CollectiveBuffer(os::SharedMemory memory, std::vector<Range> ranges, std::size_t windows);
  static Window window_in(const Range& range, std::uint64_t cell);
  std::span<std::byte> bytes_of(std::size_t block, const Window& window) const;
  std::optional<std::size_t> take_free(const Window& window);
  const Range& range_of(std::size_t window) const;

  os::SharedMemory memory_;
  std::vector<Range> ranges_;
  // In the shared memory, in this order:
  Word* timeouts_ = nullptr;  // how often a rank has waited in vain
  Word* uses_ = nullptr;      // by block
  Word* states_ = nullptr;    // by window
  std::byte* blocks_ = nullptr;
};

}  // namespace torch_ckpt::engine
