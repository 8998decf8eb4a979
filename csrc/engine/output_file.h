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

// A file that a save makes, from its creation to its end or, where the save has failed, to its
// removal. After an error only abandon() and remove() are left.
// write() may be called by several threads at once, the other methods by one at a time.
class OutputFile {
 public:
  /// Both outlive it.
  OutputFile(const os::Directory& directory, const std::string& name, std::uint64_t bytes)
      : directory_(directory), name_(name), bytes_(bytes) {}

  /// Creates the file, which must not exist, and reserves its bytes on the disk.
  Result<> open(DirectIo direct_io);
  /// Writes the first `bytes` of the chunk at `offset`. Of a direct write, which takes whole
  /// blocks, the last one is padded within the chunk.
  Result<> write(const staging::Chunk& chunk, std::size_t bytes, std::uint64_t offset);
  /// Cuts the padding off, makes the file durable if `sync`, and closes it.
  Result<> finish(bool sync, Timing& timing, std::size_t number);
  /// Closes it as it is.
  void abandon() { file_.reset(); }
  /// Removes what open() has made.
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
