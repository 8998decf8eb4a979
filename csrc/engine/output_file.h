#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "engine/direct_io.h"
#include "engine/timing.h"
#include "error.h"
#include "os/directory.h"
#include "os/file.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {

// A data file written by a save. Call open(), write() any number of times, then finish(). After an
// error, call abandon(), and remove() if the save has failed. write() may be called concurrently;
// the other methods must be called by one thread at a time.
class OutputFile {
 public:
  /// `directory` and `name` must outlive the OutputFile.
  OutputFile(const os::Directory& directory, const std::string& name, std::uint64_t bytes)
      : directory_(directory), name_(name), bytes_(bytes) {}

  /// Creates the file, which must not exist yet, and reserves disk space for it.
  Result<> open(DirectIo direct_io);
  /// Writes the first `bytes` bytes of the chunk at `offset` in the file. Direct I/O writes entire
  /// blocks, so the last block is zero-padded in the chunk.
  Result<> write(const staging::Chunk& chunk, std::size_t bytes, std::uint64_t offset);
  /// Removes the padding, fsyncs the file if `sync` is true, and closes it.
  Result<> finish(bool sync, Timing& timing, std::size_t number);
  /// Closes the file without finishing it.
  void abandon() { file_.reset(); }
  /// Deletes the file if open() created it.
  void remove() const noexcept;

 private:
  const os::Directory& directory_;
  const std::string& name_;
  const std::uint64_t bytes_;
  std::optional<os::File> file_;
  bool is_created_ = false;
  std::optional<os::FileIdentity> identity_;
};

}  // namespace torch_ckpt::engine
