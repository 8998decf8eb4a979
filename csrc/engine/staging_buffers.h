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

/// Memory that a part of a file's image passes through.
struct StagingBuffer {
  std::unique_ptr<staging::Chunk> chunk;
  std::uint64_t offset = 0;  // in the file, of what it holds
  std::span<std::byte> contents;
  ImageStream::Piece piece;
};

/// Buffers go from hand to hand as nodes of lists, which takes no memory.
using StagingBufferList = std::list<StagingBuffer>;

/// Who waits for a buffer.
class BufferWaiter {
 public:
  virtual void resume() noexcept = 0;

  StagingBufferList buffer;  // the one that was given; none or one

 protected:
  ~BufferWaiter() = default;
};

// The memory that a save stages in: as many chunks as its budget allows. Those that the chunk pool
// has kept are free at once, the others once somebody has made them.
// Safe for concurrent use by multiple threads, where each buffer has one user at a time.
class StagingBuffers {
 public:
  /// Chunks are page-locked for `device`, if it is one. At most `waiters` wait at a time.
  StagingBuffers(Context& context, std::size_t count, std::size_t chunk_bytes, int device,
                 std::size_t waiters);

  /// Whether there is a free buffer, which the waiter has then. Where there is none, and it waits,
  /// it is resumed once it has been given one.
  bool take(BufferWaiter& waiter, bool waits) noexcept;
  void release(StagingBufferList buffer) noexcept;

  std::size_t unmade() const;
  /// Buffers without memory that are made at once: as many as an arena has chunks, or one if there
  /// is no device. The caller makes and releases them. Empty if none are left.
  StagingBufferList take_unmade() noexcept;
  /// After an error some of the buffers may have memory.
  Result<> make(StagingBufferList& buffers) noexcept;

  /// Gives the memory back to the chunk pool: that of the free buffers, which are all that are not
  /// being made, and that of others when they are released.
  void close() noexcept;

 private:
  Context& context_;
  const std::size_t chunk_bytes_;
  const int device_;
  mutable os::Mutex mutex_;
  StagingBufferList free_ TC_GUARDED_BY(mutex_);
  StagingBufferList unmade_ TC_GUARDED_BY(mutex_);
  std::vector<BufferWaiter*> waiting_ TC_GUARDED_BY(mutex_);
  bool is_closed_ TC_GUARDED_BY(mutex_) = false;
};

}  // namespace torch_ckpt::engine
