#include "staging/chunk_pool.h"

#include <algorithm>

#include "os/fork_guard.h"
#include "staging/device_copy.h"

namespace torch_ckpt::staging {

Result<std::unique_ptr<Chunk>> Chunk::allocate(std::size_t bytes) {
  auto pages = os::Pages::allocate(bytes);
  if (!pages) return pages.error();
  return std::unique_ptr<Chunk>(new Chunk(std::move(*pages)));
}

Chunk::~Chunk() {
  if (pinned_for_ != Source::kHost) device_support()->unpin(bytes(), pinned_for_);
}

Result<> Chunk::pin(int device) {
  if (pinned_for_ != Source::kHost || device_support() == nullptr) return {};
  auto done = device_support()->pin(bytes(), device);
  if (done) pinned_for_ = device;
  return done;
}

ChunkPool& ChunkPool::instance() { return os::ForkLocal<ChunkPool>::get(); }

std::unique_ptr<Chunk> ChunkPool::take_kept(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const auto& chunk) {
    return chunk->bytes().size() == bytes;
  });
  if (found == kept_.end()) return nullptr;
  std::unique_ptr<Chunk> chunk = std::move(*found);
  // Chunks of one size are alike, so that their order does not matter.
  *found = std::move(kept_.back());
  kept_.pop_back();
  return chunk;
}

Result<std::unique_ptr<Chunk>> ChunkPool::take(std::size_t bytes) {
  if (auto chunk = take_kept(bytes)) return chunk;
  {
    std::lock_guard lock(mutex_);
    // Chunks of other sizes make room, or changing the size would exceed the budget of both.
    for (std::size_t freed = 0; freed < bytes && !kept_.empty();) {
      freed += kept_.back()->bytes().size();
      kept_.pop_back();
    }
  }
  return Chunk::allocate(bytes);
}

void ChunkPool::give_back(std::unique_ptr<Chunk> chunk) {
  std::lock_guard lock(mutex_);
  kept_.push_back(std::move(chunk));
}

void ChunkPool::trim(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  std::size_t kept = 0;
  for (const auto& chunk : kept_) kept += chunk->bytes().size();
  while (kept > bytes) {
    kept -= kept_.back()->bytes().size();
    kept_.pop_back();
  }
}

std::size_t ChunkPool::kept_bytes() const {
  std::lock_guard lock(mutex_);
  std::size_t kept = 0;
  for (const auto& chunk : kept_) kept += chunk->bytes().size();
  return kept;
}

}  // namespace torch_ckpt::staging
