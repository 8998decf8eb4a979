#include "engine/save_pipeline.h"

#include <algorithm>
#include <exception>
#include <span>
#include <utility>

#include "engine/delivery.h"

namespace torch_ckpt::engine {
namespace {

// Interval at which a write that is waiting for the throttle checks whether the save was cancelled.
constexpr std::chrono::milliseconds kCancelPoll{100};

// Interval at which a write that is waiting for other ranks is tried again.
constexpr std::chrono::milliseconds kCollectivePoll{1};

}  // namespace

SavePipeline::SavePipeline(Context& context, const SaveOptions& options,
                           std::vector<std::unique_ptr<FileSave>>& files, std::size_t buffers,
                           int device, FirstFailure<>& failure, Timing& timing,
                           FileEnded on_file_ended)
    : warnings_(context.warnings),
      options_(options),
      files_(files),
      failure_(failure),
      timing_(timing),
      on_file_ended_(std::move(on_file_ended)),
      stagers_(context.executor.pool(options.stagers)),
      writers_(context.executor.pool(options.writers)),
      parallel_files_(std::min(options.parallel_files, files.size())),
      buffers_(context, buffers, options.chunk_bytes, device, options.parallel_stagers),
      stager_tasks_(options.parallel_stagers),
      writer_tasks_(parallel_files_),
      allocator_tasks_(std::min(parallel_files_, buffers)),
      files_to_stage_(files.size()),
      submitted_(files.size()),
      staged_(files.size()),
      throttle_(options.max_bytes_per_second) {
  const os::MutexLock lock(claims_mutex_);
  being_staged_.reserve(parallel_files_);
  for (std::size_t i = 0; i < parallel_files_; ++i) stage_next_file();
}

void SavePipeline::start(const std::shared_ptr<const void>& owner) noexcept {
  owner_ = owner;
  if (files_.empty()) return;
  stagers_guard_.emplace(stagers_.get_executor());
  writers_guard_.emplace(writers_.get_executor());
  buffers_.take_idle_chunks();
  // There is nothing to stage for an empty file, and possibly no buffer.
  for (const auto& file : files_) {
    if (file->job.image.bytes() > 0) continue;
    submitted_.send({});
    const os::MutexLock lock(file->mutex);
    count_staged(*file, 0);
  }
  const std::size_t allocators = std::min(allocator_tasks_.size(), buffers_.unallocated_count());
  for (Task& task : std::span(allocator_tasks_).first(allocators)) {
    post(task, stagers_, [this, &task] { allocate_buffers(task, false); });
  }
  for (Stager& stager : stager_tasks_) {
    stager.pipeline = this;
    stager.resume();
  }
  for (FileWriter& writer : writer_tasks_) {
    post(writer.task, stagers_, [this, &writer] { open_next(writer); });
  }
}

void SavePipeline::end() noexcept {
  buffers_.close(options_.max_idle_bytes);
  stagers_guard_.reset();
  writers_guard_.reset();
}

// owner_ has not expired: this runs in start() or in a task, which both keep the owner alive.
template <class Run>
void SavePipeline::post(Task& task, boost::asio::io_context& pool, Run run) noexcept {
  task.post(pool, owner_.lock(), std::move(run));
}

// Runs the work and returns its result, or its exception as an error. An error fails the save.
template <class Work>
Result<> SavePipeline::capture_exceptions(const Work& work) noexcept {
  Result<> done;
  try {
    done = work();
    if (!done) failure_.set(done.error());
  } catch (...) {
    done = exception_error(std::current_exception(), "save");
    failure_.set(done.error());
  }
  return done;
}

// Runs in parallel with the stagers, because allocating a buffer may take longer than waiting for
// the disk to release one. Buffers that remain when staging is done are allocated at low priority,
// for the next save; those that remain when the save ends, by the chunk pool.
void SavePipeline::allocate_buffers(Task& task, bool low_priority) noexcept {
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

// --- stagers -----------------------------------------------------------------------------------

void SavePipeline::Stager::resume() noexcept {
  pipeline->post(task, pipeline->stagers_, [this] { pipeline->stage(*this); });
}

// Claims and begins pieces until every byte is claimed, then waits for the copies. If the stager is
// queued for a buffer, another thread may resume it before this call has returned.
void SavePipeline::stage(Stager& stager) noexcept {
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
SavePipeline::Claim SavePipeline::claim_next(bool has_failed) noexcept {
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

void SavePipeline::stage_next_file() noexcept {
  while (next_to_stage_ < files_.size()) {
    FileSave& file = *files_[next_to_stage_++];
    if (file.job.image.bytes() == 0) continue;
    file.has_stager = true;
    return being_staged_.push_back(&file);
  }
}

// Fills the buffer with the claimed piece, and hands it over if no copies from a device are
// running. If the save has failed, releases the buffer.
void SavePipeline::begin(Stager& stager, const Claim& claim, StagingBufferList buffer) noexcept {
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

Result<> SavePipeline::fill(Stager& stager, const Claim& claim, StagingBuffer& buffer,
                            std::vector<staging::DeviceRun>& runs) {
  FileSave& file = *claim.file;
  if (file.job.image.device() != staging::Source::kHost)
    pin_or_warn(warnings_, *buffer.chunk, file.job.image.device());
  const ScopedTimer timed(timing_, Activity::stage, file.number);
  buffer.file = &file;
  buffer.offset = claim.offset;
  buffer.contents = buffer.chunk->bytes().first(claim.bytes);
  auto piece = file.stream.begin(claim.offset, buffer.contents, runs);
  if (!piece) return piece.error();
  buffer.piece = std::move(*piece);
  if (runs.empty()) return {};
  if (stager.copier == nullptr) {
    auto made = staging::make_copier(options_.ready, warnings_.callback());
    if (!made) return made.error();
    stager.copier = std::move(*made);
  }
  return stager.copier->submit(runs);
}

void SavePipeline::hand_over_oldest(Stager& stager) noexcept {
  // Wait even if the save has failed, because the device may still use the memory.
  auto waited = stager.copier->wait_oldest();
  if (!waited) failure_.set(waited.error());
  hand_over(stager.in_flight);
}

// Hands the first of the buffers to the writer of its file.
void SavePipeline::hand_over(StagingBufferList& buffers) noexcept {
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

void SavePipeline::count_staged(FileSave& file, std::uint64_t bytes) noexcept {
  file.bytes_not_staged -= bytes;
  if (file.bytes_not_staged == 0) {
    file.is_staged = true;
    if (--files_to_stage_ == 0) timing_.staged_ns = timing_.now_ns();
    staged_.send({});
  }
  start_next_step(file);
}

Result<> SavePipeline::make_stream_wait(int device, void* stream) {
  for (const Stager& stager : stager_tasks_) {
    if (stager.copier == nullptr) continue;
    if (auto held = stager.copier->make_stream_wait(device, stream); !held) return held;
  }
  return {};
}

// --- writers -----------------------------------------------------------------------------------

void SavePipeline::open_next(FileWriter& writer) noexcept {
  const std::size_t next = next_to_write_++;
  if (next >= files_.size()) return;
  FileSave& file = *files_[next];
  file.has_writer = true;
  Result<> opened;
  if (!failure_.is_set())
    opened = capture_exceptions([&] { return file.output.open(options_.direct_io); });
  const os::MutexLock lock(file.mutex);
  file.status = std::move(opened);
  file.writer = &writer;
  start_next_step(file);
}

/// Starts the file's next step if it is ready: a write or, after the last write, end_file().
void SavePipeline::start_next_step(FileSave& file) noexcept {
  if (file.writer == nullptr || file.is_checksumming) return;
  FileWriter& writer = *file.writer;
  const auto is_busy = [](const FileWriter::Write& write) { return write.is_busy; };
  // After a failure, pieces may be missing, and the others are only released.
  const bool has_next =
      !file.staged.empty() && (file.staged.front().offset == file.bytes_taken || failure_.is_set());
  if (has_next) {
    const auto idle = std::find_if_not(writer.writes.begin(), writer.writes.end(), is_busy);
    if (idle == writer.writes.end()) return;
    FileWriter::Write& write = *idle;
    write.buffer.splice(write.buffer.end(), file.staged, file.staged.begin());
    write.is_busy = file.is_checksumming = true;
    file.bytes_taken += write.buffer.front().contents.size();
    post(write.task, pool_for_writing(), [this, &file, &write] { checksum(file, write); });
  } else if (file.is_staged && std::none_of(writer.writes.begin(), writer.writes.end(), is_busy)) {
    file.writer = nullptr;
    post(writer.task, pool_for_writing(), [this, &file, &writer] { end_file(file, writer); });
  }
}

void SavePipeline::checksum(FileSave& file, FileWriter::Write& write) noexcept {
  if (!failure_.is_set()) {
    const StagingBuffer& buffer = write.buffer.front();
    const auto done = capture_exceptions([&]() -> Result<> {
      const ScopedTimer timed(timing_, Activity::checksum, file.number);
      file.stream.complete(buffer.piece);
      return {};
    });
    if (done && throttle_.limits()) {
      write.begin = throttle_.reserve(buffer.contents.size());
      return wait_for_turn(file, write);
    }
  }
  this->write(file, write);
}

void SavePipeline::wait_for_turn(FileSave& file, FileWriter::Write& write) noexcept {
  const auto now = Throttle::Clock::now();
  {
    const os::MutexLock lock(write.timer_mutex);
    bool waits = false;
    if (now < write.begin && !failure_.is_set()) {
      static_cast<void>(capture_exceptions([&]() -> Result<> {
        if (!write.timer) write.timer.emplace(writers_);
        write.timer->expires_at(std::min(write.begin, now + kCancelPoll));
        write.timer->async_wait(write.task.handler(
            owner_.lock(), [this, &file, &write] { wait_for_turn(file, write); }));
        waits = true;
        return {};
      }));
    }
    if (waits) return;
    // Destroy the timer here, because that takes a lock inside Asio. In a forked child that
    // destroys the save, the lock might be held forever.
    write.timer.reset();
  }
  this->write(file, write);
}

void SavePipeline::write(FileSave& file, FileWriter::Write& write) noexcept {
  const StagingBuffer& buffer = write.buffer.front();
  const std::size_t bytes = buffer.contents.size();
  const bool is_collective = file.output.is_collective(buffer.offset, bytes);
  if (!is_collective) {
    // Let another thread checksum the next buffer during this write.
    const os::MutexLock lock(file.mutex);
    file.is_checksumming = false;
    start_next_step(file);
  }
  Result<> written;
  if (!failure_.is_set()) {
    written = capture_exceptions([&]() -> Result<> {
      const ScopedTimer timed(timing_, Activity::write, file.number);
      auto done = file.output.write(*buffer.chunk, bytes, buffer.offset, write.written);
      if (!done) return done.error();
      file.bytes_written += *done - write.written;
      write.written = *done;
      return {};
    });
    if (written && write.written < bytes) {
      write.begin = Throttle::Clock::now() + kCollectivePoll;
      return post(write.task, writers_, [this, &file, &write] { wait_for_turn(file, write); });
    }
  }
  write.written = 0;
  buffers_.release(std::move(write.buffer));
  const os::MutexLock lock(file.mutex);
  if (!written && file.status) file.status = std::move(written);
  if (is_collective) file.is_checksumming = false;
  write.is_busy = false;
  start_next_step(file);
}

void SavePipeline::end_file(FileSave& file, FileWriter& writer) noexcept {
  Result<> status;
  {
    const os::MutexLock lock(file.mutex);
    status = std::move(file.status);
  }
  if (status) {
    status = capture_exceptions([&]() -> Result<> {
      if (failure_.is_set())
        return format_error(Errc::cancelled, "another file of this save failed");
      return file.output.finish(options_.sync, timing_, file.number);
    });
  }
  file.output.abandon();
  on_file_ended_(file, std::move(status));
  open_next(writer);
}

}  // namespace torch_ckpt::engine
