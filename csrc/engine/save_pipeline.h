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
#include "os/mutex.h"

namespace torch_ckpt::engine {

/// Chunk size for sources on the host: large enough for the disk, small enough for the third-level
/// cache.
inline constexpr std::size_t kHostChunkBytes = std::size_t{4} << 20;
/// Chunk size for sources on a device: larger, since each submission costs driver time and the
/// copies do not pass through a cache.
inline constexpr std::size_t kDeviceChunkBytes = std::size_t{16} << 20;

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
  bool trace = false;

  // Also receives the results, for children that are forked during the save; may be nullptr.
  std::shared_ptr<ProcessChannel> children;

  // Set by SaveSession::start(): how many idle bytes the chunk pool may keep after the save; 0: no
  // limit.
  std::size_t max_idle_bytes = 0;
};

/// Writes in flight per file: the disk performs one while the next is being prepared.
inline constexpr std::size_t kWritesInFlight = 2;

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
  std::array<Write, kWritesInFlight> writes;
};

// Stages the files of a save and writes them to disk.
//
//   1. Stagers fill buffers. A stager takes a free buffer, claims the next piece of a file for it,
//      fills the buffer from the file's image, hands it to the file's writer once copies from a
//      device are done, and takes the next buffer. Any stager may fill any piece, so several of
//      them may work on one file. A stager chooses the file with the fewest bytes claimed but not
//      written, so that no writer waits while another has a queue.
//   2. Writers write buffers, in the order of the file; there is a writer for each file that may be
//      written in parallel. Up to two threads work for a writer: while one writes a buffer, the
//      other completes the checksums of the next one.
//      Buffers with bytes that a collective buffer collects (engine/collective_buffer.h) are written
//      one by one. Such a write may have to wait for other ranks, and continues a little later.
//   3. The byte budget limits the number of buffers. A stager without a buffer waits for one to be
//      released, which provides back-pressure. A piece is claimed only together with a buffer, and
//      files are staged and written in the same order. Some open file can therefore always go on:
//      its next piece has a buffer, or will get the next one. A snapshot may use enough buffers to
//      hold the entire save; other saves have just enough to keep the disk busy.
//   4. After the last write of a file, the writer truncates it to its length, fsyncs and closes it.
//   5. After the first failure, no more buffers are filled and no more writes start. Stagers claim
//      what is left without buffers, buffers are still released, and every file ends.
//
// No thread blocks waiting for another. A stager or writer that cannot continue is registered with
// the resource that it needs, and the thread that releases the resource posts it again.
class SavePipeline {
 public:
  using FileEnded = std::function<void(FileSave& file, Result<> status)>;

  /// `on_file_ended` must not throw. All objects passed by reference must outlive the pipeline.
  SavePipeline(Context& context, const SaveOptions& options,
               std::vector<std::unique_ptr<FileSave>>& files, std::size_t buffers, int device,
               FirstFailure<>& failure, Timing& timing, FileEnded on_file_ended);
  /// Starts the work, which keeps `owner` alive until all files have ended. `owner` contains the
  /// pipeline.
  void start(const std::shared_ptr<const void>& owner) noexcept;
  /// Releases the buffers, and asks the chunk pool to allocate those that the save did not need.
  /// Call this after the last file has ended.
  void end() noexcept;

  /// Makes `stream` wait for the copies from `device`; see SaveSession::make_stream_wait().
  Result<> make_stream_wait(int device, void* stream);

  /// Receives one message for each file once all copies from its sources have started.
  ResultsChannel<>& submitted() { return submitted_; }
  /// Receives one message for each file once all copies from its sources are done.
  ResultsChannel<>& staged() { return staged_; }

 private:
  struct Stager final : BufferWaiter {
    void resume() noexcept override;

    SavePipeline* pipeline = nullptr;
    Task task;
    StagingBufferList in_flight;  // begun pieces, one for each submission to the copier
    std::shared_ptr<staging::DeviceCopier> copier;  // nullptr before the first submission
  };
  struct Claim {
    FileSave* file = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };

  void stage(Stager& stager) noexcept;
  Claim claim_next(bool has_failed) noexcept TC_REQUIRES(claims_mutex_);
  void stage_next_file() noexcept TC_REQUIRES(claims_mutex_);
  void begin(Stager& stager, const Claim& claim, StagingBufferList buffer) noexcept;
  Result<> fill(Stager& stager, const Claim& claim, StagingBuffer& buffer,
                std::vector<staging::DeviceRun>& runs);
  void hand_over_oldest(Stager& stager) noexcept;
  void hand_over(StagingBufferList& buffers) noexcept;
  void count_staged(FileSave& file, std::uint64_t bytes) noexcept TC_REQUIRES(file.mutex);

  void open_next(FileWriter& writer) noexcept;
  void start_next_step(FileSave& file) noexcept TC_REQUIRES(file.mutex);
  void checksum(FileSave& file, FileWriter::Write& write) noexcept;
  void wait_for_turn(FileSave& file, FileWriter::Write& write) noexcept;
  void write(FileSave& file, FileWriter::Write& write) noexcept;
  void end_file(FileSave& file, FileWriter& writer) noexcept;

  void allocate_buffers(Task& task, bool low_priority) noexcept;
  // Until staging is done, writes run at the stagers' priority, because stagers wait for their
  // buffers.
  boost::asio::io_context& pool_for_writing() { return files_to_stage_ == 0 ? writers_ : stagers_; }
  template <class Work>
  Result<> capture_exceptions(const Work& work) noexcept;
  template <class Run>
  void post(Task& task, boost::asio::io_context& pool, Run run) noexcept;

  Warnings& warnings_;
  const SaveOptions& options_;
  std::vector<std::unique_ptr<FileSave>>& files_;
  FirstFailure<>& failure_;
  Timing& timing_;
  const FileEnded on_file_ended_;
  // SaveSession::start() ensures that both pools have threads, so that a save does not fail
  // half-way for lack of threads.
  boost::asio::io_context& stagers_;
  boost::asio::io_context& writers_;
  // Keep both pools running until the save has ended. Otherwise Executor::join() could end a pool
  // that is idle only because the other pool has the buffers.
  using PoolGuard = boost::asio::executor_work_guard<boost::asio::io_context::executor_type>;
  std::optional<PoolGuard> stagers_guard_;
  std::optional<PoolGuard> writers_guard_;
  std::weak_ptr<const void> owner_;

  const std::size_t parallel_files_;
  StagingBuffers buffers_;
  std::vector<Stager> stager_tasks_;
  std::vector<FileWriter> writer_tasks_;
  std::vector<Task> allocator_tasks_;
  os::Mutex claims_mutex_;
  std::vector<FileSave*> being_staged_ TC_GUARDED_BY(claims_mutex_);  // files with unclaimed bytes
  std::size_t next_to_stage_ TC_GUARDED_BY(claims_mutex_) = 0;
  std::atomic<std::size_t> next_to_write_{0};
  std::atomic<std::size_t> files_to_stage_{0};
  ResultsChannel<> submitted_;
  ResultsChannel<> staged_;
  Throttle throttle_;
};

}  // namespace torch_ckpt::engine
