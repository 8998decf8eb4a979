#pragma once

#include <array>
#include <atomic>
#include <boost/asio/basic_waitable_timer.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/context.h"
#include "engine/direct_io.h"
#include "engine/file_image.h"
#include "engine/first_failure.h"
#include "engine/image_stream.h"
#include "engine/output_file.h"
#include "engine/process_channel.h"
#include "engine/results_channel.h"
#include "engine/staging_buffers.h"
#include "engine/store.h"
#include "engine/task.h"
#include "engine/throttle.h"
#include "engine/timing.h"
#include "error.h"
#include "format/result_frame.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {

/// Chunk size for sources on the host: large enough for the disk, small enough for the third-level
/// cache.
inline constexpr std::size_t kHostChunkBytes = std::size_t{4} << 20;
/// Chunk size for sources on a device: larger, since each submission costs driver time and the
/// copies do not pass through a cache.
inline constexpr std::size_t kDeviceChunkBytes = std::size_t{16} << 20;

/// Writes in flight per file: the disk performs one while the next is being prepared.
inline constexpr std::size_t kWritesInFlight = 2;
/// Pieces in flight to a store, of all files that are written in parallel.
inline constexpr std::size_t kPiecesInFlight = 4;

struct SaveOptions {
  // A multiple of os::kDirectAlignment; 0: SaveSession::start() chooses one of the sizes above.
  std::size_t chunk_bytes = 0;
  std::size_t parallel_files = 0;  // files written in parallel; 0: all
  // Pieces staged in parallel; 0: one for each of the parallel files and, in a snapshot mostly of
  // host memory, at least half as many as cores, but at least 2 and not more than 8.
  std::size_t parallel_stagers = 0;
  // Limit for staging chunks; 0: for a snapshot, as many chunks as it can use; otherwise, three per
  // file written in parallel.
  std::size_t max_host_bytes = 0;
  DirectIo direct_io = DirectIo::automatic;
  bool sync = true;  // fsync each file and the directory before reporting success

  // For background saves:
  bool snapshot = false;  // stage as far ahead of the disk as max_host_bytes allows
  PoolSpec stagers;       // threads that copy from the sources
  PoolSpec writers;
  std::uint64_t max_bytes_per_second = 0;  // written to disk; 0: no limit
  std::vector<staging::ReadyEvent> ready;

  // Also receives the results, for children that are forked during the save; may be nullptr.
  std::shared_ptr<ProcessChannel> children;

  // Set by SaveSession::start(): how many idle bytes the chunk pool may keep after the save; 0: no
  // limit.
  std::size_t max_idle_bytes = 0;
  // Set by SaveSession::start().
  std::size_t writes_in_flight = kWritesInFlight;  // per file
};

/// A file to be written.
struct FileJob {
  std::string name;  // in the directory
  // A data file, which must not exist yet; or this rank's parts of a file that several ranks write.
  FileImage image;
  // For each item of the image, its number in the save; empty: 0, 1, 2, ...
  std::vector<std::size_t> items = {};
  SharedFile shared = {};  // parts only
};

/// The step that a file is waiting for.
enum class FilePhase {
  waiting,  // its turn to be staged or written
  staging,  // copies from its sources, or a free buffer
  writing,  // writes of staged bytes
  fsync,    // fsync of the file; for the last file of a save, also of the directory
};

/// The progress of a file that has not yet sent its result.
struct FileProgress {
  std::size_t file = 0;
  FilePhase phase = FilePhase::waiting;
  std::uint64_t bytes_written = 0;
  std::uint64_t bytes = 0;
};

/// Progress of a save. The planned numbers are constant; the others only grow.
struct SaveProgress {
  std::uint64_t bytes_planned = 0;
  std::uint64_t bytes_staged = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t files_planned = 0;
  std::uint64_t files_done = 0;
};

/// Writes files, one after another.
struct FileWriter {
  struct Write {
    Task task;
    bool is_busy = false;  // guarded by the file's mutex
    StagingBufferList buffer;
    std::optional<boost::asio::basic_waitable_timer<Throttle::Clock,
                                                    boost::asio::wait_traits<Throttle::Clock>,
                                                    boost::asio::io_context::executor_type>>
        timer;
    Throttle::Clock::time_point begin;  // earliest time at which it may begin or continue
    std::uint64_t written = 0;          // bytes of the buffer
    // Held while the timer is used: its handler may run before async_wait() has returned.
    os::Mutex timer_mutex;
  };
  Task task;
  std::array<Write, kPiecesInFlight> writes;  // SaveOptions::writes_in_flight of them are used
};

/// The state of one file of a save.
struct FileSave {
  /// `folder` must outlive the FileSave.
  FileSave(FileJob given, std::size_t at, const Folder& folder)
      : job(std::move(given)),
        number(at),
        stream(job.image),
        output(folder, job.name, job.image, job.shared) {}

  /// Returns the file's result. Valid once the file is complete.
  Result<format::FileResult> result() const;
  /// May be called from any thread, because the counters that it reads only grow and the flags
  /// never become false again.
  FilePhase phase() const;

  const FileJob job;
  const std::size_t number;
  ImageStream stream;
  OutputFile output;

  std::atomic<std::uint64_t> bytes_staged{0};
  std::atomic<std::uint64_t> bytes_ready{0};  // all pieces before this are staged
  std::atomic<std::uint64_t> bytes_written{0};
  std::atomic<bool> has_stager{false};
  std::atomic<bool> has_writer{false};
  std::atomic<bool> is_done{false};

  std::uint64_t bytes_claimed = 0;  // by stagers; guarded by SaveSession::claims_mutex_
  std::atomic<std::uint64_t> bytes_not_begun{job.image.bytes()};

  // Passed from the stagers to the file's writer.
  os::Mutex mutex;
  StagingBufferList staged TC_GUARDED_BY(mutex);  // buffers that are waiting for a write, by offset
  std::uint64_t bytes_not_staged TC_GUARDED_BY(mutex) = job.image.bytes();
  bool is_staged TC_GUARDED_BY(mutex) = false;         // no more buffers will follow
  FileWriter* writer TC_GUARDED_BY(mutex) = nullptr;   // set once open() has succeeded or failed
  std::uint64_t bytes_taken TC_GUARDED_BY(mutex) = 0;  // pieces before this were given to a write
  bool is_checksumming TC_GUARDED_BY(mutex) = false;   // one buffer at a time, in order
  Result<> status TC_GUARDED_BY(mutex);
};

// Writes a set of files: either all of them or none.
//
//   1. start() chooses the chunk size and the number of staging buffers, and starts stagers and
//      writers, which stage and write several files at once.
//   2. Stagers fill buffers (save_stagers.cpp). A stager takes a free buffer, claims the next piece
//      of a file for it, fills the buffer from the file's image, hands it to the file's writer once
//      copies from a device are done, and takes the next buffer. Any stager may fill any piece, so
//      several of them may work on one file. A stager chooses the file with the fewest bytes claimed
//      but not written, so that no writer waits while another has a queue.
//   3. Writers write buffers (save_writers.cpp), in the order of the file; there is a writer for
//      each file that may be written in parallel. Up to two threads work for a writer: while one
//      writes a buffer, the other completes the checksums of the next one.
//      Buffers with bytes that a collective buffer collects (engine/collective_buffer.h) are written
//      one by one. Such a write may have to wait for other ranks, and continues a little later.
//   4. The byte budget limits the number of buffers. A stager without a buffer waits for one to be
//      released, which provides back-pressure. A piece is claimed only together with a buffer, and
//      files are staged and written in the same order. Some open file can therefore always go on:
//      its next piece has a buffer, or will get the next one. A snapshot may use enough buffers to
//      hold the entire save; other saves have just enough to keep the disk busy.
//   5. Once the last chunk of every file has been filled, the save is "staged": it no longer needs
//      its sources.
//   6. After the last write of a file, the writer removes the padding, fsyncs and closes the file.
//      The file sends exactly one message through the results channel: the locations and checksums
//      of its items, or its error. A file that stopped because another file failed sends the first
//      error of the save.
//   7. The first error, or cancel(), stops the save: no more buffers are filled and no more writes
//      start. Stagers claim what is left without buffers, buffers are still released, every file
//      ends, and all files created by the session are deleted before the last message is sent.
//   8. If there was no error, the last file to end fsyncs the directory.
//   9. Pieces of a file in a store (engine/store.h) have the size of the store's parts. A write sends
//      a piece, and its thread waits until the store has sent the bytes. The caller deletes what a
//      failed save has sent.
//
// No thread of the engine blocks waiting for another. A stager or writer that cannot continue is
// registered with the resource that it needs, and the thread that releases the resource posts it
// again. An exception or a failed allocation stops the session like any other error: steps that
// have started need no memory to end.
//
// start() and each of the wait methods may be called by one thread at a time; progress(),
// unfinished() and cancel() by any thread. The sources must stay alive and unchanged until
// wait_staged() or wait_for() has returned true.
class SaveSession : public std::enable_shared_from_this<SaveSession> {
 public:
  /// Fails with Errc::invalid_argument if an option is out of range. Files are created in a
  /// directory even if its path is renamed or replaced during the save.
  static Result<std::shared_ptr<SaveSession>> start(Context& context, Folder folder,
                                                    std::vector<FileJob> files,
                                                    const SaveOptions& options);

  /// Waits until the save no longer needs its sources, which is also the case after a failure.
  /// Returns false if `timeout` expires first.
  bool wait_staged(std::chrono::milliseconds timeout);

  /// Waits until all copies from the sources have been started. By then, copies from host memory
  /// are done; copies from devices may still be running.
  bool wait_submitted(std::chrono::milliseconds timeout);

  /// Makes `stream` wait for the copies from `device`: work queued on it from now on starts only
  /// after they complete. Blocks the device, not the host. Call this after wait_submitted() has
  /// returned true. In a forked child, fails without touching the device.
  Result<> make_stream_wait(int device, void* stream);

  /// Waits until every file has sent its result; returns false if `timeout` expires first. In a
  /// forked child, returns true immediately, and outcome() reports that the save belongs to the
  /// parent.
  bool wait_for(std::chrono::milliseconds timeout);

  /// Returns the first error so far, or success.
  Result<> outcome() const;
  /// Returns the results of the files, in the order of the jobs, or the first error.
  /// Valid once wait_for() has returned true.
  Result<std::vector<format::FileResult>> results() const;

  SaveProgress progress() const;
  /// Returns the files that have not yet sent their results, in the order passed to start(); none
  /// in a forked child. The entries may reflect slightly different moments.
  std::vector<FileProgress> unfinished() const;
  const Timing& timing() const { return timing_; }
  /// Makes the save fail, unless it has already succeeded.
  void cancel();

 private:
  struct Stager final : BufferWaiter {
    void resume() noexcept override;

    SaveSession* session = nullptr;
    Task task;
    StagingBufferList in_flight;  // begun pieces, one for each submission to the copier
    std::shared_ptr<staging::DeviceCopier> copier;  // nullptr before the first submission
  };
  struct Claim {
    FileSave* file = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  struct NumberedResult {
    std::size_t file = 0;
    format::FileResult result;
  };

  SaveSession(Context& context, Folder folder, std::vector<FileJob> jobs,
              const SaveOptions& options, std::size_t buffers);
  static std::vector<std::unique_ptr<FileSave>> files_of(std::vector<FileJob> jobs,
                                                         const Folder& folder);
  void begin_work() noexcept;
  void end_file(FileSave& file, Result<> status) noexcept;
  void end() noexcept;

  void stage(Stager& stager) noexcept;
  Claim claim_next(bool has_failed) noexcept TC_REQUIRES(claims_mutex_);
  void stage_next_file() noexcept TC_REQUIRES(claims_mutex_);
  void begin(Stager& stager, const Claim& claim, StagingBufferList buffer) noexcept;
  Result<> fill(Stager& stager, const Claim& claim, StagingBuffer& buffer,
                std::vector<staging::DeviceRun>& runs);
  void hand_over_oldest(Stager& stager) noexcept;
  void hand_over(StagingBufferList& buffers) noexcept;
  void count_staged(FileSave& file, std::uint64_t bytes) noexcept TC_REQUIRES(file.mutex);
  void allocate_buffers(Task& task, bool low_priority) noexcept;

  void open_next(FileWriter& writer) noexcept;
  void start_next_step(FileSave& file) noexcept TC_REQUIRES(file.mutex);
  void checksum(FileSave& file, FileWriter::Write& write) noexcept;
  void wait_for_turn(FileSave& file, FileWriter::Write& write) noexcept;
  void write(FileSave& file, FileWriter::Write& write) noexcept;
  Result<> send(FileSave& file, std::unique_ptr<staging::Chunk>& chunk, std::uint64_t offset,
                std::size_t bytes);
  void finish(FileSave& file, FileWriter& writer) noexcept;

  // Until staging is done, writes run at the stagers' priority, because stagers wait for their
  // buffers.
  boost::asio::io_context& pool_for_writing() { return files_to_stage_ == 0 ? writers_ : stagers_; }
  /// Runs the work and returns its result, or its exception as an error. An error fails the save.
  template <class Work>
  Result<> capture_exceptions(const Work& work) noexcept {
    Result<> done;
    try {
      done = work();
    } catch (...) {
      done = exception_error(std::current_exception(), "save");
    }
    if (!done) failure_.set(done.error());
    return done;
  }
  /// Posts a task, which keeps the session alive.
  template <class Run>
  void post(Task& task, boost::asio::io_context& pool, Run run) noexcept {
    // Only start() and tasks post, and both keep the session alive.
    task.post(pool, shared_from_this(), std::move(run));
  }

  Context& context_;
  Folder folder_;
  const SaveOptions options_;
  std::vector<std::unique_ptr<FileSave>> files_;
  FirstFailure<> failure_;
  Timing timing_;
  // start() ensures that both pools have threads, so that a save does not fail half-way for lack of
  // threads.
  boost::asio::io_context& stagers_;
  boost::asio::io_context& writers_;
  // Keep both pools running until the save has ended. Otherwise Executor::join() could end a pool
  // that is idle only because the other pool has the buffers.
  using PoolGuard = boost::asio::executor_work_guard<boost::asio::io_context::executor_type>;
  std::optional<PoolGuard> stagers_guard_;
  std::optional<PoolGuard> writers_guard_;

  const std::size_t parallel_files_;
  StagingBuffers buffers_;
  std::vector<Stager> stager_tasks_;
  std::vector<FileWriter> writer_tasks_;
  std::vector<Task> allocator_tasks_;
  os::Mutex claims_mutex_;
  std::vector<FileSave*> being_staged_ TC_GUARDED_BY(claims_mutex_);  // files with unclaimed bytes
  std::size_t next_to_stage_ TC_GUARDED_BY(claims_mutex_) = 0;
  std::atomic<std::size_t> next_to_write_{0};
  std::atomic<std::size_t> files_to_stage_;
  std::atomic<std::size_t> running_;
  std::atomic<std::uint64_t> files_done_{0};
  Throttle throttle_;
  ResultsChannel<> submitted_;  // one message for each file whose copies have all started
  ResultsChannel<> staged_;     // one message for each file whose copies are all done
  ResultsChannel<NumberedResult> results_;
};

}  // namespace torch_ckpt::engine
