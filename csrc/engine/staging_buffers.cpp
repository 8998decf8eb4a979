#include "engine/staging_buffers.h"

#include <utility>

#include "engine/delivery.h"

namespace torch_ckpt::engine {

StagingBuffers::StagingBuffers(Context& context, std::size_t count, std::size_t chunk_bytes,
                               int device, std::size_t waiters)
    : context_(context), chunk_bytes_(chunk_bytes), device_(device) {
  waiting_.reserve(waiters);
  for (std::size_t i = 0; i < count; ++i) {
    unmade_.emplace_back();
    unmade_.back().chunk = context_.chunks.take_kept(chunk_bytes);
    if (unmade_.back().chunk != nullptr) free_.splice(free_.end(), unmade_, --unmade_.end());
  }
}

bool StagingBuffers::take(BufferWaiter& waiter, bool waits) noexcept {
  const os::MutexLock lock(mutex_);
  if (free_.empty()) {
    if (waits) waiting_.push_back(&waiter);
    return false;
  }
  waiter.buffer.splice(waiter.buffer.end(), free_, free_.begin());
  return true;
}

void StagingBuffers::release(StagingBufferList buffer) noexcept {
  buffer.front().piece = {};
  BufferWaiter* next = nullptr;
  std::unique_ptr<staging::Chunk> too_late;
  {
    const os::MutexLock lock(mutex_);
    if (is_closed_) {
      too_late = std::move(buffer.front().chunk);
    } else if (waiting_.empty()) {
      free_.splice(free_.end(), buffer);
    } else {
      next = waiting_.front();
      waiting_.erase(waiting_.begin());
      next->buffer.splice(next->buffer.end(), buffer);
    }
  }
  if (next != nullptr) next->resume();
  // The budget is the next save's. Freeing memory takes long, and unlocking its pages longer.
  if (too_late != nullptr) context_.chunks.discard(std::move(too_late));
}

std::size_t StagingBuffers::unmade() const {
  const os::MutexLock lock(mutex_);
  return unmade_.size();
}

StagingBufferList StagingBuffers::take_unmade() noexcept {
  StagingBufferList buffers;
  const std::size_t most =
      device_ == staging::Source::kHost ? 1 : staging::chunks_of_arena(chunk_bytes_);
  const os::MutexLock lock(mutex_);
  while (!is_closed_ && !unmade_.empty() && buffers.size() < most) {
    buffers.splice(buffers.end(), unmade_, unmade_.begin());
  }
  return buffers;
}

Result<> StagingBuffers::make(StagingBufferList& buffers) noexcept {
  try {
    if (device_ != staging::Source::kHost) {
      if (auto arena = context_.chunks.take_arena(chunk_bytes_, buffers.size(), device_)) {
        auto chunk = arena->begin();
        for (StagingBuffer& buffer : buffers) buffer.chunk = std::move(*chunk++);
        return {};
      }
      // Less memory at a time may still be had or page-locked.
    }
    for (StagingBuffer& buffer : buffers) {
      auto taken = context_.chunks.take(chunk_bytes_);
      if (!taken) return taken.error();
      buffer.chunk = std::move(*taken);
      // Pinned here: only the work that waits for this buffer is held up.
      if (device_ != staging::Source::kHost) {
        pin_or_warn(context_.warnings, *buffer.chunk, device_);
      }
    }
    return {};
  } catch (...) {
    return exception_error(std::current_exception(), "save");
  }
}

void StagingBuffers::close() noexcept {
  StagingBufferList all;
  {
    const os::MutexLock lock(mutex_);
    is_closed_ = true;
    all.swap(free_);
  }
  for (StagingBuffer& buffer : all) {
    if (buffer.chunk == nullptr) continue;
    context_.chunks.give_back(std::move(buffer.chunk));
  }
}

}  // namespace torch_ckpt::engine
