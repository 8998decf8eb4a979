#include <algorithm>
#include <chrono>
#include <memory>
#include <span>
#include <utility>

#include "engine/save_session.h"

// The writers of a save: step 3 in save_session.h.
namespace torch_ckpt::engine {
namespace {

// Interval at which a write that is waiting for the throttle checks whether the save was cancelled.
constexpr std::chrono::milliseconds kCancelPoll{100};

// Interval at which a write that is waiting for other ranks is tried again.
constexpr std::chrono::milliseconds kCollectivePoll{1};

}  // namespace

void SaveSession::open_next(FileWriter& writer) noexcept {
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

/// Starts the file's next step if it is ready: a write or, after the last write, finish().
void SaveSession::start_next_step(FileSave& file) noexcept {
  if (file.writer == nullptr || file.is_checksumming) return;
  FileWriter& writer = *file.writer;
  const auto is_busy = [](const FileWriter::Write& write) { return write.is_busy; };
  const auto writes = std::span(writer.writes).first(options_.writes_in_flight);
  // After a failure, pieces may be missing, and the others are only released.
  const bool has_next =
      !file.staged.empty() && (file.staged.front().offset == file.bytes_taken || failure_.is_set());
  if (has_next) {
    const auto idle = std::find_if_not(writes.begin(), writes.end(), is_busy);
    if (idle == writes.end()) return;
    FileWriter::Write& write = *idle;
    write.buffer.splice(write.buffer.end(), file.staged, file.staged.begin());
    write.is_busy = file.is_checksumming = true;
    file.bytes_taken += write.buffer.front().contents.size();
    post(write.task, pool_for_writing(), [this, &file, &write] { checksum(file, write); });
  } else if (file.is_staged && std::none_of(writes.begin(), writes.end(), is_busy)) {
    file.writer = nullptr;
    post(writer.task, pool_for_writing(), [this, &file, &writer] { finish(file, writer); });
  }
}

void SaveSession::checksum(FileSave& file, FileWriter::Write& write) noexcept {
  if (!failure_.is_set()) {
    const StagingBuffer& buffer = write.buffer.front();
    const auto done = capture_exceptions([&]() -> Result<> {
      const ScopedTimer timed(timing_, Activity::checksum);
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

void SaveSession::wait_for_turn(FileSave& file, FileWriter::Write& write) noexcept {
  const auto now = Throttle::Clock::now();
  {
    const os::MutexLock lock(write.timer_mutex);
    bool waits = false;
    if (now < write.begin && !failure_.is_set()) {
      static_cast<void>(capture_exceptions([&]() -> Result<> {
        if (!write.timer) write.timer.emplace(writers_);
        write.timer->expires_at(std::min(write.begin, now + kCancelPoll));
        write.timer->async_wait(write.task.handler(
            shared_from_this(), [this, &file, &write] { wait_for_turn(file, write); }));
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

void SaveSession::write(FileSave& file, FileWriter::Write& write) noexcept {
  StagingBuffer& buffer = write.buffer.front();
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
      const ScopedTimer timed(timing_, Activity::write);
      if (file.output.is_in_store()) {
        write.written = bytes;
        return send(file, buffer.chunk, buffer.offset, bytes);
      }
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

/// Writes a piece of a file in a store, and waits until the store no longer needs the chunk.
Result<> SaveSession::send(FileSave& file, std::unique_ptr<staging::Chunk>& chunk,
                           std::uint64_t offset, std::size_t bytes) {
  FilePiece piece;
  piece.offset = offset;
  piece.bytes = bytes;
  auto sent = file.output.send(piece, chunk, [this] { return failure_.is_set(); });
  if (sent) file.bytes_written += bytes;
  return sent;
}

void SaveSession::finish(FileSave& file, FileWriter& writer) noexcept {
  Result<> status;
  {
    const os::MutexLock lock(file.mutex);
    status = std::move(file.status);
  }
  if (status) {
    status = capture_exceptions([&]() -> Result<> {
      if (failure_.is_set())
        return format_error(Errc::cancelled, "another file of this save failed");
      std::unique_ptr<staging::Chunk> none;
      if (file.output.is_in_store() && file.job.image.bytes() == 0) {
        TC_TRY(send(file, none, 0, 0));
      }
      return file.output.finish(options_.sync, timing_);
    });
  }
  file.output.close();
  end_file(file, std::move(status));
  open_next(writer);
}

}  // namespace torch_ckpt::engine
