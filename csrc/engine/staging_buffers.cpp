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
  {
    const os::MutexLock lock(mutex_);
    if (is_closed_) {
      // The budget is the next save's.
      if (auto& chunk = buffer.front().chunk; chunk != nullptr) {
        context_.chunks.discard(std::move(chunk));
      }
    } else if (waiting_.empty()) {
      free_.splice(free_.end(), buffer);
    } else {
      next = waiting_.front();
      waiting_.erase(waiting_.begin());
      next->buffer.splice(next->buffer.end(), buffer);
    }
  }
  if (next != nullptr) next->resume();
}

std::size_t StagingBuffers::unmade() const {
  const os::MutexLock lock(mutex_);
  return unmade_.size();
}

StagingBufferList StagingBuffers::take_unmade() {
  StagingBufferList buffer;
  const os::MutexLock lock(mutex_);
  if (!is_closed_ && !unmade_.empty()) buffer.splice(buffer.end(), unmade_, unmade_.begin());
  return buffer;
}

Result<> StagingBuffers::make(StagingBuffer& buffer) noexcept {
  try {
    auto taken = context_.chunks.take(chunk_bytes_);
    if (!taken) return taken.error();
    // Here, where nothing waits for it but who waits for the buffer.
    if (device_ != staging::Source::kHost) pin_or_warn(context_.warnings, **taken, device_);
    buffer.chunk = std::move(*taken);
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
