#include "engine/staging_buffers.h"

#include <utility>

#include "engine/delivery.h"

namespace torch_ckpt::engine {

StagingBuffers::StagingBuffers(Context& context, std::size_t count, std::size_t chunk_bytes,
                               int device, std::size_t waiters)
    : context_(context),
      count_(count),
      chunk_bytes_(chunk_bytes),
      device_(device),
      unallocated_(count) {
  waiting_.reserve(waiters);
}

void StagingBuffers::take_idle_chunks() noexcept {
  // This save allocates what it needs itself.
  context_.chunks.cancel_refill();
  const os::MutexLock lock(mutex_);
  while (!unallocated_.empty()) {
    unallocated_.front().chunk = context_.chunks.take_idle(chunk_bytes_);
    if (unallocated_.front().chunk == nullptr) return;
    free_.splice(free_.end(), unallocated_, unallocated_.begin());
  }
}

StagingBufferList StagingBuffers::take(BufferWaiter* waiter) noexcept {
  StagingBufferList taken;
  const os::MutexLock lock(mutex_);
  if (!free_.empty()) {
    taken.splice(taken.end(), free_, free_.begin());
  } else if (waiter != nullptr) {
    waiting_.push_back(waiter);
  }
  return taken;
}

void StagingBuffers::release(StagingBufferList buffer) noexcept {
  buffer.front().piece = {};
  BufferWaiter* next = nullptr;
  std::unique_ptr<staging::Chunk> late;
  {
    const os::MutexLock lock(mutex_);
    if (is_closed_) {
      late = std::move(buffer.front().chunk);
    } else {
      free_.splice(free_.end(), buffer);
      if (!waiting_.empty()) {
        next = waiting_.front();
        waiting_.erase(waiting_.begin());
      }
    }
  }
  if (next != nullptr) next->resume();
  // Without holding the lock, because freeing a chunk is slow, especially page-locked memory.
  if (late != nullptr) context_.chunks.give_back_to_refill(std::move(late));
}

void StagingBuffers::forget_waiters() noexcept {
  const os::MutexLock lock(mutex_);
  waiting_.clear();
}

std::size_t StagingBuffers::unallocated_count() const {
  const os::MutexLock lock(mutex_);
  return unallocated_.size();
}

StagingBufferList StagingBuffers::take_unallocated() noexcept {
  StagingBufferList buffers;
  const std::size_t count =
      device_ == staging::Source::kHost ? 1 : staging::chunks_of_arena(chunk_bytes_);
  const os::MutexLock lock(mutex_);
  while (!is_closed_ && !unallocated_.empty() && buffers.size() < count) {
    buffers.splice(buffers.end(), unallocated_, unallocated_.begin());
  }
  return buffers;
}

Result<> StagingBuffers::allocate(StagingBufferList& buffers) noexcept {
  try {
    // Other threads may have allocated chunks since take_idle_chunks(), for example for a reserve.
    std::size_t missing = buffers.size();
    for (StagingBuffer& buffer : buffers) {
      buffer.chunk = context_.chunks.take_idle(chunk_bytes_);
      if (buffer.chunk == nullptr) break;
      --missing;
    }
    if (missing == 0) return {};
    if (device_ != staging::Source::kHost) {
      if (auto arena = context_.chunks.take_arena(chunk_bytes_, missing, device_)) {
        auto chunk = arena->begin();
        for (StagingBuffer& buffer : buffers) {
          if (buffer.chunk == nullptr) buffer.chunk = std::move(*chunk++);
        }
        return {};
      }
      // The arena could not be allocated or page-locked. Separate, smaller chunks may still work.
    }
    for (StagingBuffer& buffer : buffers) {
      if (buffer.chunk != nullptr) continue;
      auto taken = context_.chunks.take(chunk_bytes_);
      if (!taken) return taken.error();
      buffer.chunk = std::move(*taken);
      // Page-lock the chunk here rather than in the stager, which may be using other buffers
      // meanwhile.
      if (device_ != staging::Source::kHost) {
        pin_or_warn(context_.warnings, *buffer.chunk, device_);
      }
    }
    return {};
  } catch (...) {
    return exception_error(std::current_exception(), "save");
  }
}

void StagingBuffers::close(std::size_t max_idle_bytes) noexcept {
  StagingBufferList all;
  {
    const os::MutexLock lock(mutex_);
    is_closed_ = true;
    staging::ChunkPool::Refill refill{
        .chunk_bytes = chunk_bytes_, .count = count_, .device = device_};
    if (max_idle_bytes != 0) refill.max_idle_bytes = max_idle_bytes;
    context_.chunks.begin_refill(refill);
    all.swap(free_);
  }
  for (StagingBuffer& buffer : all) {
    if (buffer.chunk == nullptr) continue;
    context_.chunks.give_back(std::move(buffer.chunk));
  }
}

}  // namespace torch_ckpt::engine
