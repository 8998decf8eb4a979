#include "staging/chunk_pool.h"

#include <algorithm>
#include <exception>

#include "checked_math.h"
#include "staging/device_copy.h"

namespace torch_ckpt::staging {

Result<std::shared_ptr<Arena>> Arena::allocate(std::size_t bytes) {
  auto pages = os::Pages::allocate(bytes);
  if (!pages) return pages.error();
  return std::shared_ptr<Arena>(new Arena(std::move(*pages)));
}

// A forked child does not have the memory, and must not touch the parent's device.
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

std::unique_ptr<Chunk> ChunkPool::take_idle(std::size_t bytes) noexcept {
  const os::MutexLock lock(mutex_);
  const auto found = sizes_.find(bytes);
  if (found == sizes_.end() || found->second.idle.empty()) return nullptr;
  std::unique_ptr<Chunk> chunk = std::move(found->second.idle.back());
  found->second.idle.pop_back();
  --chunk->arena_->idle_chunks_;
  ++found->second.in_use;
  return chunk;
}

Result<std::unique_ptr<Chunk>> ChunkPool::take(std::size_t bytes) {
  if (auto chunk = take_idle(bytes)) return chunk;
  auto made = take_arena(bytes, 1, Source::kHost);
  if (!made) return made.error();
  return std::move(made->front());
}

Result<std::vector<std::unique_ptr<Chunk>>> ChunkPool::take_arena(std::size_t bytes,
                                                                  std::size_t count, int device) {
  make_room(bytes * count);
  {
    const os::MutexLock lock(mutex_);
    sizes_[bytes].begin_allocation(count);
  }
  auto chunks = allocate_arena(bytes, count, device);
  const os::MutexLock lock(mutex_);
  SizeClass& size_class = end_allocation(bytes, count);
  if (chunks) size_class.in_use += count;
  return chunks;
}

/// Never throws an exception, so that the caller can always call end_allocation().
Result<std::vector<std::unique_ptr<Chunk>>> ChunkPool::allocate_arena(std::size_t bytes,
                                                                      std::size_t count,
                                                                      int device) noexcept {
  try {
    auto arena = Arena::allocate(bytes * count);
    if (!arena) return arena.error();
    if (device != Source::kHost) {
      TC_TRY((*arena)->pin(device));
    }
    std::vector<std::unique_ptr<Chunk>> chunks;
    chunks.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::span<std::byte> part = (*arena)->bytes().subspan(i * bytes, bytes);
      chunks.push_back(std::unique_ptr<Chunk>(new Chunk(*arena, part)));
    }
    return chunks;
  } catch (...) {
    return exception_error(std::current_exception(), "allocate");
  }
}

/// Frees idle chunks totalling at least `bytes` before that much is allocated. Otherwise, a save
/// whose chunk size differs from the previous save's would need memory for both. Keeps the chunks
/// of `kept_size`.
void ChunkPool::make_room(std::size_t bytes, std::size_t kept_size) {
  for (std::size_t freed = 0; freed < bytes;) {
    const auto chunk = remove_above(0, Reserve::preserved, kept_size);
    if (chunk == nullptr) break;
    freed += chunk->arena_->bytes().size();
  }
}

void ChunkPool::SizeClass::begin_allocation(std::size_t count) {
  const std::size_t needed = present() + coming + count;
  if (idle.capacity() < needed) idle.reserve(std::max(needed, 2 * idle.capacity()));
  coming += count;
}

void ChunkPool::SizeClass::add(std::unique_ptr<Chunk> chunk) noexcept {
  ++chunk->arena_->idle_chunks_;
  idle.push_back(std::move(chunk));
}

std::unique_ptr<Chunk> ChunkPool::SizeClass::remove(const Arena& arena) noexcept {
  std::unique_ptr<Chunk> last;
  for (std::size_t i = idle.size(), left = arena.idle_chunks_; left > 0 && i-- > 0;) {
    if (idle[i]->arena_.get() != &arena) continue;
    last = std::move(idle[i]);
    idle[i] = std::move(idle.back());
    idle.pop_back();
    --last->arena_->idle_chunks_;
    --left;
  }
  return last;
}

void ChunkPool::give_back(std::unique_ptr<Chunk> chunk) noexcept {
  const os::MutexLock lock(mutex_);
  put_back(std::move(chunk), true);
}

void ChunkPool::give_back_within(std::unique_ptr<Chunk> chunk,
                                 std::size_t max_idle_bytes) noexcept {
  std::unique_ptr<Chunk> freed;
  const os::MutexLock lock(mutex_);
  const bool has_room = idle_bytes_locked() + chunk->bytes().size() <= max_idle_bytes;
  freed = put_back(std::move(chunk), has_room);
}

void ChunkPool::discard(std::unique_ptr<Chunk> chunk) noexcept {
  give_back_within(std::move(chunk), 0);
}

void ChunkPool::give_back_to_refill(std::unique_ptr<Chunk> chunk) noexcept {
  std::unique_ptr<Chunk> freed;
  const os::MutexLock lock(mutex_);
  const std::size_t bytes = chunk->bytes().size();
  const bool is_kept = refill_needs(bytes) && idle_bytes_locked() + bytes <= refill_.max_idle_bytes;
  freed = put_back(std::move(chunk), is_kept);
}

void ChunkPool::begin_refill(const Refill& refill) noexcept {
  const os::MutexLock lock(mutex_);
  const bool is_same_kind = refill_.chunk_bytes == refill.chunk_bytes &&
                            refill_.device == refill.device &&
                            refill_.max_idle_bytes == refill.max_idle_bytes;
  const std::size_t before = is_same_kind ? refill_.count : 0;
  refill_ = refill;
  refill_.count = std::max(refill.count, before);
}

Result<bool> ChunkPool::grow_refill() {
  Refill step;
  {
    const os::MutexLock lock(mutex_);
    step = refill_;
    step.count -= std::min(step.count, total_chunks(step.chunk_bytes));
    if (step.count == 0) return false;
    const std::size_t most =
        step.device != Source::kHost ? chunks_of_arena(step.chunk_bytes) : std::size_t{1};
    const std::size_t idle = std::min(idle_bytes_locked(), step.max_idle_bytes);
    step.count = std::min({step.count, most, (step.max_idle_bytes - idle) / step.chunk_bytes});
    if (step.count == 0) return false;
    sizes_[step.chunk_bytes].begin_allocation(step.count);
  }
  make_room(step.chunk_bytes * step.count, step.chunk_bytes);
  auto made = allocate_arena(step.chunk_bytes, step.count, step.device);
  const os::MutexLock lock(mutex_);
  // If not, the refill was cancelled, or a save has allocated the chunks meanwhile.
  const bool is_needed = refill_needs(step.chunk_bytes);
  SizeClass& chunks = end_allocation(step.chunk_bytes, step.count);
  if (!made) {
    refill_.count = 0;
    return made.error();
  }
  if (!is_needed) return false;
  for (auto& chunk : *made) chunks.add(std::move(chunk));
  return true;
}

bool ChunkPool::has_refill() const {
  const os::MutexLock lock(mutex_);
  return total_chunks(refill_.chunk_bytes) < refill_.count;
}

void ChunkPool::cancel_refill() noexcept {
  const os::MutexLock lock(mutex_);
  refill_.count = 0;
}

/// Returns true if chunks of this size, which the pool already counts, are part of the refill.
bool ChunkPool::refill_needs(std::size_t chunk_bytes) const {
  return chunk_bytes == refill_.chunk_bytes && total_chunks(chunk_bytes) <= refill_.count;
}

void ChunkPool::trim(std::size_t bytes) {
  cancel_refill();
  {
    const os::MutexLock lock(mutex_);
    if (reserve_chunks_ > 0) {
      reserve_chunks_ = std::min(reserve_chunks_, bytes / reserve_chunk_bytes_);
    }
  }
  trim_to_budget(bytes);
  // The reserve may own part of an arena: freeing the arena makes the reserve smaller than its
  // target.
  bool has_freed = false;
  while (remove_above(bytes, Reserve::freed) != nullptr) has_freed = true;
  if (has_freed) end_reserve();
}

void ChunkPool::trim_to_budget(std::size_t bytes) noexcept {
  while (remove_above(bytes, Reserve::preserved) != nullptr) continue;
}

std::size_t ChunkPool::idle_bytes() const {
  const os::MutexLock lock(mutex_);
  return idle_bytes_locked();
}

void ChunkPool::set_reserve(std::size_t bytes, std::size_t chunk_bytes) {
  const os::MutexLock lock(mutex_);
  const std::size_t chunks = divide_up(bytes, chunk_bytes);
  reserve_chunks_ =
      chunk_bytes == reserve_chunk_bytes_ ? std::max(reserve_chunks_, chunks) : chunks;
  reserve_chunk_bytes_ = chunk_bytes;
}

Result<bool> ChunkPool::grow_reserve(std::size_t max_bytes, int device) {
  std::size_t bytes = 0;
  std::size_t count = 1;
  {
    const os::MutexLock lock(mutex_);
    bytes = reserve_chunk_bytes_;
    const std::size_t total = total_chunks(bytes);
    // The first comparison is true if there is no reserve, so the second does not divide by zero.
    if (total >= reserve_chunks_ || total >= max_bytes / bytes) return false;
    if (device != Source::kHost) {
      count =
          std::min({chunks_of_arena(bytes), reserve_chunks_ - total, max_bytes / bytes - total});
    }
    sizes_[bytes].begin_allocation(count);
  }
  auto made = allocate_arena(bytes, count, device);
  const os::MutexLock lock(mutex_);
  // If not, the reserve was trimmed, or a save has allocated the chunks meanwhile.
  const bool is_needed = bytes == reserve_chunk_bytes_ && total_chunks(bytes) <= reserve_chunks_;
  SizeClass& chunks = end_allocation(bytes, count);
  if (!made) {
    reserve_chunks_ = std::min(reserve_chunks_, total_chunks(reserve_chunk_bytes_));
    return made.error();
  }
  if (is_needed) {
    for (auto& chunk : *made) chunks.add(std::move(chunk));
  }
  return true;
}

void ChunkPool::wait_until_grown() {
  const os::MutexLock lock(mutex_);
  while (total_chunks(reserve_chunk_bytes_) > reserved_chunks()) allocated_.wait(mutex_);
}

void ChunkPool::end_reserve() {
  const os::MutexLock lock(mutex_);
  reserve_chunks_ = std::min(reserve_chunks_, total_chunks(reserve_chunk_bytes_));
}

std::size_t ChunkPool::reserve_bytes() const {
  const os::MutexLock lock(mutex_);
  return reserve_chunks_ * reserve_chunk_bytes_;
}

std::size_t ChunkPool::reserved_bytes() const {
  const os::MutexLock lock(mutex_);
  return reserved_chunks() * reserve_chunk_bytes_;
}

std::size_t ChunkPool::idle_bytes_locked() const {
  std::size_t total = 0;
  for (const auto& [bytes, chunks] : sizes_) total += bytes * chunks.idle.size();
  return total;
}

/// Returns the number of chunks that have the reserve's chunk size, idle and in use.
std::size_t ChunkPool::reserved_chunks() const {
  const auto found = sizes_.find(reserve_chunk_bytes_);
  return found == sizes_.end() ? 0 : found->second.present();
}

/// Returns the number of chunks of this size, including those that are being allocated.
std::size_t ChunkPool::total_chunks(std::size_t chunk_bytes) const {
  const auto found = sizes_.find(chunk_bytes);
  return found == sizes_.end() ? 0 : found->second.present() + found->second.coming;
}

/// True if the arena's `users` chunks are all idle, and the reserve either does not need them or
/// need not be preserved.
bool ChunkPool::may_be_freed(const Arena& arena, long users, std::size_t chunk_bytes,
                             Reserve reserve) const {
  if (static_cast<std::size_t>(users) != arena.idle_chunks_) return false;
  if (reserve == Reserve::freed || chunk_bytes != reserve_chunk_bytes_) return true;
  return reserved_chunks() >= reserve_chunks_ + arena.idle_chunks_;
}

/// If more than `bytes` are idle, removes the chunks of an arena that may be freed and whose size
/// is not `kept_size`, and returns the last of them. Returns nullptr if there is nothing to free.
std::unique_ptr<Chunk> ChunkPool::remove_above(std::size_t bytes, Reserve reserve,
                                               std::size_t kept_size) {
  const os::MutexLock lock(mutex_);
  if (idle_bytes_locked() <= bytes) return nullptr;
  for (auto& [size, chunks] : sizes_) {
    if (size == kept_size) continue;
    for (auto chunk = chunks.idle.rbegin(); chunk != chunks.idle.rend(); ++chunk) {
      const std::shared_ptr<Arena>& arena = (*chunk)->arena_;
      if (may_be_freed(*arena, arena.use_count(), size, reserve)) return chunks.remove(*arena);
    }
  }
  return nullptr;
}

/// Must be called after begin_allocation(), whether or not the allocation has succeeded.
ChunkPool::SizeClass& ChunkPool::end_allocation(std::size_t chunk_bytes, std::size_t count) {
  SizeClass& chunks = sizes_[chunk_bytes];
  chunks.coming -= count;
  allocated_.notify_all();
  return chunks;
}

/// Makes a chunk idle. If it is not kept and its arena may be freed, removes the arena's chunks,
/// and returns the last of them, so that the caller can free the memory without holding the lock.
std::unique_ptr<Chunk> ChunkPool::put_back(std::unique_ptr<Chunk> chunk, bool is_kept) {
  const std::size_t bytes = chunk->bytes().size();
  const Arena& arena = *chunk->arena_;
  const long users = chunk->arena_.use_count();
  SizeClass& chunks = sizes_[bytes];
  if (chunks.in_use > 0) --chunks.in_use;
  chunks.add(std::move(chunk));
  if (is_kept || !may_be_freed(arena, users, bytes, Reserve::preserved)) return nullptr;
  return chunks.remove(arena);
}

}  // namespace torch_ckpt::staging
