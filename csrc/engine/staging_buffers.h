#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <vector>

#include "engine/context.h"
#include "engine/image_stream.h"
#include "error.h"
#include "os/mutex.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {

struct FileSave;

/// Memory that holds a piece of a file's image on its way from the source to the disk.
struct StagingBuffer {
  std::unique_ptr<staging::Chunk> chunk;
  FileSave* file = nullptr;
  std::uint64_t offset = 0;  // of the piece, in the file
  std::span<std::byte> contents;
  ImageStream::Piece piece;
};

/// A list, because buffers are handed over by splicing nodes, which allocates nothing.
using StagingBufferList = std::list<StagingBuffer>;

/// A stager that may wait for a buffer.
class BufferWaiter {
 public:
  /// Called after a buffer has been released. Another stager may have taken it in the meantime.
  virtual void resume() noexcept = 0;

 protected:
  ~BufferWaiter() = default;
};

// The staging buffers of a save, as many as its byte budget allows.
//
//   1. take_idle_chunks() takes chunks from the chunk pool. Buffers with such a chunk are free
//      immediately; the others are unallocated.
//   2. Tasks allocate the others in the background with take_unallocated(), allocate() and
//      release().
//   3. A stager calls take(). If no buffer is free, it is queued and resumed by a later release().
//   4. A writer calls release() after the write, which resumes the next stager in the queue.
//   5. close() returns the memory to the chunk pool, which allocates the remaining chunks for the
//      next save.
//
// Safe for concurrent use by multiple threads. Each buffer has one user at a time.
class StagingBuffers {
 public:
  /// If `device` is not kHost, chunks are page-locked for it. At most `waiters` stagers may wait at
  /// a time.
  StagingBuffers(Context& context, std::size_t count, std::size_t chunk_bytes, int device,
                 std::size_t waiters);

  /// Called once, when nothing can fail any more before close(), which returns the chunks.
  void take_idle_chunks() noexcept;

  /// Returns a list of one free buffer. If no buffer is free, returns an empty list and, unless
  /// `waiter` is nullptr, queues the waiter.
  StagingBufferList take(BufferWaiter* waiter) noexcept;
  void release(StagingBufferList buffer) noexcept;
  /// Empties the queue: stagers in it are not resumed.
  void forget_waiters() noexcept;

  std::size_t unallocated_count() const;
  /// Returns buffers to be allocated together: at most as many as an arena has chunks, or one if
  /// the save has no device. Returns an empty list if none are left. The caller must call
  /// allocate() and release() for them.
  StagingBufferList take_unallocated() noexcept;
  /// Gives each of the buffers a chunk. After an error, some of them may already have one.
  Result<> allocate(StagingBufferList& buffers) noexcept;

  /// Returns the chunks of free buffers to the chunk pool. All buffers must be free except those
  /// that are being allocated; release() returns the chunks of these if the refill of the pool
  /// needs them. The refill keeps at most `max_idle_bytes` idle; 0: no limit.
  void close(std::size_t max_idle_bytes) noexcept;

 private:
  Context& context_;
  const std::size_t count_;
  const std::size_t chunk_bytes_;
  const int device_;
  mutable os::Mutex mutex_;
  StagingBufferList free_ TC_GUARDED_BY(mutex_);
  StagingBufferList unallocated_ TC_GUARDED_BY(mutex_);
  std::vector<BufferWaiter*> waiting_ TC_GUARDED_BY(mutex_);
  bool is_closed_ TC_GUARDED_BY(mutex_) = false;
};

}  // namespace torch_ckpt::engine
