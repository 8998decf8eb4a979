#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "error.h"
#include "os/file.h"

// Memory that processes of one user share.
//
//   1. A process creates a MemoryFile and sends its address to the other processes.
//   2. Each process maps the file, which it opens through /proc. The kernel permits that only to
//      the same user.
//   3. The kernel frees the memory once the file is neither open nor mapped.

namespace torch_ckpt::os {

/// Opens a file in memory by its path beneath /proc. Fails with ENOENT if the path leads to another
/// file than `identity` by now.
Result<File> open_memory_file(const std::string& path, const FileIdentity& identity);

// An empty file in memory. Owns the descriptor.
class MemoryFile {
 public:
  /// The address for processes with the same `machine`.
  struct Address {
    std::string machine;  // boot, PID namespace and user
    std::int64_t process = 0;
    int descriptor = -1;
    FileIdentity file;

    bool operator==(const Address&) const = default;
  };

  /// Fails if other processes could not open the file.
  static Result<MemoryFile> create();

  MemoryFile(MemoryFile&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)), address_(std::move(other.address_)) {}
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  ~MemoryFile();

  const Address& address() const { return address_; }

 private:
  explicit MemoryFile(int descriptor) : descriptor_(descriptor) {}

  int descriptor_;
  Address address_;
};

// A mapped MemoryFile. Owns the mapping.
class SharedMemory {
 public:
  /// Extends the file to `bytes` bytes, all 0, and allocates its memory. All processes must give
  /// the same size.
  static Result<SharedMemory> map(const MemoryFile::Address& address, std::size_t bytes);

  SharedMemory(SharedMemory&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  explicit SharedMemory(std::span<std::byte> bytes) : bytes_(bytes) {}

  std::span<std::byte> bytes_;
};

}  // namespace torch_ckpt::os
