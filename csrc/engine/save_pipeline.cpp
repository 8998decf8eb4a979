#include "engine/save_pipeline.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "engine/delivery.h"

namespace torch_ckpt::engine {
namespace {

// How long a write that waits for its turn may not notice that the save was cancelled.
constexpr std::chrono::milliseconds kCancelPoll{100};

}  // namespace

SavePipeline::SavePipeline(Context& context, const SaveOptions& options,
                           std::vector<std::unique_ptr<FileSave>>& files, std::size_t buffers,
                           int device, FirstFailure<>& failure, Timing& timing, FileEnded ended)
    : warnings_(context.warnings),
      options_(options),
      files_(files),
      failure_(failure),
      timing_(timing),
      ended_(std::move(ended)),
      stagers_(context.executor.pool(options.stagers)),
      writers_(context.executor.pool(options.writers)),
      at_once_(std::min(options.parallel_files, files.size())),
      buffers_(context, buffers, options.chunk_bytes, device, at_once_),
      stager_tasks_(at_once_),
      writer_tasks_(at_once_),
      maker_tasks_(std::min(at_once_, buffers_.unmade())),
      to_stage_(files.size()),
      submitted_(files.size()),
      staged_(files.size()),
      throttle_(options.max_bytes_per_second) {}

void SavePipeline::start(const std::shared_ptr<const void>& owner) noexcept {
  owner_ = owner;
  if (files_.empty()) return;
  stagers_needed_.emplace(stagers_.get_executor());
  writers_needed_.emplace(writers_.get_executor());
  for (Task& task : maker_tasks_) {
    post(task, stagers_, [this, &task] { make_buffers(task, false); });
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
  stagers_needed_.reset();
  writers_needed_.reset();
}

// The owner is there: whoever posts runs by what was posted before.
template <class Run>
void SavePipeline::post(Task& task, boost::asio::io_context& pool, Run run) noexcept {
  task.post(pool, owner_.lock(), std::move(run));
}

// What the work ends with, be it an exception. A failure is that of the save.
template <class Work>
Result<> SavePipeline::attempt(const Work& work) noexcept {
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

// Beside the stagers, which take the first buffer that is free: making memory may be slower than
// the disk is in giving some back. What staging did not wait for is made for the next save,
// quietly.
void SavePipeline::make_buffers(Task& task, bool quiet) noexcept {
  for (auto buffers = buffers_.take_unmade(); !buffers.empty(); buffers = buffers_.take_unmade()) {
    Result<> made;
    // Also of a cancelled save, and then without memory: a stager may be waiting for just this one.
    if (!failure_.is_set()) made = buffers_.make(buffers);
    // Once staging has had all that it needs, the next save asks again.
    const bool is_needed = to_stage_ > 0;
    if (!made && is_needed) failure_.set(made.error());
    while (!buffers.empty()) {
      StagingBufferList buffer;
      buffer.splice(buffer.end(), buffers, buffers.begin());
      buffers_.release(std::move(buffer));
    }
    if (!made && !is_needed) return;
    if (!quiet && to_stage_ == 0) {
      return post(task, writers_, [this, &task] { make_buffers(task, true); });
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
      go_on(file);
    }
    if (--to_stage_ == 0) timing_.staged_ns = timing_.now_ns();
    staged_.send({});
  }
}

/// False where the stager waits for a buffer, and is another thread's from then on.
bool SavePipeline::stage_file(Stager& stager) noexcept {
  FileSave& file = *stager.file;
  bool waits = false;
  static_cast<void>(attempt([&]() -> Result<> {
    while (stager.offset < file.job.image.bytes() && !failure_.is_set()) {
      while (!stager.begun.empty() && file.stream.has_arrived(stager.begun.front().piece)) {
        pass_on_oldest(stager);
      }
      // What has been begun comes first.
      const bool may_wait = stager.begun.empty();
      if (stager.buffer.empty() && !buffers_.take(stager, may_wait)) {
        waits = may_wait;
        if (waits) return {};
        pass_on_oldest(stager);
        continue;
      }
      if (auto begun = begin_next(stager); !begun) return begun;
    }
    return {};
  }));
  if (waits) return false;
  if (!stager.buffer.empty()) buffers_.release(std::move(stager.buffer));
  submitted_.send({});
  while (!stager.begun.empty()) pass_on_oldest(stager);
  return true;
}

Result<> SavePipeline::begin_next(Stager& stager) {
  const FileImage& image = stager.file->job.image;
  StagingBuffer& buffer = stager.buffer.front();
  // Of a save that has failed meanwhile.
  if (buffer.chunk == nullptr) return {};
  if (image.device() != staging::Source::kHost)
    pin_or_warn(warnings_, *buffer.chunk, image.device());
  const std::span<std::byte> memory = buffer.chunk->bytes();
  const Timed timed(timing_, Activity::stage, stager.file->number);
  buffer.offset = stager.offset;
  buffer.contents =
      memory.first(std::min<std::uint64_t>(memory.size(), image.bytes() - stager.offset));
  auto piece = stager.file->stream.begin(buffer.contents);
  if (!piece) return piece.error();
  buffer.piece = std::move(*piece);
  stager.offset += buffer.contents.size();
  stager.begun.splice(stager.begun.end(), stager.buffer);
  return {};
}

void SavePipeline::pass_on_oldest(Stager& stager) noexcept {
  FileSave& file = *stager.file;
  // Also of a cancelled save: until they have arrived the memory belongs to the device.
  auto arrived = file.stream.arrive(stager.begun.front().piece);
  if (!arrived) failure_.set(arrived.error());
  file.bytes_staged += stager.begun.front().contents.size();
  const os::MutexLock lock(file.mutex);
  file.staged.splice(file.staged.end(), stager.begun, stager.begun.begin());
  go_on(file);
}

// --- writers -----------------------------------------------------------------------------------

void SavePipeline::open_next(FileWriter& writer) noexcept {
  const std::size_t next = next_to_write_++;
  if (next >= files_.size()) return;
  FileSave& file = *files_[next];
  file.has_writer = true;
  Result<> opened;
  if (!failure_.is_set()) opened = attempt([&] { return file.output.open(options_.direct_io); });
  const os::MutexLock lock(file.mutex);
  file.status = std::move(opened);
  file.writer = &writer;
  go_on(file);
}

/// Begins what is next of a file: a write, or its end.
void SavePipeline::go_on(FileSave& file) noexcept {
  if (file.writer == nullptr || file.is_checksumming) return;
  FileWriter& writer = *file.writer;
  const auto is_busy = [](const FileWriter::Write& write) { return write.is_busy; };
  if (!file.staged.empty()) {
    const auto idle = std::find_if_not(writer.writes.begin(), writer.writes.end(), is_busy);
    if (idle == writer.writes.end()) return;
    FileWriter::Write& write = *idle;
    write.buffer.splice(write.buffer.end(), file.staged, file.staged.begin());
    write.is_busy = file.is_checksumming = true;
    post(write.task, busy_pool(), [this, &file, &write] { checksum(file, write); });
  } else if (file.is_staged && std::none_of(writer.writes.begin(), writer.writes.end(), is_busy)) {
    file.writer = nullptr;
    post(writer.task, busy_pool(), [this, &file, &writer] { end_file(file, writer); });
  }
}

void SavePipeline::checksum(FileSave& file, FileWriter::Write& write) noexcept {
  if (!failure_.is_set()) {
    const StagingBuffer& buffer = write.buffer.front();
    const auto done = attempt([&]() -> Result<> {
      const Timed timed(timing_, Activity::checksum, file.number);
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
    static_cast<void>(attempt([&]() -> Result<> {
      if (!write.timer) write.timer.emplace(writers_);
      write.timer->expires_at(std::min(write.begin, now + kCancelPoll));
      write.timer->async_wait(
          write.task.handler(owner_.lock(), [this, &file, &write] { wait_for_turn(file, write); }));
      waits = true;
      return {};
    }));
  }
  if (waits) return;
  // Its end takes a lock of Asio's, which a forked child that drops the save may find taken.
  write.timer.reset();
  this->write(file, write);
}

void SavePipeline::write(FileSave& file, FileWriter::Write& write) noexcept {
  {
    // The next buffer's checksums, beside this one's write.
    const os::MutexLock lock(file.mutex);
    file.is_checksumming = false;
    go_on(file);
  }
  Result<> written;
  if (!failure_.is_set()) {
    const StagingBuffer& buffer = write.buffer.front();
    const Timed timed(timing_, Activity::write, file.number);
    written = attempt(
        [&] { return file.output.write(*buffer.chunk, buffer.contents.size(), buffer.offset); });
    if (written) file.bytes_written += buffer.contents.size();
  }
  buffers_.release(std::move(write.buffer));
  const os::MutexLock lock(file.mutex);
  if (!written && file.status) file.status = std::move(written);
  write.is_busy = false;
  go_on(file);
}

void SavePipeline::end_file(FileSave& file, FileWriter& writer) noexcept {
  Result<> status;
  {
    const os::MutexLock lock(file.mutex);
    status = std::move(file.status);
  }
  if (status) {
    status = attempt([&]() -> Result<> {
      if (failure_.is_set()) return format_error(Errc::cancelled, "another file has failed");
      return file.output.finish(options_.sync, timing_, file.number);
    });
  }
  file.output.abandon();
  ended_(file, std::move(status));
  open_next(writer);
}

}  // namespace torch_ckpt::engine
