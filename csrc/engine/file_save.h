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

struct FileJob {
  std::string name;  // of the file in the directory; must not exist
  FileImage image;
  // The numbers of the image's items in the plan; where it is empty they are 0 and so on.
  std::vector<std::size_t> items = {};
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

struct FileWriter;

/// One file of a save.
struct FileSave {
  /// `directory` and `ready` outlive it.
  FileSave(FileJob given, std::size_t at, const os::Directory& directory, bool snapshot,
           const std::vector<staging::ReadyEvent>& ready, staging::Warn warn)
      : job(std::move(given)),
        number(at),
        stream(job.image, snapshot, ready, std::move(warn)),
        output(directory, job.name, job.image.bytes()) {}

  /// Of a file that is complete.
  Result<format::FileResult> result() const;
  /// From any thread, and so is what it looks at: each only grows, or becomes true once.
  FilePhase phase() const;

  const FileJob job;
  const std::size_t number;
  ImageStream stream;
  OutputFile output;

  std::atomic<std::uint64_t> bytes_staged{0};
  std::atomic<std::uint64_t> bytes_written{0};
  std::atomic<bool> has_stager{false};
  std::atomic<bool> has_writer{false};
  std::atomic<bool> is_done{false};

  // From its stager to its writer, both of SavePipeline.
  os::Mutex mutex;
  StagingBufferList staged TC_GUARDED_BY(mutex);      // and not taken by the writer, in order
  bool is_staged TC_GUARDED_BY(mutex) = false;        // no more will come
  FileWriter* writer TC_GUARDED_BY(mutex) = nullptr;  // once the file is open, or cannot be
  bool is_checksumming TC_GUARDED_BY(mutex) = false;  // which is done in order
  Result<> status TC_GUARDED_BY(mutex);
};

}  // namespace torch_ckpt::engine
