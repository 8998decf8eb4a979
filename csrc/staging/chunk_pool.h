#pragma once

#include <algorithm>
#include <cstddef>
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

// Memory that one or several chunks are cut from: one mapping and, if it is page-locked, one
// registration with a device, since each registration takes time of the driver whatever its size.
// It is freed with its last chunk. Memory of several chunks is always page-locked.
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
  std::size_t kept_ = 0;  // chunks that the pool has; guarded by the pool's mutex
};

// One piece of host memory that a file image passes through. Page-aligned and prefaulted.
// Not thread-safe; whoever holds the chunk uses it alone.
class Chunk {
 public:
  static Result<std::unique_ptr<Chunk>> allocate(std::size_t bytes);

  std::span<std::byte> bytes() const { return bytes_; }

  /// Page-locks the chunk for copies from a device; does nothing when it is already, or without
  /// devices.
  Result<> pin(int device) { return arena_->pin(device); }

 private:
  friend class ChunkPool;
  Chunk(std::shared_ptr<Arena> arena, std::span<std::byte> bytes)
      : arena_(std::move(arena)), bytes_(bytes) {}

  std::shared_ptr<Arena> arena_;
  std::span<std::byte> bytes_;
};

/// Chunks of an arena that is page-locked. So few bytes that the first of them is soon there, and
/// so many that registrations do not count.
constexpr std::size_t chunks_of_arena(std::size_t chunk_bytes) {
  constexpr std::size_t kArenaBytes = std::size_t{64} << 20;
  return std::max<std::size_t>(kArenaBytes / chunk_bytes, 1);
}

// Keeps chunks from one save to the next, since a cold page costs three times a warm one.
// A reserve is made ahead of need, and no save or load shrinks it.
// Memory goes back to the system by whole arenas: the chunks of an arena, once all of them are
// kept. Safe for concurrent use by multiple threads.
class ChunkPool {
 public:
  /// A kept chunk of just this size, or a new one, for which kept chunks of other sizes are freed,
  /// as far as they are not of the reserve.
  Result<std::unique_ptr<Chunk>> take(std::size_t bytes);
  /// `count` new chunks, cut from one arena that is page-locked for `device`. Makes room as take().
  Result<std::vector<std::unique_ptr<Chunk>>> take_arena(std::size_t bytes, std::size_t count,
                                                         int device);
  /// A kept chunk of just this size, or nullptr.
  std::unique_ptr<Chunk> take_kept(std::size_t bytes);
  /// Every chunk that was taken comes back by one of these. The second frees it, unless it is of
  /// the reserve or other chunks of its arena are in use; the third where more than `most_kept`
  /// bytes would be kept with it. They need no memory: that was made when the chunk was taken.
  void give_back(std::unique_ptr<Chunk> chunk) noexcept;
  void discard(std::unique_ptr<Chunk> chunk) noexcept;
  void give_back_within(std::unique_ptr<Chunk> chunk, std::size_t most_kept) noexcept;

  /// Frees kept chunks until at most `bytes` are kept; arenas in use are not freed. A reserve
  /// shrinks to that, also one that is being made.
  void trim(std::size_t bytes);
  /// The same as far as what is kept is not of the reserve: for who has a budget of his own.
  void trim_to_budget(std::size_t bytes) noexcept;
  std::size_t kept_bytes() const;

  /// Lets the reserve be `bytes` of chunks of `chunk_bytes`, rounded up to whole ones; it never
  /// shrinks by this. grow_reserve() makes what is missing.
  void set_reserve(std::size_t bytes, std::size_t chunk_bytes);
  /// Makes one chunk of the reserve or, if a device is given, one arena that is page-locked for it.
  /// False where the reserve, or `most_bytes` of it, are there. What saves have taken counts, for
  /// it comes back. Where the memory is not to be had the reserve ends with what it has got.
  Result<bool> grow_reserve(std::size_t most_bytes, int device);
  /// Waits until no thread is amid grow_reserve().
  void wait_until_grown();
  /// Lets the reserve be what is there of it.
  void end_reserve();
  /// Bytes that the reserve is meant to have.
  std::size_t reserve_bytes() const;
  /// Bytes of chunks of the reserve's size that are there, those that saves have taken included.
  std::size_t reserved_bytes() const;

 private:
  // Chunks of one size.
  struct OfSize {
    std::vector<std::unique_ptr<Chunk>> kept;  // with room for those that are lent
    std::size_t lent = 0;

    void make_room_to_lend(std::size_t count);
    void keep(std::unique_ptr<Chunk> chunk) noexcept;
    /// All kept chunks of the arena leave. Only the last one is returned: the others free nothing.
    std::unique_ptr<Chunk> remove(const Arena& arena) noexcept;
  };
  enum class Reserved { kept, freed };

  std::size_t kept_now() const TC_REQUIRES(mutex_);
  std::size_t reserved_now() const TC_REQUIRES(mutex_);
  bool may_be_freed(const Arena& arena, long users, std::size_t chunk_bytes,
                    Reserved reserved) const TC_REQUIRES(mutex_);
  // What is to be freed comes by value, so that it goes without the lock.
  std::unique_ptr<Chunk> remove_above(std::size_t bytes, Reserved reserved);
  void make_room(std::size_t bytes);
  static Result<std::vector<std::unique_ptr<Chunk>>> cut_arena(std::size_t bytes, std::size_t count,
                                                               int device);
  OfSize& count_back(const Chunk& chunk) TC_REQUIRES(mutex_);

  mutable os::Mutex mutex_;
  os::CondVar grown_;
  std::map<std::size_t, OfSize> sizes_ TC_GUARDED_BY(mutex_);
  std::size_t reserve_chunks_ TC_GUARDED_BY(mutex_) = 0;
  std::size_t reserve_chunk_bytes_ TC_GUARDED_BY(mutex_) = 0;
  std::size_t growing_ TC_GUARDED_BY(mutex_) = 0;  // chunks being made
};

}  // namespace torch_ckpt::staging
