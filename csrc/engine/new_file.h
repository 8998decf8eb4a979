#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "engine/direct_io.h"
#include "error.h"
#include "os/directory.h"
#include "os/file.h"

namespace torch_ckpt::engine {

/// Creates a file of `bytes` bytes that a save writes, with direct I/O as far as the option asks
/// for it. If the option requires direct I/O and the file system does not support it, fails with
/// Errc::invalid_argument. may_exist: opens the file if it exists already.
Result<os::File> create_file(const os::Directory& directory, const std::string& name,
                             std::uint64_t bytes, DirectIo direct_io, bool may_exist);

// A file whose bytes are written in their order. After an error, the caller removes the file.
class NewFile {
 public:
  /// Creates the file, and reserves space for `bytes` bytes.
  static Result<NewFile> create(const os::Directory& directory, const std::string& name,
                                std::uint64_t bytes, DirectIo direct_io);

  /// Writes the next bytes. Direct I/O needs memory and sizes that are multiples of
  /// os::kDirectAlignment; other bytes, and all bytes after them, are written buffered.
  Result<> write(std::span<const std::byte> data);
  /// Fsyncs the file if `sync` is true, and closes it.
  Result<> finish(bool sync) &&;

 private:
  explicit NewFile(os::File file) : file_(std::move(file)) {}

  os::File file_;
  std::uint64_t offset_ = 0;
};

}  // namespace torch_ckpt::engine
