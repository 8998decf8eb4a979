#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "error.h"
#include "os/fork_guard.h"
#include "os/mutex.h"
#include "os/pages.h"
#include "staging/source.h"

namespace torch_ckpt::staging {

// A memory mapping that is divided into one or more chunks. A page-locked arena is registered with
// the device once, because each registration costs driver time regardless of its size. An arena is
// freed together with its last chunk. An arena with several chunks is always page-locked.
class Arena {
 public:
  static Result<std::shared_ptr<Arena>> allocate(std::size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::span<std::byte> bytes() const { return pages_.bytes(); }
  Result<> pin(int device);

 private:
  friend class ChunkPool;
  explicit Arena(os::Pages pages) : pages_(std::move(pages)) {}

  os::Pages pages_;
  int pinned_for_ = Source::kHost;
  os::ProcessMark process_;
  std::size_t idle_chunks_ = 0;  // chunks in the pool; guarded by the pool's mutex
};

// A piece of host memory for staging. Page-aligned and prefaulted. Not thread-safe.
class Chunk {
 public:
  static Result<std::unique_ptr<Chunk>> allocate(std::size_t bytes);

  std::span<std::byte> bytes() const { return bytes_; }

  /// Page-locks the chunk for copies from a device. Does nothing if it is page-locked already, or
  /// if this build has no device support.
  Result<> pin(int device) { return arena_->pin(device); }

 private:
  friend class ChunkPool;
  Chunk(std::shared_ptr<Arena> arena, std::span<std::byte> bytes)
      : arena_(std::move(arena)), bytes_(bytes) {}

  std::shared_ptr<Arena> arena_;
  std::span<std::byte> bytes_;
};

/// Returns the number of chunks in a page-locked arena: few enough that the first of them is
/// available soon, and enough that the cost of registration is negligible.
constexpr std::size_t chunks_of_arena(std::size_t chunk_bytes) {
  constexpr std::size_t kArenaBytes = std::size_t{64} << 20;
  return std::max<std::size_t>(kArenaBytes / chunk_bytes, 1);
}

// Reuses chunks from one save to the next, because a new page costs three times as much as one that
// is already mapped.
//
//   1. A chunk is idle (in the pool) or in use. take() returns an idle chunk of the requested size.
//      If there is none, it first frees idle chunks of other sizes, so that a change of chunk size
//      does not double the memory, and then allocates one.
//   2. A save with a budget (max_host_bytes) calls trim_to_budget() before it starts and after it
//      has ended.
//   3. A reserve can be allocated ahead of the first save: call set_reserve(), then grow_reserve()
//      until it returns false. Saves and loads never shrink it; only trim() does.
//   4. If a save has ended without needing all the chunks that it may use, begin_refill() asks for
//      the others, and grow_refill() allocates them until it returns false. The next save, and
//      trim(), cancel the refill.
//   5. Chunks count as soon as their allocation begins, so that a reserve and a refill never both
//      allocate the same chunks.
//   6. Memory is freed in units of arenas, once all chunks of an arena are idle.
//
// Safe for concurrent use by multiple threads.
class ChunkPool {
 public:
  /// Returns an idle chunk of exactly this size or allocates one.
  Result<std::unique_ptr<Chunk>> take(std::size_t bytes);
  /// Allocates an arena of `count` chunks, page-locked for `device`. Frees idle chunks first, like
  /// take().
  Result<std::vector<std::unique_ptr<Chunk>>> take_arena(std::size_t bytes, std::size_t count,
                                                         int device);
  /// Returns an idle chunk of exactly this size, or nullptr.
  std::unique_ptr<Chunk> take_idle(std::size_t bytes) noexcept;

  // Each chunk that was taken must be returned by one of the next three methods. They allocate
  // nothing: the memory that they need was reserved when the chunk was taken.

  /// Returns a chunk to the pool.
  void give_back(std::unique_ptr<Chunk> chunk) noexcept;
  /// Frees a chunk. It becomes idle instead if it belongs to the reserve or if other chunks of its
  /// arena are in use.
  void discard(std::unique_ptr<Chunk> chunk) noexcept;
  /// Calls give_back() if this leaves at most `max_idle_bytes` idle, otherwise discard().
  void give_back_within(std::unique_ptr<Chunk> chunk, std::size_t max_idle_bytes) noexcept;

  /// The chunks that a save may use, which the pool should have for the next save.
  struct Refill {
    std::size_t chunk_bytes = 0;
    std::size_t count = 0;  // of this size, including those in use
    int device = Source::kHost;
    std::size_t max_idle_bytes = std::numeric_limits<std::size_t>::max();  // chunks of all sizes
  };
  /// Replaces the current refill, but keeps its count if that is larger and for chunks of the same
  /// kind.
  void begin_refill(const Refill& refill) noexcept;
  /// Allocates one chunk or, if a device is given, one arena that is page-locked for it. Returns
  /// false if the refill is complete or cancelled. An error cancels it.
  Result<bool> grow_refill();
  /// True if grow_refill() may have chunks to allocate.
  bool has_refill() const;
  void cancel_refill() noexcept;
  /// Calls give_back_within() with the limit of the refill if the refill needs the chunk, otherwise
  /// discard().
  void give_back_to_refill(std::unique_ptr<Chunk> chunk) noexcept;

  /// Frees idle chunks until at most `bytes` are idle, and limits the reserve to `bytes`, even
  /// while it is being allocated. Cancels a refill. Arenas with chunks in use are not freed.
  void trim(std::size_t bytes);
  /// Frees idle chunks that do not belong to the reserve until at most `bytes` are idle.
  void trim_to_budget(std::size_t bytes) noexcept;
  std::size_t idle_bytes() const;

  /// Sets the target of the reserve to `bytes`, rounded up to chunks of `chunk_bytes`. A smaller
  /// target for the same chunk size is ignored. grow_reserve() allocates the missing chunks.
  void set_reserve(std::size_t bytes, std::size_t chunk_bytes);
  /// Allocates one chunk of the reserve or, if a device is given, one arena that is page-locked for
  /// it. Returns false if the reserve has reached its target or `max_bytes`. Chunks in use count,
  /// because they will be returned, and so do chunks that are being allocated. If memory cannot be
  /// allocated, the target is lowered to the present size.
  Result<bool> grow_reserve(std::size_t max_bytes, int device);
  /// Waits until no thread is allocating chunks of the reserve's size.
  void wait_until_grown();
  /// Lowers the target of the reserve to its present size.
  void end_reserve();
  /// Returns the target of the reserve in bytes.
  std::size_t reserve_bytes() const;
  /// Returns the total bytes of all chunks that have the reserve's chunk size, idle and in use.
  std::size_t reserved_bytes() const;

 private:
  // The chunks of one size.
  struct SizeClass {
    std::vector<std::unique_ptr<Chunk>> idle;  // with capacity for all chunks of the size
    std::size_t in_use = 0;
    std::size_t coming = 0;  // being allocated

    std::size_t present() const { return idle.size() + in_use; }
    /// Counts `count` chunks as coming, and reserves capacity for them.
    void begin_allocation(std::size_t count);
    void add(std::unique_ptr<Chunk> chunk) noexcept;
    /// Removes all idle chunks of the arena. Returns the last of them, which owns the arena.
    std::unique_ptr<Chunk> remove(const Arena& arena) noexcept;
  };
  // Specifies if chunks of the reserve may be freed.
  enum class Reserve { preserved, freed };

  std::size_t idle_bytes_locked() const TC_REQUIRES(mutex_);
  std::size_t reserved_chunks() const TC_REQUIRES(mutex_);
  std::size_t total_chunks(std::size_t chunk_bytes) const TC_REQUIRES(mutex_);
  bool refill_needs(std::size_t chunk_bytes) const TC_REQUIRES(mutex_);
  bool may_be_freed(const Arena& arena, long users, std::size_t chunk_bytes, Reserve reserve) const
      TC_REQUIRES(mutex_);
  // Returns the chunk, so that the caller can free the memory without holding the lock.
  std::unique_ptr<Chunk> remove_above(std::size_t bytes, Reserve reserve,
                                      std::size_t kept_size = 0);
  void make_room(std::size_t bytes, std::size_t kept_size = 0);
  static Result<std::vector<std::unique_ptr<Chunk>>> allocate_arena(std::size_t bytes,
                                                                    std::size_t count,
                                                                    int device) noexcept;
  SizeClass& end_allocation(std::size_t chunk_bytes, std::size_t count) TC_REQUIRES(mutex_);
  std::unique_ptr<Chunk> put_back(std::unique_ptr<Chunk> chunk, bool is_kept) TC_REQUIRES(mutex_);

  mutable os::Mutex mutex_;
  os::CondVar allocated_;
  std::map<std::size_t, SizeClass> sizes_ TC_GUARDED_BY(mutex_);
  std::size_t reserve_chunks_ TC_GUARDED_BY(mutex_) = 0;  // the target
  std::size_t reserve_chunk_bytes_ TC_GUARDED_BY(mutex_) = 0;
  Refill refill_ TC_GUARDED_BY(mutex_);
};

}  // namespace torch_ckpt::staging
