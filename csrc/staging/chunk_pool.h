#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "error.h"
#include "os/mutex.h"
#include "os/pages.h"
#include "staging/source.h"

namespace torch_ckpt::staging {

// One piece of host memory that a file image passes through. Page-aligned and prefaulted.
// Not thread-safe; whoever holds the chunk uses it alone.
class Chunk {
 public:
  static Result<std::unique_ptr<Chunk>> allocate(std::size_t bytes);
  ~Chunk();
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  std::span<std::byte> bytes() const { return pages_.bytes(); }

  /// Page-locks the chunk for copies from a device; does nothing when it is already, or without
  /// devices.
  Result<> pin(int device);

 private:
  explicit Chunk(os::Pages pages) : pages_(std::move(pages)) {}

  os::Pages pages_;
  int pinned_for_ = Source::kHost;
};

// Keeps chunks from one save to the next, since a cold page costs three times a warm one.
// A reserve is made ahead of need, and no save or load shrinks it.
// Safe for concurrent use by multiple threads.
class ChunkPool {
 public:
  /// A kept chunk of just this size, or a new one, for which kept chunks of other sizes are freed,
  /// as far as they are not of the reserve.
  Result<std::unique_ptr<Chunk>> take(std::size_t bytes);
  /// A kept chunk of just this size, or nullptr.
  std::unique_ptr<Chunk> take_kept(std::size_t bytes);
  /// Every chunk that was taken comes back by one of these. The second frees it, unless it is of
  /// the reserve; the third where more than `most_kept` bytes would be kept with it. They need no
  /// memory: that was made when the chunk was taken.
  void give_back(std::unique_ptr<Chunk> chunk) noexcept;
  void discard(std::unique_ptr<Chunk> chunk) noexcept;
  void give_back_within(std::unique_ptr<Chunk> chunk, std::size_t most_kept) noexcept;

  /// Frees kept chunks until at most `bytes` are kept. A reserve shrinks to that, also one that is
  /// being made.
  void trim(std::size_t bytes);
  /// The same as far as what is kept is not of the reserve: for who has a budget of his own.
  void trim_to_budget(std::size_t bytes) noexcept;
  std::size_t kept_bytes() const;

  /// Lets the reserve be `bytes` of chunks of `chunk_bytes`, rounded up to whole ones; it never
  /// shrinks by this. grow_reserve() makes what is missing.
  void set_reserve(std::size_t bytes, std::size_t chunk_bytes);
  /// Makes one chunk of the reserve and page-locks it for `device`, if one is given; false where
  /// the reserve, or `most_bytes` of it, are there. What saves have taken counts, for it comes
  /// back. Where the memory is not to be had the reserve ends with what it has got.
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

    void make_room_to_lend();
  };

  std::size_t kept_now() const TC_REQUIRES(mutex_);
  std::size_t reserved_now() const TC_REQUIRES(mutex_);
  // What is to be freed comes by value, so that it goes without the lock.
  std::unique_ptr<Chunk> remove_above(std::size_t bytes);
  OfSize& count_back(const Chunk& chunk) TC_REQUIRES(mutex_);

  mutable os::Mutex mutex_;
  os::CondVar grown_;
  std::map<std::size_t, OfSize> sizes_ TC_GUARDED_BY(mutex_);
  std::size_t reserve_chunks_ TC_GUARDED_BY(mutex_) = 0;
  std::size_t reserve_chunk_bytes_ TC_GUARDED_BY(mutex_) = 0;
  std::size_t growing_ TC_GUARDED_BY(mutex_) = 0;  // chunks being made
};

}  // namespace torch_ckpt::staging
