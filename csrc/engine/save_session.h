#pragma once

#include <atomic>
#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/experimental/concurrent_channel.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/direct_io.h"
#include "engine/executor.h"
#include "engine/file_image.h"
#include "engine/image_stream.h"
#include "engine/process_channel.h"
#include "engine/results_channel.h"
#include "engine/throttle.h"
#include "engine/timing.h"
#include "error.h"
#include "format/result_frame.h"
#include "os/directory.h"
#include "os/file.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {

struct SaveOptions {
  std::size_t chunk_bytes = std::size_t{4} << 20;  // a multiple of os::kDirectAlignment
  std::size_t parallel_files = 0;                  // written at once; 0: all
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

struct FileJob {
  std::string name;  // of the file in the directory; must not exist
  FileImage image;
  // The numbers of the image's items in the plan; where it is empty they are 0 and so on.
  std::vector<std::size_t> items = {};
};

/// Bytes and files so far. A snapshot of counters that only grow.
struct SaveProgress {
  std::uint64_t bytes_planned = 0;
  std::uint64_t bytes_staged = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t files_planned = 0;
  std::uint64_t files_done = 0;
};

/// What a file is waiting for.
enum class FilePhase {
  waiting,  // for other files to be staged, or written
  staging,  // for its sources, or for memory to copy them to
  writing,  // for the disk to take what has been staged
  fsync,    // for the disk to have it; of the save's last file also for the directory
};

/// How far a file has come that has not sent its result.
struct FileProgress {
  std::size_t file = 0;
  FilePhase phase = FilePhase::waiting;
  std::uint64_t bytes_written = 0;
  std::uint64_t bytes = 0;
};

// Writes a set of files, all or nothing.
//
//   1. As many files as may be written at once are staged, on a strand each: take a free chunk,
//   fill
//      it from the image, pass it on, take the next. A strand that is done takes the next file.
//   2. As many are written, each on a strand of its own: complete the chunk's checksums, hand it to
//   a
//      thread that writes it, take the next. At most kDepth writes of a file are in flight.
//   3. Chunks come from one channel that holds as many as the byte budget allows; waiting for it is
//      the back-pressure. Files are staged and written in the same order, so that of the chunks
//      that are taken some can always be written. A snapshot may hold the whole save in chunks;
//      other saves hold what keeps the disk busy.
//   4. When every file's last chunk has been filled the sources are free ("staged").
//   5. A file whose last write has ended is cut to length, fsynced and closed.
//   6. Each file sends exactly one message through the results channel: where its items lie, with
//      their checksums; or why it is not there, which is the first cause where it was cancelled.
//   7. The first error cancels the session: no new chunk is filled, writes in flight end, and every
//      file that the session made is removed before the last result is sent.
//   8. Without an error the last file to end fsyncs the directory.
//
// An exception ends the session like any other error. Where not even a message of a few bytes can
// be sent, for want of memory, the process ends (the functions that send are noexcept): what waits
// for the message would wait for ever.
//
// start() and each of the waits are for one thread; progress(), unfinished() and cancel() for any.
// The sources must stay alive and unchanged until wait_staged() or wait_for() has returned true.
class SaveSession : public std::enable_shared_from_this<SaveSession> {
 public:
  /// Fails with invalid_argument where the options contradict themselves. All files lie in
  /// `directory`, whatever becomes of its path.
  static Result<std::shared_ptr<SaveSession>> start(os::Directory directory,
                                                    std::vector<FileJob> files,
                                                    const SaveOptions& options);

  /// Waits until no source is needed any more, be it that the save has failed; false when `timeout`
  /// passed before.
  bool wait_staged(std::chrono::milliseconds timeout);

  /// The same, or until all copies from devices have been started, whichever comes first.
  bool wait_submitted(std::chrono::milliseconds timeout);

  /// After wait_submitted(): makes the work that is queued on a device's stream from now on wait,
  /// there, for the copies from that device.
  Result<> make_stream_wait(int device, void* stream);

  /// Waits until every file has sent its result; false when `timeout` passed before. In a forked
  /// child, which has no part in its parent's save, it is over at once and has failed.
  bool wait_for(std::chrono::milliseconds timeout);

  /// The first cause where the save has failed, by now or at all.
  Result<> outcome() const;
  /// What the files have sent, in the order in which they ended, or that cause; after wait_for()
  /// has returned true.
  Result<std::vector<format::FileResult>> results() const;

  SaveProgress progress() const;
  /// The files that have not sent their results, in their order; none in a forked child. Each is
  /// told as it was at some moment of the call.
  std::vector<FileProgress> unfinished() const;
  const Timing& timing() const { return timing_; }
  /// Makes the save fail, unless it has already succeeded.
  void cancel();

 private:
  template <class T>
  using Channel = boost::asio::experimental::concurrent_channel<void(boost::system::error_code, T)>;

  // A chunk that has been filled. The last message of a file is nullptr.
  struct Filled {
    std::size_t slot = 0;
    std::uint64_t offset = 0;
    std::span<std::byte> fresh;
    ImageStream::Piece piece;
  };
  struct FileState {
    FileState(FileJob given, std::size_t at, const SaveOptions& options, std::size_t messages);
    FileJob job;
    const std::size_t number;
    bool created = false;
    std::optional<os::FileIdentity> identity;
    ImageStream stream;
    Channel<std::shared_ptr<Filled>> filled;
    bool is_submitted = false;  // has told so; of the stager
    bool is_drained = false;    // the last message has been received; of the writer

    FilePhase phase() const;
    // For phase() alone, from any thread. Each only grows, or becomes true once.
    std::atomic<std::uint64_t> bytes_staged{0};
    std::atomic<std::uint64_t> bytes_written{0};
    std::atomic<bool> has_stager{false};
    std::atomic<bool> has_writer{false};
    std::atomic<bool> done{false};
  };

  SaveSession(os::Directory directory, std::vector<FileJob> files, const SaveOptions& options,
              std::size_t chunks);
  void spawn_runners() noexcept;
  void spawn_runner(boost::asio::awaitable<void> (SaveSession::*run)());

  // By stagers.
  boost::asio::awaitable<void> stage_files();
  boost::asio::awaitable<void> stage_file(FileState& state);
  std::shared_ptr<Filled> fill_chunk(FileState& state, std::size_t slot, std::uint64_t offset);
  void pass_on(FileState& state, std::shared_ptr<Filled> filled) noexcept;

  // By writers.
  boost::asio::io_context& busy_executor();
  boost::asio::awaitable<void> write_files();
  boost::asio::awaitable<Result<>> write_file(FileState& state);
  Result<os::File> open_file(FileState& state);
  boost::asio::awaitable<Result<>> write_chunks(FileState& state, os::File* file);
  void start_write(FileState& state, os::File& file, const Filled& chunk,
                   Channel<std::shared_ptr<const Error>>& written);
  Result<> finish_contents(FileState& state, os::File file);
  Result<format::FileResult> result_of(const FileState& state) const;
  void finish_file(FileState& state, Result<> status) noexcept;
  void end();

  void spawn_slot_filler(bool quiet);
  void fill_slots(bool quiet) noexcept;
  std::unique_ptr<staging::Chunk> make_chunk();
  bool place(std::size_t slot, std::unique_ptr<staging::Chunk>& chunk);
  void release(std::size_t slot) noexcept;
  void fail(const Error& error);

  os::Directory directory_;
  const SaveOptions options_;
  // They have threads before the session begins: it must not fail half-way for want of them.
  boost::asio::io_context& stagers_;
  boost::asio::io_context& writers_;
  // Until the session has ended: join_executor() may find the writers without work while the next
  // chunk for them is still being staged.
  std::optional<boost::asio::executor_work_guard<boost::asio::io_context::executor_type>>
      writers_needed_;
  std::vector<std::unique_ptr<FileState>> files_;
  // By slot; each slot has one user at a time. Those of slots that are in the channel or have been
  // taken from it are there.
  std::vector<std::unique_ptr<staging::Chunk>> chunks_;
  std::vector<std::size_t> empty_slots_;  // that had no chunk at the start
  int device_ = staging::Source::kHost;   // that chunks are page-locked for
  std::atomic<std::size_t> next_empty_{0};

  Channel<std::size_t> free_slots_;
  ResultsChannel<> submitted_;
  ResultsChannel<> staged_;
  ResultsChannel<format::FileResult> results_;
  std::atomic<std::size_t> next_to_stage_{0};
  std::atomic<std::size_t> next_to_write_{0};
  Timing timing_;
  Throttle throttle_;

  std::atomic<bool> cancelled_{false};
  std::atomic<std::size_t> to_stage_{0};
  std::atomic<std::size_t> running_{0};
  std::atomic<std::uint64_t> bytes_staged_{0};
  std::atomic<std::uint64_t> bytes_written_{0};
  std::atomic<std::uint64_t> files_done_{0};
  std::uint64_t bytes_planned_ = 0;

  mutable std::mutex mutex_;
  std::optional<Error> first_error_;  // guarded by mutex_
  bool ended_ = false;                // guarded by mutex_; the outcome stands
};

}  // namespace torch_ckpt::engine
