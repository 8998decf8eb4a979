#include "staging/chunk_pool.h"

#include <algorithm>

#include "staging/device_copy.h"

namespace torch_ckpt::staging {

Result<std::shared_ptr<Arena>> Arena::allocate(std::size_t bytes) {
  auto pages = os::Pages::allocate(bytes);
  if (!pages) return pages.error();
  return std::shared_ptr<Arena>(new Arena(std::move(*pages)));
}

// A forked child has neither the memory nor a right to the parent's device.
Arena::~Arena() {
  if (pinned_for_ != Source::kHost && !process_.inherited()) {
    device_support()->unpin(bytes(), pinned_for_);
  }
}

Result<> Arena::pin(int device) {
  if (pinned_for_ != Source::kHost || device_support() == nullptr) return {};
  auto done = device_support()->pin(bytes(), device);
  if (done) pinned_for_ = device;
  return done;
}

Result<std::unique_ptr<Chunk>> Chunk::allocate(std::size_t bytes) {
  auto arena = Arena::allocate(bytes);
  if (!arena) return arena.error();
  const std::span<std::byte> all = (*arena)->bytes();
  return std::unique_ptr<Chunk>(new Chunk(std::move(*arena), all));
}

std::unique_ptr<Chunk> ChunkPool::take_kept(std::size_t bytes) {
  const os::MutexLock lock(mutex_);
  const auto found = sizes_.find(bytes);
  if (found == sizes_.end() || found->second.kept.empty()) return nullptr;
  std::unique_ptr<Chunk> chunk = std::move(found->second.kept.back());
  found->second.kept.pop_back();
  --chunk->arena_->kept_;
  ++found->second.lent;
  return chunk;
}

Result<std::unique_ptr<Chunk>> ChunkPool::take(std::size_t bytes) {
  if (auto chunk = take_kept(bytes)) return chunk;
  make_room(bytes);
  auto made = Chunk::allocate(bytes);
  if (!made) return made;
  const os::MutexLock lock(mutex_);
  OfSize& of = sizes_[bytes];
  of.make_room_to_lend(1);
  ++of.lent;
  return made;
}

Result<std::vector<std::unique_ptr<Chunk>>> ChunkPool::take_arena(std::size_t bytes,
                                                                  std::size_t count, int device) {
  make_room(bytes * count);
  auto chunks = cut_arena(bytes, count, device);
  if (!chunks) return chunks;
  const os::MutexLock lock(mutex_);
  OfSize& of = sizes_[bytes];
  of.make_room_to_lend(count);
  of.lent += count;
  return chunks;
}

Result<std::vector<std::unique_ptr<Chunk>>> ChunkPool::cut_arena(std::size_t bytes,
                                                                 std::size_t count, int device) {
  auto arena = Arena::allocate(bytes * count);
  if (!arena) return arena.error();
  if (device != Source::kHost) {
    if (auto pinned = (*arena)->pin(device); !pinned) return pinned.error();
  }
  std::vector<std::unique_ptr<Chunk>> chunks;
  chunks.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::span<std::byte> part = (*arena)->bytes().subspan(i * bytes, bytes);
    chunks.push_back(std::unique_ptr<Chunk>(new Chunk(*arena, part)));
  }
  return chunks;
}

/// Frees chunks of other sizes, or a change of the size would exceed the budget of both.
void ChunkPool::make_room(std::size_t bytes) {
  for (std::size_t room = 0; room < bytes;) {
    const auto chunk = remove_above(0, Reserved::kept);
    if (chunk == nullptr) break;
    room += chunk->arena_->bytes().size();
  }
}

/// For so many more.
void ChunkPool::OfSize::make_room_to_lend(std::size_t count) {
  const std::size_t needed = kept.size() + lent + count;
  if (kept.capacity() < needed) kept.reserve(std::max(needed, 2 * kept.capacity()));
}

void ChunkPool::OfSize::keep(std::unique_ptr<Chunk> chunk) noexcept {
  ++chunk->arena_->kept_;
  kept.push_back(std::move(chunk));
}

std::unique_ptr<Chunk> ChunkPool::OfSize::remove(const Arena& arena) noexcept {
  std::unique_ptr<Chunk> last;
  for (std::size_t i = kept.size(), left = arena.kept_; left > 0 && i-- > 0;) {
    if (kept[i]->arena_.get() != &arena) continue;
    last = std::move(kept[i]);
    kept[i] = std::move(kept.back());
    kept.pop_back();
    --last->arena_->kept_;
    --left;
  }
  return last;
}

void ChunkPool::give_back(std::unique_ptr<Chunk> chunk) noexcept {
  const os::MutexLock lock(mutex_);
  OfSize& of = count_back(*chunk);
  of.keep(std::move(chunk));
}

void ChunkPool::give_back_within(std::unique_ptr<Chunk> chunk, std::size_t most_kept) noexcept {
  const bool has_room = kept_bytes() + chunk->bytes().size() <= most_kept;
  has_room ? give_back(std::move(chunk)) : discard(std::move(chunk));
}

void ChunkPool::discard(std::unique_ptr<Chunk> chunk) noexcept {
  std::unique_ptr<Chunk> freed;
  const os::MutexLock lock(mutex_);
  OfSize& of = count_back(*chunk);
  const Arena& arena = *chunk->arena_;
  const long users = chunk->arena_.use_count();
  const std::size_t bytes = chunk->bytes().size();
  of.keep(std::move(chunk));
  if (may_be_freed(arena, users, bytes, Reserved::kept)) freed = of.remove(arena);
}

void ChunkPool::trim(std::size_t bytes) {
  {
    const os::MutexLock lock(mutex_);
    if (reserve_chunks_ > 0) {
      reserve_chunks_ = std::min(reserve_chunks_, bytes / reserve_chunk_bytes_);
    }
  }
  trim_to_budget(bytes);
  // An arena of which the reserve has a part only.
  bool has_freed = false;
  while (remove_above(bytes, Reserved::freed) != nullptr) has_freed = true;
  if (has_freed) end_reserve();
}

void ChunkPool::trim_to_budget(std::size_t bytes) noexcept {
  while (remove_above(bytes, Reserved::kept) != nullptr) continue;
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
  std::size_t count = 1;
  {
    const os::MutexLock lock(mutex_);
    bytes = reserve_chunk_bytes_;
    // The first comparison is for the second's sake: without a reserve a chunk has no bytes.
    const std::size_t there = reserved_now() + growing_;
    if (there >= reserve_chunks_ || there >= most_bytes / bytes) return false;
    if (device != Source::kHost) {
      count =
          std::min({chunks_of_arena(bytes), reserve_chunks_ - there, most_bytes / bytes - there});
    }
    growing_ += count;
  }
  auto made = cut_arena(bytes, count, device);
  const os::MutexLock lock(mutex_);
  growing_ -= count;
  grown_.notify_all();
  if (!made) {
    reserve_chunks_ = std::min(reserve_chunks_, reserved_now() + growing_);
    return made.error();
  }
  // Unless the reserve was trimmed meanwhile.
  if (bytes == reserve_chunk_bytes_ && reserved_now() + count <= reserve_chunks_) {
    OfSize& of = sizes_[bytes];
    of.make_room_to_lend(count);
    for (auto& chunk : *made) of.keep(std::move(chunk));
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

/// True if all chunks of the arena, which `users` have, are kept, and if the reserve does not need
/// them or need not be `kept`.
bool ChunkPool::may_be_freed(const Arena& arena, long users, std::size_t chunk_bytes,
                             Reserved reserved) const {
  if (static_cast<std::size_t>(users) != arena.kept_) return false;
  if (reserved == Reserved::freed || chunk_bytes != reserve_chunk_bytes_) return true;
  return reserved_now() >= reserve_chunks_ + arena.kept_;
}

/// The last chunk of a kept arena that may be freed, where more than so many bytes are kept, or
/// nullptr.
std::unique_ptr<Chunk> ChunkPool::remove_above(std::size_t bytes, Reserved reserved) {
  const os::MutexLock lock(mutex_);
  if (kept_now() <= bytes) return nullptr;
  for (auto& [size, of] : sizes_) {
    for (auto chunk = of.kept.rbegin(); chunk != of.kept.rend(); ++chunk) {
      const std::shared_ptr<Arena>& arena = (*chunk)->arena_;
      if (may_be_freed(*arena, arena.use_count(), size, reserved)) return of.remove(*arena);
    }
  }
  return nullptr;
}

ChunkPool::OfSize& ChunkPool::count_back(const Chunk& chunk) {
  OfSize& of = sizes_[chunk.bytes().size()];
  if (of.lent > 0) --of.lent;
  return of;
}

}  // namespace torch_ckpt::staging
