#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/file_image.h"
#include "engine/image_stream.h"
#include "engine/output_file.h"
#include "engine/staging_buffers.h"
#include "error.h"
#include "format/result_frame.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {

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

struct FileWriter;

/// The state of one file of a save.
struct FileSave {
  /// `directory` must outlive the FileSave.
  FileSave(FileJob given, std::size_t at, const os::Directory& directory)
      : job(std::move(given)),
        number(at),
        stream(job.image),
        output(directory, job.name, job.image, job.shared) {}

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

  std::uint64_t bytes_claimed = 0;  // by stagers; guarded by SavePipeline::claims_mutex_
  std::atomic<std::uint64_t> bytes_not_begun{job.image.bytes()};

  // Passed from the stagers to the file's writer (engine/save_pipeline.h).
  os::Mutex mutex;
  StagingBufferList staged TC_GUARDED_BY(mutex);  // buffers that are waiting for a write, by offset
  std::uint64_t bytes_not_staged TC_GUARDED_BY(mutex) = job.image.bytes();
  bool is_staged TC_GUARDED_BY(mutex) = false;         // no more buffers will follow
  FileWriter* writer TC_GUARDED_BY(mutex) = nullptr;   // set once open() has succeeded or failed
  std::uint64_t bytes_taken TC_GUARDED_BY(mutex) = 0;  // pieces before this were given to a write
  bool is_checksumming TC_GUARDED_BY(mutex) = false;   // one buffer at a time, in order
  Result<> status TC_GUARDED_BY(mutex);
};

}  // namespace torch_ckpt::engine
