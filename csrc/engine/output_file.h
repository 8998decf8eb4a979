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

// A data file that a save writes: open(), write() several times, finish(). After an error call
// abandon(), and remove() if the save has failed. write() may be called by several threads at once,
// the other methods by one thread at a time.
class OutputFile {
 public:
  /// `directory` and `name` outlive the OutputFile.
  OutputFile(const os::Directory& directory, const std::string& name, std::uint64_t bytes)
      : directory_(directory), name_(name), bytes_(bytes) {}

  /// Creates the file, which must not exist, and reserves disk space for it.
  Result<> open(DirectIo direct_io);
  /// Writes the first `bytes` of the chunk at file offset `offset`. Direct I/O writes full blocks,
  /// so the last block is zero-padded, within the chunk.
  Result<> write(const staging::Chunk& chunk, std::size_t bytes, std::uint64_t offset);
  /// Truncates the padding, fsyncs the file if `sync`, and closes it.
  Result<> finish(bool sync, Timing& timing, std::size_t number);
  /// Closes the file unfinished.
  void abandon() { file_.reset(); }
  /// Deletes the file that open() has created.
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
