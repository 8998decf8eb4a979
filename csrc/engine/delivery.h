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

/// Where a region's elements go, and what becomes of them on the way.
struct Target {
  std::byte* address = nullptr;
  /// On a device the elements lie one beside the other, in the order in which they are stored.
  int device = staging::Source::kHost;
  staging::Convert convert;  // to the target's dtype; empty: as they are
};

/// Page-locks a chunk for copies from or to a device, which are slower where that fails.
void pin_or_warn(Warnings& warnings, staging::Chunk& chunk, int device);

/// How the tasks of a load use their scratch memory.
struct ScratchLayout {
  std::size_t chunk_bytes = 0;
  std::size_t read_bytes = 0;  // of a chunk: for what is read; the rest is for what is packed
  std::size_t chunks = 1;      // two with devices: one is filled while the other is copied from
  int device = staging::Source::kHost;  // that chunks are page-locked for
  // What chunks that are made for the load may bring the chunk pool to, in bytes.
  std::size_t most_kept = ~std::size_t{0};

  std::size_t bytes() const { return chunk_bytes * chunks; }

  /// The most that there is room for wherever it lies in the file: a direct read takes whole
  /// blocks. A multiple of 64, so that steps of as many bytes cut no element.
  std::size_t step_bytes() const;
};

/// `chunk_bytes`, or less where `threads` would not have a chunk each within `most_bytes`, but not
/// so little that reads are slow.
std::size_t scratch_chunk_bytes(std::size_t chunk_bytes, std::size_t most_bytes,
                                std::size_t threads);

/// The layout of at most `most_bytes` for these regions, in chunks of about `chunk_bytes`;
/// chunk_bytes is 0 where there is not enough.
ScratchLayout lay_out_scratch(std::span<const planning::Region* const> regions,
                              std::span<const Target* const> targets, std::size_t chunk_bytes,
                              std::size_t most_bytes);

// The memory of one task of a load, and the way from there to targets. For one thread.
class Scratch {
 public:
  /// `context` and `ready` outlive it.
  static Result<std::unique_ptr<Scratch>> make(Context& context, const ScratchLayout& layout,
                                               const std::vector<staging::ReadyEvent>& ready);
  /// Waits for all copies and gives the memory back to the chunk pool.
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  /// Page-aligned room for what is read next; what was read before may be on its way to a device
  /// meanwhile, but not what was read before that.
  Result<std::span<std::byte>> next_buffer();

  std::size_t step_bytes() const { return layout_.step_bytes(); }

  /// Brings the elements of `region` that lie in `bytes`, which begin at `position` of the payload,
  /// to the target; returns how many bytes of the payload these were. `bytes` lie in the room or,
  /// with a target on the host, anywhere.
  Result<std::uint64_t> deliver(const planning::Region& region, const Target& target,
                                std::uint64_t position, std::span<const std::byte> bytes);

  /// Starts the copies to devices that have been delivered. Before the next next_buffer().
  Result<> submit();

  /// Waits for all copies.
  Result<> wait_all();

 private:
  struct Slot {
    std::unique_ptr<staging::Chunk> chunk;
    bool was_kept = false;      // by the chunk pool
    std::size_t in_flight = 0;  // submissions
  };

  Scratch(Context& context, const ScratchLayout& layout,
          const std::vector<staging::ReadyEvent>& ready)
      : pool_(context.chunks),
        layout_(layout),
        ready_(ready),
        warn_(context.warnings.once()),
        slots_(layout.chunks) {}
  Result<> free(Slot& slot);
  Result<std::uint64_t> send(const planning::Region& region, const Target& target,
                             std::uint64_t position, std::span<const std::byte> bytes);

  staging::ChunkPool& pool_;
  const ScratchLayout layout_;
  const std::vector<staging::ReadyEvent>& ready_;
  const staging::Warn warn_;
  std::vector<Slot> slots_;
  std::size_t current_ = 0;
  std::size_t packed_ = 0;  // bytes in the current chunk, behind what is read
  std::vector<staging::HostRun> runs_;
  std::shared_ptr<staging::DeviceCopier> copier_;
};

}  // namespace torch_ckpt::engine
