#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/context.h"
#include "error.h"
#include "planning/region.h"
#include "staging/chunk_pool.h"
#include "staging/device_copy.h"
#include "staging/host_scatter.h"

namespace torch_ckpt::engine {

// Moves bytes that were read to their targets. Each task of a load has one Scratch:
//
//   1. next_buffer() returns memory to read into.
//   2. deliver() moves the requested elements to their target. If the target is on the host, it
//      copies or converts them immediately. If the target is on a device, it queues a copy.
//      Elements that are not contiguous or need a conversion are packed first, behind the bytes
//      that were read.
//   3. submit() starts the queued copies, which run while the other chunk is being filled.

/// The memory that receives a region's elements.
struct Target {
  std::byte* address = nullptr;
  /// On a device, elements are contiguous and in the order in which they are stored.
  int device = staging::Source::kHost;
  staging::Convert convert;  // to the target's dtype; empty: no conversion
};

/// Page-locks a chunk for copies from or to a device. If that fails, adds a warning that the copies
/// will be slower.
void pin_or_warn(Warnings& warnings, staging::Chunk& chunk, int device);

/// The layout of the scratch memory of each task of a load.
struct ScratchLayout {
  std::size_t chunk_bytes = 0;
  std::size_t read_bytes = 0;  // part of a chunk to read into; packed elements use the remainder
  // Two for devices: one is filled while the other is copied from. None if the bytes that are read
  // are in other memory, and all targets are on the host.
  std::size_t chunks = 1;
  int device = staging::Source::kHost;  // chunks are page-locked for this device
  // Chunks allocated for the load are returned to the pool as long as it has at most this many idle
  // bytes; otherwise they are freed.
  std::size_t max_idle_bytes = ~std::size_t{0};

  std::size_t bytes() const { return chunk_bytes * chunks; }

  /// Returns how many bytes a single read may request at any file offset. This leaves room for
  /// extending a direct read to block boundaries. It is a multiple of 64, so steps of this size
  /// never split an element.
  std::size_t step_bytes() const;
};

/// Returns `chunk_bytes`, reduced so that `threads` chunks fit into `max_bytes`, but never to a
/// size that makes reads slow.
std::size_t scratch_chunk_bytes(std::size_t chunk_bytes, std::size_t max_bytes,
                                std::size_t threads);

/// Lays out at most `max_bytes` of scratch memory for these regions, in chunks of about
/// `chunk_bytes`. Returns a layout with chunk_bytes == 0 if `max_bytes` is too small.
ScratchLayout lay_out_scratch(std::span<const planning::Region* const> regions,
                              std::span<const Target* const> targets, std::size_t chunk_bytes,
                              std::size_t max_bytes);

// The scratch memory of one task, and the copies from it to targets. Not thread-safe.
class Scratch {
 public:
  /// `context` and `ready` must outlive the Scratch.
  static Result<std::unique_ptr<Scratch>> make(Context& context, const ScratchLayout& layout,
                                               const std::vector<staging::ReadyEvent>& ready);
  /// Waits for all copies and returns the memory to the chunk pool.
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  /// Returns a page-aligned buffer for the next read, after waiting for earlier copies from that
  /// buffer. Copies from the other buffer may still be in flight. Empty if there are no chunks.
  Result<std::span<std::byte>> next_buffer();

  std::size_t step_bytes() const { return layout_.step_bytes(); }

  /// True if copies to devices are queued. The bytes in the buffer must then stay unchanged until
  /// the next call of next_buffer().
  bool has_queued_copies() const { return !runs_.empty(); }

  /// Delivers the elements of `region` that lie in `bytes`, which begin at `position` in the
  /// payload. Returns the number of payload bytes delivered. If the target is on a device, `bytes`
  /// must lie in the buffer that next_buffer() returned last.
  Result<std::uint64_t> deliver(const planning::Region& region, const Target& target,
                                std::uint64_t position, std::span<const std::byte> bytes);

  /// Starts the queued copies to devices. Call this before calling next_buffer() again.
  Result<> submit();

  /// Waits for all copies.
  Result<> wait_all();

 private:
  struct Slot {
    std::unique_ptr<staging::Chunk> chunk;
    bool was_idle = false;      // taken from the pool's idle chunks, not allocated for this load
    std::size_t in_flight = 0;  // submissions not yet waited for
  };

  Scratch(Context& context, const ScratchLayout& layout,
          const std::vector<staging::ReadyEvent>& ready)
      : pool_(context.chunks),
        layout_(layout),
        ready_(ready),
        warn_(context.warnings.callback()),
        slots_(layout.chunks) {}
  Result<> wait_for_copies(Slot& slot);
  void queue(const staging::HostRun& run, const Target& target);
  Result<std::uint64_t> deliver_to_device(const planning::Region& region, const Target& target,
                                          std::uint64_t position, std::span<const std::byte> bytes);

  staging::ChunkPool& pool_;
  const ScratchLayout layout_;
  const std::vector<staging::ReadyEvent>& ready_;
  const staging::Warn warn_;
  std::vector<Slot> slots_;
  std::size_t current_ = 0;
  std::size_t packed_ = 0;  // bytes packed in the current chunk, after layout_.read_bytes
  std::vector<staging::HostRun> runs_;
  const Target* last_target_ = nullptr;  // of the last of runs_
  std::shared_ptr<staging::DeviceCopier> copier_;
};

}  // namespace torch_ckpt::engine
