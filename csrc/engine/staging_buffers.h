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

/// Memory that holds a piece of a file's image between its source and the disk.
struct StagingBuffer {
  std::unique_ptr<staging::Chunk> chunk;
  std::uint64_t offset = 0;  // of the piece, in the file
  std::span<std::byte> contents;
  ImageStream::Piece piece;
};

/// Buffers are handed over by splicing list nodes, which allocates nothing.
using StagingBufferList = std::list<StagingBuffer>;

/// A stager that may wait for a buffer.
class BufferWaiter {
 public:
  /// Called once `buffer` has been filled in.
  virtual void resume() noexcept = 0;

  StagingBufferList buffer;  // one buffer or none

 protected:
  ~BufferWaiter() = default;
};

// The staging buffers of a save, as many as its byte budget allows.
//
//   1. The constructor takes idle chunks from the chunk pool. Buffers with such a chunk are free at
//      once; the others are unallocated.
//   2. Tasks allocate the others in the background: take_unallocated(), allocate(), release().
//   3. A stager calls take(). If no buffer is free, it is queued and resumed by a later release().
//   4. A writer calls release() after the write. The buffer passes to the next stager in the queue.
//   5. close() returns the memory to the chunk pool.
//
// Safe for concurrent use by multiple threads. Each buffer has one user at a time.
class StagingBuffers {
 public:
  /// If `device` is not kHost, chunks are page-locked for it. At most `waiters` wait at a time.
  StagingBuffers(Context& context, std::size_t count, std::size_t chunk_bytes, int device,
                 std::size_t waiters);

  /// Moves a free buffer to waiter.buffer and returns true. If no buffer is free, returns false;
  /// with `may_wait`, the waiter is queued and resumed once it has been given a buffer.
  bool take(BufferWaiter& waiter, bool may_wait) noexcept;
  void release(StagingBufferList buffer) noexcept;

  std::size_t unallocated_count() const;
  /// Returns buffers to be allocated together: as many as an arena has chunks, or one if the save
  /// has no device. Empty if none are left. The caller must allocate() and release() them.
  StagingBufferList take_unallocated() noexcept;
  /// Gives each of the buffers a chunk. After an error some of them may have one.
  Result<> allocate(StagingBufferList& buffers) noexcept;

  /// Returns the chunks of free buffers to the chunk pool. At this time all buffers are free but
  /// those that are being allocated; their chunks are returned by release().
  void close() noexcept;

 private:
  Context& context_;
  const std::size_t chunk_bytes_;
  const int device_;
  mutable os::Mutex mutex_;
  StagingBufferList free_ TC_GUARDED_BY(mutex_);
  StagingBufferList unallocated_ TC_GUARDED_BY(mutex_);
  std::vector<BufferWaiter*> waiting_ TC_GUARDED_BY(mutex_);
  bool is_closed_ TC_GUARDED_BY(mutex_) = false;
};

}  // namespace torch_ckpt::engine
