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
      buffers_(context, buffers, options.chunk_bytes, device, parallel_files_),
      stager_tasks_(parallel_files_),
      writer_tasks_(parallel_files_),
      allocator_tasks_(std::min(parallel_files_, buffers)),
      files_to_stage_(files.size()),
      submitted_(files.size()),
      staged_(files.size()),
      throttle_(options.max_bytes_per_second) {}

void SavePipeline::start(const std::shared_ptr<const void>& owner) noexcept {
  owner_ = owner;
  if (files_.empty()) return;
  stagers_guard_.emplace(stagers_.get_executor());
  writers_guard_.emplace(writers_.get_executor());
  buffers_.take_idle_chunks();
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
  buffers_.close();
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
// for the next save.
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

void SavePipeline::stage(Stager& stager) noexcept {
  while (true) {
    if (stager.file == nullptr) {
      const std::size_t next = next_to_stage_++;
      if (next >= files_.size()) return;
      stager.file = files_[next].get();
      stager.file->has_stager = true;
      stager.offset = 0;
    }
    if (!stage_file(stager)) return;
    FileSave& file = *std::exchange(stager.file, nullptr);
    {
      const os::MutexLock lock(file.mutex);
      file.is_staged = true;
      start_next_step(file);
    }
    if (--files_to_stage_ == 0) timing_.staged_ns = timing_.now_ns();
    staged_.send({});
  }
}

/// Returns false if the stager was queued for a buffer. The caller must not touch it after that,
/// because another thread may resume it at any time.
bool SavePipeline::stage_file(Stager& stager) noexcept {
  FileSave& file = *stager.file;
  bool waits = false;
  static_cast<void>(capture_exceptions([&]() -> Result<> {
    while (stager.offset < file.job.image.bytes() && !failure_.is_set()) {
      while (!stager.in_flight.empty() &&
             file.stream.copies_are_done(stager.in_flight.front().piece)) {
        hand_over_oldest(stager);
      }
      // Hand over all pieces in flight before waiting for a buffer.
      const bool may_wait = stager.in_flight.empty();
      if (stager.buffer.empty() && !buffers_.take(stager, may_wait)) {
        waits = may_wait;
        if (waits) return {};
        hand_over_oldest(stager);
        continue;
      }
      if (auto begun = begin_next_piece(stager); !begun) return begun;
    }
    return {};
  }));
  if (waits) return false;
  if (!stager.buffer.empty()) buffers_.release(std::move(stager.buffer));
  submitted_.send({});
  while (!stager.in_flight.empty()) hand_over_oldest(stager);
  return true;
}

Result<> SavePipeline::begin_next_piece(Stager& stager) {
  const FileImage& image = stager.file->job.image;
  StagingBuffer& buffer = stager.buffer.front();
  // The buffer was released without memory because the save has failed.
  if (buffer.chunk == nullptr) return {};
  if (image.device() != staging::Source::kHost)
    pin_or_warn(warnings_, *buffer.chunk, image.device());
  const std::span<std::byte> memory = buffer.chunk->bytes();
  const ScopedTimer timed(timing_, Activity::stage, stager.file->number);
  buffer.offset = stager.offset;
  buffer.contents =
      memory.first(std::min<std::uint64_t>(memory.size(), image.bytes() - stager.offset));
  auto piece = stager.file->stream.begin(buffer.contents);
  if (!piece) return piece.error();
  buffer.piece = std::move(*piece);
  stager.offset += buffer.contents.size();
  stager.in_flight.splice(stager.in_flight.end(), stager.buffer);
  return {};
}

void SavePipeline::hand_over_oldest(Stager& stager) noexcept {
  FileSave& file = *stager.file;
  // Wait even if the save has failed, because the device may still use the memory.
  auto waited = file.stream.wait_for_copies(stager.in_flight.front().piece);
  if (!waited) failure_.set(waited.error());
  file.bytes_staged += stager.in_flight.front().contents.size();
  const os::MutexLock lock(file.mutex);
  file.staged.splice(file.staged.end(), stager.in_flight, stager.in_flight.begin());
  start_next_step(file);
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
  if (!file.staged.empty()) {
    const auto idle = std::find_if_not(writer.writes.begin(), writer.writes.end(), is_busy);
    if (idle == writer.writes.end()) return;
    FileWriter::Write& write = *idle;
    write.buffer.splice(write.buffer.end(), file.staged, file.staged.begin());
    write.is_busy = file.is_checksumming = true;
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
  bool waits = false;
  if (now < write.begin && !failure_.is_set()) {
    static_cast<void>(capture_exceptions([&]() -> Result<> {
      if (!write.timer) write.timer.emplace(writers_);
      write.timer->expires_at(std::min(write.begin, now + kCancelPoll));
      write.timer->async_wait(
          write.task.handler(owner_.lock(), [this, &file, &write] { wait_for_turn(file, write); }));
      waits = true;
      return {};
    }));
  }
  if (waits) return;
  // Destroy the timer here, because that takes a lock inside Asio. In a forked child that destroys
  // the save, the lock might be held forever.
  write.timer.reset();
  this->write(file, write);
}

void SavePipeline::write(FileSave& file, FileWriter::Write& write) noexcept {
  {
    // Let another thread checksum the next buffer during this write.
    const os::MutexLock lock(file.mutex);
    file.is_checksumming = false;
    start_next_step(file);
  }
  Result<> written;
  if (!failure_.is_set()) {
    const StagingBuffer& buffer = write.buffer.front();
    const ScopedTimer timed(timing_, Activity::write, file.number);
    written = capture_exceptions(
        [&] { return file.output.write(*buffer.chunk, buffer.contents.size(), buffer.offset); });
    if (written) file.bytes_written += buffer.contents.size();
  }
  buffers_.release(std::move(write.buffer));
  const os::MutexLock lock(file.mutex);
  if (!written && file.status) file.status = std::move(written);
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
