#include "staging/chunk_pool.h"

#include <algorithm>

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

std::unique_ptr<Chunk> ChunkPool::take_kept(std::size_t bytes) {
  const os::MutexLock lock(mutex_);
  const auto found = sizes_.find(bytes);
  if (found == sizes_.end() || found->second.kept.empty()) return nullptr;
  std::unique_ptr<Chunk> chunk = std::move(found->second.kept.back());
  found->second.kept.pop_back();
  ++found->second.lent;
  return chunk;
}

Result<std::unique_ptr<Chunk>> ChunkPool::take(std::size_t bytes) {
  if (auto chunk = take_kept(bytes)) return chunk;
  // Chunks of other sizes make room, or changing the size would exceed the budget of both.
  for (std::size_t room = 0; room < bytes;) {
    const auto chunk = remove_above(0);
    if (chunk == nullptr) break;
    room += chunk->bytes().size();
  }
  auto made = Chunk::allocate(bytes);
  if (!made) return made;
  const os::MutexLock lock(mutex_);
  OfSize& of = sizes_[bytes];
  of.make_room_to_lend();
  ++of.lent;
  return made;
}

/// For one more.
void ChunkPool::OfSize::make_room_to_lend() {
  const std::size_t needed = kept.size() + lent + 1;
  if (kept.capacity() < needed) kept.reserve(std::max(needed, 2 * kept.capacity()));
}

void ChunkPool::give_back(std::unique_ptr<Chunk> chunk) noexcept {
  const os::MutexLock lock(mutex_);
  count_back(*chunk).kept.push_back(std::move(chunk));
}

void ChunkPool::give_back_within(std::unique_ptr<Chunk> chunk, std::size_t most_kept) noexcept {
  const bool has_room = kept_bytes() + chunk->bytes().size() <= most_kept;
  has_room ? give_back(std::move(chunk)) : discard(std::move(chunk));
}

void ChunkPool::discard(std::unique_ptr<Chunk> chunk) noexcept {
  const os::MutexLock lock(mutex_);
  OfSize& of = count_back(*chunk);
  if (chunk->bytes().size() == reserve_chunk_bytes_ && reserved_now() < reserve_chunks_) {
    of.kept.push_back(std::move(chunk));
  }
}

void ChunkPool::trim(std::size_t bytes) {
  {
    const os::MutexLock lock(mutex_);
    if (reserve_chunks_ > 0) {
      reserve_chunks_ = std::min(reserve_chunks_, bytes / reserve_chunk_bytes_);
    }
  }
  trim_to_budget(bytes);
}

void ChunkPool::trim_to_budget(std::size_t bytes) noexcept {
  while (remove_above(bytes) != nullptr) continue;
}

std::size_t ChunkPool::kept_bytes() const {
  const os::MutexLock lock(mutex_);
  return kept_now();
}

void ChunkPool::set_reserve(std::size_t bytes, std::size_t chunk_bytes) {
  const os::MutexLock lock(mutex_);
  const std::size_t chunks = bytes / chunk_bytes + (bytes % chunk_bytes != 0 ? 1 : 0);
  reserve_chunks_ =
      chunk_bytes == reserve_chunk_bytes_ ? std::max(reserve_chunks_, chunks) : chunks;
  reserve_chunk_bytes_ = chunk_bytes;
}

Result<bool> ChunkPool::grow_reserve(std::size_t most_bytes, int device) {
  std::size_t bytes = 0;
  {
    const os::MutexLock lock(mutex_);
    bytes = reserve_chunk_bytes_;
    // The first comparison is for the second's sake: without a reserve a chunk has no bytes.
    const std::size_t there = reserved_now() + growing_;
    if (there >= reserve_chunks_ || there >= most_bytes / bytes) return false;
    ++growing_;
  }
  auto made = Chunk::allocate(bytes);
  Result<> pinned;
  if (made && device != Source::kHost) pinned = (*made)->pin(device);
  const os::MutexLock lock(mutex_);
  --growing_;
  grown_.notify_all();
  if (!made || !pinned) {
    reserve_chunks_ = std::min(reserve_chunks_, reserved_now() + growing_);
    return made ? pinned.error() : made.error();
  }
  // Unless the reserve was trimmed meanwhile.
  if (bytes == reserve_chunk_bytes_ && reserved_now() < reserve_chunks_) {
    OfSize& of = sizes_[bytes];
    of.make_room_to_lend();
    of.kept.push_back(std::move(*made));
  }
  return true;
}

void ChunkPool::wait_until_grown() {
  const os::MutexLock lock(mutex_);
  while (growing_ > 0) grown_.wait(mutex_);
}

void ChunkPool::end_reserve() {
  const os::MutexLock lock(mutex_);
  reserve_chunks_ = std::min(reserve_chunks_, reserved_now() + growing_);
}

std::size_t ChunkPool::reserve_bytes() const {
  const os::MutexLock lock(mutex_);
  return reserve_chunks_ * reserve_chunk_bytes_;
}

std::size_t ChunkPool::reserved_bytes() const {
  const os::MutexLock lock(mutex_);
  return reserved_now() * reserve_chunk_bytes_;
}

std::size_t ChunkPool::kept_now() const {
  std::size_t kept = 0;
  for (const auto& [bytes, of] : sizes_) kept += bytes * of.kept.size();
  return kept;
}

/// Chunks of the reserve's size, kept and lent.
std::size_t ChunkPool::reserved_now() const {
  const auto found = sizes_.find(reserve_chunk_bytes_);
  return found == sizes_.end() ? 0 : found->second.kept.size() + found->second.lent;
}

/// A kept chunk that is not of the reserve, where more than so many bytes are kept, or nullptr.
std::unique_ptr<Chunk> ChunkPool::remove_above(std::size_t bytes) {
  const os::MutexLock lock(mutex_);
  if (kept_now() <= bytes) return nullptr;
  for (auto& [size, of] : sizes_) {
    if (of.kept.empty()) continue;
    if (size == reserve_chunk_bytes_ && reserved_now() <= reserve_chunks_) continue;
    std::unique_ptr<Chunk> chunk = std::move(of.kept.back());
    of.kept.pop_back();
    return chunk;
  }
  return nullptr;
}

ChunkPool::OfSize& ChunkPool::count_back(const Chunk& chunk) {
  OfSize& of = sizes_[chunk.bytes().size()];
  if (of.lent > 0) --of.lent;
  return of;
}

}  // namespace torch_ckpt::staging
