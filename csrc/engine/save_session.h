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
//   1. The pipeline (engine/save_pipeline.h) stages and writes the files, several at once.
//   2. When every file's last chunk has been filled the sources are free ("staged").
//   3. Each file sends exactly one message through the results channel: where its items lie, with
//      their checksums; or why it is not there, which is the first cause where it was cancelled.
//   4. The first error cancels the session: no new chunk is filled, writes in flight end, and every
//      file that the session made is removed before the last result is sent.
//   5. Without an error the last file to end fsyncs the directory.
//
// An exception ends the session like any other error, and so does a lack of memory: what has been
// started needs none to go on.
//
// start() and each of the waits are for one thread; progress(), unfinished() and cancel() for any.
// The sources must stay alive and unchanged until wait_staged() or wait_for() has returned true.
class SaveSession {
 public:
  /// Fails with invalid_argument where the options contradict themselves. All files lie in
  /// `directory`, whatever becomes of its path.
  static Result<std::shared_ptr<SaveSession>> start(Context& context, os::Directory directory,
                                                    std::vector<FileJob> files,
                                                    const SaveOptions& options);

  /// Waits until no source is needed any more, be it that the save has failed; false when `timeout`
  /// passed before.
  bool wait_staged(std::chrono::milliseconds timeout);

  /// The same, or until all copies from devices have been started, whichever comes first.
  bool wait_submitted(std::chrono::milliseconds timeout);

  /// After wait_submitted(): makes the work that is queued on a device's stream from now on wait,
  /// there, for the copies from that device. Fails in a forked child and touches no device there.
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
  SaveSession(Context& context, os::Directory directory, std::vector<FileJob> jobs,
              const SaveOptions& options, std::size_t buffers);
  static std::vector<std::unique_ptr<FileSave>> files_of(Context& context,
                                                         std::vector<FileJob> jobs,
                                                         const os::Directory& directory,
                                                         const SaveOptions& options);
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
  ResultsChannel<format::FileResult> results_;
  SavePipeline pipeline_;
};

}  // namespace torch_ckpt::engine
