#include <algorithm>
#include <span>
#include <utility>

#include "engine/delivery.h"
#include "engine/save_session.h"

// The stagers of a save: steps 2 and 4 in save_session.h.
namespace torch_ckpt::engine {

// Runs in parallel with the stagers, because allocating a buffer may take longer than waiting for
// the disk to release one. Buffers that remain when staging is done are allocated at low priority,
// for the next save; those that remain when the save ends, by the chunk pool.
void SaveSession::allocate_buffers(Task& task, bool low_priority) noexcept {
  for (auto buffers = buffers_.take_unallocated(); !buffers.empty();
       buffers = buffers_.take_unallocated()) {
    Result<> allocated;
    // After a failure, release buffers without memory, because a stager may be waiting for one.
    if (!failure_.is_set()) allocated = buffers_.allocate(buffers);
    // Once staging is done, a failure to allocate does not matter: the next save tries again.
    const bool is_needed = files_to_stage_ > 0;
    if (!allocated && is_needed) failure_.set(allocated.error());
    while (!buffers.empty()) {
      StagingBufferList buffer;
      buffer.splice(buffer.end(), buffers, buffers.begin());
      buffers_.release(std::move(buffer));
    }
    if (!allocated && !is_needed) return;
    if (!low_priority && files_to_stage_ == 0) {
      return post(task, writers_, [this, &task] { allocate_buffers(task, true); });
    }
  }
}

void SaveSession::Stager::resume() noexcept {
  session->post(task, session->stagers_, [this] { session->stage(*this); });
}

// Claims and begins pieces until every byte is claimed, then waits for the copies. If the stager is
// queued for a buffer, another thread may resume it before this call has returned.
void SaveSession::stage(Stager& stager) noexcept {
  while (true) {
    while (!stager.in_flight.empty() && stager.copier->oldest_has_arrived()) {
      hand_over_oldest(stager);
    }
    // Hand over all pieces in flight before waiting for a buffer.
    BufferWaiter* const waiter = stager.in_flight.empty() ? &stager : nullptr;
    std::optional<Claim> claim;
    StagingBufferList buffer;
    {
      const os::MutexLock lock(claims_mutex_);
      if (being_staged_.empty()) break;
      const bool has_failed = failure_.is_set();
      if (!has_failed) buffer = buffers_.take(waiter);
      if (has_failed || !buffer.empty()) claim = claim_next(has_failed);
      // Stagers still in the queue have nothing left to do.
      if (being_staged_.empty()) buffers_.forget_waiters();
    }
    if (claim) {
      begin(stager, *claim, std::move(buffer));
    } else if (waiter == nullptr) {
      hand_over_oldest(stager);
    } else {
      return;
    }
  }
  while (!stager.in_flight.empty()) hand_over_oldest(stager);
}

// Claims the next piece of a file; after a failure, all that is left of it.
SaveSession::Claim SaveSession::claim_next(bool has_failed) noexcept {
  const auto unwritten = [](const FileSave* file) {
    return file->bytes_claimed - file->bytes_written;
  };
  const auto chosen = std::min_element(
      being_staged_.begin(), being_staged_.end(),
      [&](const FileSave* a, const FileSave* b) { return unwritten(a) < unwritten(b); });
  FileSave& file = **chosen;
  const std::uint64_t left = file.job.image.bytes() - file.bytes_claimed;
  const std::uint64_t bytes =
      has_failed ? left : std::min<std::uint64_t>(left, options_.chunk_bytes);
  const Claim claim{&file, file.bytes_claimed, bytes};
  file.bytes_claimed += bytes;
  if (bytes == left) {
    being_staged_.erase(chosen);
    stage_next_file();
  }
  return claim;
}

void SaveSession::stage_next_file() noexcept {
  while (next_to_stage_ < files_.size()) {
    FileSave& file = *files_[next_to_stage_++];
    if (file.job.image.bytes() == 0) continue;
    file.has_stager = true;
    return being_staged_.push_back(&file);
  }
}

// Fills the buffer with the claimed piece, and hands it over if no copies from a device are
// running. If the save has failed, releases the buffer.
void SaveSession::begin(Stager& stager, const Claim& claim, StagingBufferList buffer) noexcept {
  FileSave& file = *claim.file;
  std::vector<staging::DeviceRun> runs;
  const bool begun = !failure_.is_set() && capture_exceptions([&] {
                                             return fill(stager, claim, buffer.front(), runs);
                                           }).has_value();
  if ((file.bytes_not_begun -= claim.bytes) == 0) submitted_.send({});
  if (!begun) {
    // Before the bytes are counted, because the save ends with the last of them.
    if (!buffer.empty()) buffers_.release(std::move(buffer));
    const os::MutexLock lock(file.mutex);
    count_staged(file, claim.bytes);
  } else if (runs.empty()) {
    hand_over(buffer);
  } else {
    stager.in_flight.splice(stager.in_flight.end(), buffer);
  }
}

Result<> SaveSession::fill(Stager& stager, const Claim& claim, StagingBuffer& buffer,
                           std::vector<staging::DeviceRun>& runs) {
  FileSave& file = *claim.file;
  if (file.job.image.device() != staging::Source::kHost)
    pin_or_warn(context_.warnings, *buffer.chunk, file.job.image.device());
  const ScopedTimer timed(timing_, Activity::stage);
  buffer.file = &file;
  buffer.offset = claim.offset;
  buffer.contents = buffer.chunk->bytes().first(claim.bytes);
  auto piece = file.stream.begin(claim.offset, buffer.contents, runs);
  if (!piece) return piece.error();
  buffer.piece = std::move(*piece);
  if (runs.empty()) return {};
  if (stager.copier == nullptr) {
    auto made = staging::make_copier(options_.ready, context_.warnings.callback());
    if (!made) return made.error();
    stager.copier = std::move(*made);
  }
  return stager.copier->submit(runs);
}

void SaveSession::hand_over_oldest(Stager& stager) noexcept {
  // Wait even if the save has failed, because the device may still use the memory.
  auto waited = stager.copier->wait_oldest();
  if (!waited) failure_.set(waited.error());
  hand_over(stager.in_flight);
}

// Hands the first of the buffers to the writer of its file.
void SaveSession::hand_over(StagingBufferList& buffers) noexcept {
  const StagingBuffer& buffer = buffers.front();
  FileSave& file = *buffer.file;
  file.bytes_staged += buffer.contents.size();
  const os::MutexLock lock(file.mutex);
  // Search from the back, because pieces arrive almost in order.
  const auto before =
      std::find_if(file.staged.rbegin(), file.staged.rend(),
                   [&](const StagingBuffer& other) { return other.offset < buffer.offset; });
  auto next = before.base();
  file.staged.splice(next, buffers, buffers.begin());
  for (--next; next != file.staged.end() && next->offset == file.bytes_ready; ++next) {
    file.bytes_ready += next->contents.size();
  }
  count_staged(file, buffer.contents.size());
}

void SaveSession::count_staged(FileSave& file, std::uint64_t bytes) noexcept {
  file.bytes_not_staged -= bytes;
  if (file.bytes_not_staged == 0) {
    file.is_staged = true;
    if (--files_to_stage_ == 0) timing_.staged_ns = timing_.now_ns();
    staged_.send({});
  }
  start_next_step(file);
}

Result<> SaveSession::make_stream_wait(int device, void* stream) {
  if (results_.inherited()) return outcome();
  for (const Stager& stager : stager_tasks_) {
    if (stager.copier == nullptr) continue;
    TC_TRY(stager.copier->make_stream_wait(device, stream));
  }
  return {};
}

}  // namespace torch_ckpt::engine
