#pragma once

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/experimental/concurrent_channel.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/direct_io.h"
#include "engine/file_image.h"
#include "engine/image_stream.h"
#include "engine/results_channel.h"
#include "error.h"
#include "os/file.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {

struct SaveOptions {
  std::size_t chunk_bytes = std::size_t{4} << 20;  // a multiple of os::kDirectAlignment
  std::size_t parallel_files = 0;                  // written at once; 0: all
  std::size_t max_host_bytes = 0;  // of chunks; 0: three for each file written at once
  DirectIo direct_io = DirectIo::automatic;
  bool sync = true;  // fsync files and directory before they count as written
};

struct FileJob {
  std::string path;  // must not exist
  FileImage image;
};

/// Bytes and files so far. A snapshot of counters that only grow.
struct SaveProgress {
  std::uint64_t bytes_planned = 0;
  std::uint64_t bytes_staged = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t files_planned = 0;
  std::uint64_t files_done = 0;
};

// Writes a set of files, all or nothing.
//
//   1. As many files as may be written at once run on a strand of the executor each: take a free
//      chunk, fill it from the image, hand it to a thread that writes it, take the next. At most
//      kDepth writes of a file are in flight. A strand that is done takes the next file.
//   2. Chunks come from one channel that holds as many as the byte budget allows; waiting for it is
//      the back-pressure.
//   3. A file whose last write has ended is cut to length, fsynced and closed.
//   4. Each file sends exactly one result, good or bad, through the results channel.
//   5. The first error cancels the session: no new chunk is filled, writes in flight end, and every
//      file that the session made is removed before the last result is sent.
//   6. Without an error the last file to end fsyncs the directory.
//
// start() and wait_for() are for one thread; progress() and cancel() for any. The sources must stay
// alive and unchanged until wait_for() has returned true.
class SaveSession : public std::enable_shared_from_this<SaveSession> {
 public:
  /// Fails with invalid_argument where the options contradict themselves. All files lie in
  /// `directory`, which exists.
  static Result<std::shared_ptr<SaveSession>> start(std::string directory,
                                                    std::vector<FileJob> files,
                                                    const SaveOptions& options);

  /// Waits until every file has sent its result; false when `timeout` passed before. In a forked
  /// child, which has no part in its parent's save, it is over at once and has failed.
  bool wait_for(std::chrono::milliseconds timeout);

  /// The outcome; call it after wait_for() has returned true. The first cause where it failed.
  Result<> outcome() const;

  /// CRC-32 of each item's payload, by file and item; after a good outcome.
  const std::vector<std::uint32_t>& checksums(std::size_t file) const;
  const FileImage& image(std::size_t file) const { return files_[file].job.image; }
  std::size_t file_count() const { return files_.size(); }

  SaveProgress progress() const;
  /// Makes the save fail, unless it has already succeeded.
  void cancel();

 private:
  struct FileState {
    FileJob job;
    bool created = false;
    std::vector<std::uint32_t> checksums;
  };
  template <class T>
  using Channel = boost::asio::experimental::concurrent_channel<void(boost::system::error_code, T)>;

  SaveSession(std::string directory, std::vector<FileJob> files, const SaveOptions& options,
              std::size_t chunks);
  void spawn_runners();
  boost::asio::awaitable<void> run_files();
  boost::asio::awaitable<Result<>> write_file(FileState& state);
  boost::asio::awaitable<Result<>> pump(FileState& state, os::File& file);
  void finish_file(Result<> status);
  void fail(const Error& error);
  Result<std::span<std::byte>> chunk_memory(std::size_t slot, const FileImage& image);
  Result<std::span<std::byte>> fill_chunk(std::size_t slot, ImageStream& stream,
                                          const FileImage& image, std::uint64_t offset);

  const std::string directory_;
  const SaveOptions options_;
  std::vector<FileState> files_;
  // By slot; each slot has one user at a time.
  std::vector<std::unique_ptr<staging::Chunk>> chunks_;

  Channel<std::size_t> free_slots_;
  ResultsChannel results_;
  std::atomic<std::size_t> next_file_{0};

  std::atomic<bool> cancelled_{false};
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
