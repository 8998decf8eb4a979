#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/direct_io.h"
#include "error.h"
#include "format/record_index.h"
#include "os/directory.h"
#include "os/file.h"

namespace torch_ckpt::engine {

// One data file being read: buffered, and beside it direct where that is wanted and offered.
// Safe for concurrent use by multiple threads, each with scratch memory of its own.
class DataFile {
 public:
  static Result<DataFile> open(const os::Directory& directory, const std::string& name,
                               DirectIo direct_io);

  std::uint64_t bytes() const { return bytes_; }
  const std::string& path() const { return buffered_.path(); }

  /// Whether to read a range around the page cache: what is mostly in it comes from there; other
  /// ranges, where the file system offers it, by direct reads, which leave the cache to the
  /// trainer.
  bool goes_direct(std::uint64_t offset, std::size_t length) const;

  /// Reads exactly out.size() bytes at `offset` through the page cache.
  Result<> read(std::span<std::byte> out, std::uint64_t offset) const {
    return buffered_.read_at(out, offset);
  }

  /// Reads exactly `length` bytes at `offset` into `scratch` and says where in it they are.
  /// `scratch` is page-aligned and has room for them; a direct read takes whole blocks, and where
  /// these have no room it is a buffered one.
  Result<std::span<std::byte>> fetch(std::span<std::byte> scratch, std::uint64_t offset,
                                     std::size_t length, bool direct) const;

 private:
  DataFile(os::File buffered, std::optional<os::File> direct, DirectIo direct_io,
           std::uint64_t bytes)
      : buffered_(std::move(buffered)),
        direct_(std::move(direct)),
        direct_io_(direct_io),
        bytes_(bytes) {}

  os::File buffered_;
  std::optional<os::File> direct_;
  DirectIo direct_io_;
  std::uint64_t bytes_;
};

/// A record that is already in memory.
class RecordInMemory final : public format::RecordBytes {
 public:
  explicit RecordInMemory(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::uint64_t size() const override { return bytes_.size(); }
  Result<std::span<const std::byte>> at(std::uint64_t offset, std::uint64_t length) override;

 private:
  std::span<const std::byte> bytes_;
};

// A record in a file, of which the two ends are read and kept: the archive's headers and directory
// nearly always lie there.
class RecordInFile final : public format::RecordBytes {
 public:
  RecordInFile(const DataFile& file, std::uint64_t offset, std::uint64_t bytes)
      : file_(file), offset_(offset), bytes_(bytes) {}
  std::uint64_t size() const override { return bytes_; }
  Result<std::span<const std::byte>> at(std::uint64_t offset, std::uint64_t length) override;

 private:
  Result<> load(std::vector<std::byte>& into, std::uint64_t offset, std::uint64_t length);

  const DataFile& file_;
  std::uint64_t offset_;
  std::uint64_t bytes_;
  std::vector<std::byte> head_;
  std::vector<std::byte> tail_;
  std::vector<std::byte> other_;
};

}  // namespace torch_ckpt::engine
