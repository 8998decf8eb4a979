#pragma once

#include <array>
#include <atomic>
#include <boost/asio/basic_waitable_timer.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/context.h"
#include "engine/direct_io.h"
#include "engine/file_save.h"
#include "engine/first_failure.h"
#include "engine/process_channel.h"
#include "engine/results_channel.h"
#include "engine/staging_buffers.h"
#include "engine/task.h"
#include "engine/throttle.h"
#include "engine/timing.h"

namespace torch_ckpt::engine {

/// Chunks for sources on the host: large enough for the disk, small enough for the third-level
/// cache.
inline constexpr std::size_t kHostChunkBytes = std::size_t{4} << 20;
/// Chunks for sources on a device: a submission takes time of the driver, and no cache is involved.
inline constexpr std::size_t kDeviceChunkBytes = std::size_t{16} << 20;

struct SaveOptions {
  // A multiple of os::kDirectAlignment; 0: one of the above, see SaveSession::start().
  std::size_t chunk_bytes = 0;
  std::size_t parallel_files = 0;  // written at once; 0: all
  std::size_t max_host_bytes = 0;  // of chunks; 0: three for each file written at once, or of a
                                   // snapshot as many as it takes
  DirectIo direct_io = DirectIo::automatic;
  bool sync = true;  // fsync files and directory before they count as written

  // Of saves in the background.
  bool snapshot = false;  // stage as far ahead of the disk as max_host_bytes allows
  Threads stagers;        // that copy from the sources
  Threads writers;
  std::uint64_t max_bytes_per_second = 0;  // to the disk; 0: no limit
  std::vector<staging::ReadyEvent> ready;
  bool trace = false;

  // Gets the results as well, for children that are forked meanwhile; may be null.
  std::shared_ptr<ProcessChannel> children;

  // Set by start(): what the chunk pool may keep afterwards, where max_host_bytes was given.
  std::size_t keep_host_bytes = 0;
};

/// Writes of a file in flight: one on the device while the next one is queued behind it.
inline constexpr std::size_t kWritesInFlight = 2;

/// Writes one file after the other.
struct FileWriter {
  struct Write {
    Task task;
    bool is_busy = false;  // guarded by the mutex of the file that is being written
    StagingBufferList buffer;
    std::optional<boost::asio::basic_waitable_timer<Throttle::Clock,
                                                    boost::asio::wait_traits<Throttle::Clock>,
                                                    boost::asio::io_context::executor_type>>
        timer;
    Throttle::Clock::time_point begin;  // not before
  };
  Task task;
  std::array<Write, kWritesInFlight> writes;
};

// The way of the files' images from their sources to the disk.
//
//   1. As many files as may be written at once are staged, each by one thread at a time: take a
//      free buffer, fill it from the image, pass it on, take the next. A stager that is done takes
//      the next file.
//   2. As many are written, each by up to two threads at a time: one completes a buffer's checksums
//      and writes it, while the other does the same with the buffer before.
//   3. Buffers are as many as the byte budget allows; waiting for a free one is the back-pressure.
//      Files are staged and written in the same order, so that of the buffers that are filled some
//      can always be written. A snapshot may hold the whole save in buffers; other saves hold what
//      keeps the disk busy.
//   4. A file whose last write has ended is cut to length, fsynced and closed.
//   5. After the first failure, whosever it is, no buffer is filled and no write begins; buffers
//      come back all the same, and every file ends.
//
// No thread waits for another one. What has nothing to do is a part of what it waits for, and
// posted again by whoever has that.
class SavePipeline {
 public:
  using FileEnded = std::function<void(FileSave& file, Result<> status)>;

  /// `ended` must not throw. All that is given by reference outlives the pipeline, and so does the
  /// owner that start() gets: it lives until all files have ended.
  SavePipeline(Context& context, const SaveOptions& options,
               std::vector<std::unique_ptr<FileSave>>& files, std::size_t buffers, int device,
               FirstFailure<>& failure, Timing& timing, FileEnded ended);
  void start(const std::shared_ptr<const void>& owner) noexcept;
  /// After the last file has ended.
  void end() noexcept;

  /// Get a message of each file: once all its copies have been begun, and once all have arrived.
  ResultsChannel<>& submitted() { return submitted_; }
  ResultsChannel<>& staged() { return staged_; }

 private:
  struct Stager final : BufferWaiter {
    void resume() noexcept override;

    SavePipeline* pipeline = nullptr;
    Task task;
    FileSave* file = nullptr;
    std::uint64_t offset = 0;  // in the file, of what is begun next
    StagingBufferList begun;   // and perhaps still on their way from a device
  };

  void stage(Stager& stager) noexcept;
  bool stage_file(Stager& stager) noexcept;
  Result<> begin_next(Stager& stager);
  void pass_on_oldest(Stager& stager) noexcept;

  void open_next(FileWriter& writer) noexcept;
  void go_on(FileSave& file) noexcept TC_REQUIRES(file.mutex);
  void checksum(FileSave& file, FileWriter::Write& write) noexcept;
  void wait_for_turn(FileSave& file, FileWriter::Write& write) noexcept;
  void write(FileSave& file, FileWriter::Write& write) noexcept;
  void end_file(FileSave& file, FileWriter& writer) noexcept;

  void make_buffers(Task& task, bool quiet) noexcept;
  boost::asio::io_context& busy_pool() { return to_stage_ == 0 ? writers_ : stagers_; }
  template <class Work>
  Result<> attempt(const Work& work) noexcept;
  template <class Run>
  void post(Task& task, boost::asio::io_context& pool, Run run) noexcept;

  Warnings& warnings_;
  const SaveOptions& options_;
  std::vector<std::unique_ptr<FileSave>>& files_;
  FirstFailure<>& failure_;
  Timing& timing_;
  const FileEnded ended_;
  // They have threads before the session begins: it must not fail half-way for want of them.
  boost::asio::io_context& stagers_;
  boost::asio::io_context& writers_;
  // Until the save has ended: Executor::join() may find a pool without work while the next buffer
  // for it is with the other.
  using PoolGuard = boost::asio::executor_work_guard<boost::asio::io_context::executor_type>;
  std::optional<PoolGuard> stagers_needed_;
  std::optional<PoolGuard> writers_needed_;
  std::weak_ptr<const void> owner_;

  const std::size_t at_once_;
  StagingBuffers buffers_;
  std::vector<Stager> stager_tasks_;
  std::vector<FileWriter> writer_tasks_;
  std::vector<Task> maker_tasks_;
  std::atomic<std::size_t> next_to_stage_{0};
  std::atomic<std::size_t> next_to_write_{0};
  std::atomic<std::size_t> to_stage_{0};
  ResultsChannel<> submitted_;
  ResultsChannel<> staged_;
  Throttle throttle_;
};

}  // namespace torch_ckpt::engine
