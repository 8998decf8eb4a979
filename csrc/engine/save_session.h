#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/context.h"
#include "engine/file_save.h"
#include "engine/first_failure.h"
#include "engine/results_channel.h"
#include "engine/save_pipeline.h"
#include "engine/timing.h"
#include "error.h"
#include "format/result_frame.h"
#include "os/directory.h"

namespace torch_ckpt::engine {

/// Progress of a save. The planned numbers are constant; the others only grow.
struct SaveProgress {
  std::uint64_t bytes_planned = 0;
  std::uint64_t bytes_staged = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t files_planned = 0;
  std::uint64_t files_done = 0;
};

// Writes a set of files: either all of them or none.
//
//   1. start() chooses the chunk size and the number of staging buffers, and starts the pipeline
//      (engine/save_pipeline.h), which stages and writes several files at once.
//   2. Once the last chunk of every file has been filled, the save is "staged": it no longer needs
//      its sources.
//   3. Each file sends exactly one message through the results channel: the locations and checksums
//      of its items, or its error. A file that stopped because another file failed sends the first
//      error of the save.
//   4. The first error, or cancel(), stops the save: no more chunks are filled, writes in flight
//      end, and all files created by the session are deleted before the last message is sent.
//   5. If there was no error, the last file to end fsyncs the directory.
//
// An exception or a failed allocation stops the session like any other error: steps that have
// started need no memory to end.
//
// start() and each of the wait methods may be called by one thread at a time; progress(),
// unfinished() and cancel() by any thread. The sources must stay alive and unchanged until
// wait_staged() or wait_for() has returned true.
class SaveSession {
 public:
  /// Fails with Errc::invalid_argument if an option is out of range. Files are created in
  /// `directory` even if its path is renamed or replaced during the save.
  static Result<std::shared_ptr<SaveSession>> start(Context& context, os::Directory directory,
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
  SaveSession(Context& context, os::Directory directory, std::vector<FileJob> jobs,
              const SaveOptions& options, std::size_t buffers);
  static std::vector<std::unique_ptr<FileSave>> files_of(std::vector<FileJob> jobs,
                                                         const os::Directory& directory);
  void end_file(FileSave& file, Result<> status) noexcept;
  void end() noexcept;

  Context& context_;
  os::Directory directory_;
  const SaveOptions options_;
  std::vector<std::unique_ptr<FileSave>> files_;
  FirstFailure<> failure_;
  Timing timing_;
  std::atomic<std::size_t> running_;
  std::atomic<std::uint64_t> files_done_{0};
  struct NumberedResult {
    std::size_t file = 0;
    format::FileResult result;
  };
  ResultsChannel<NumberedResult> results_;
  SavePipeline pipeline_;
};

}  // namespace torch_ckpt::engine
