#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/direct_io.h"
#include "engine/store.h"
#include "error.h"
#include "format/record_index.h"
#include "os/file.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {

// A data file: in a store, or open for buffered reads and, if enabled and supported, for direct
// I/O. Safe for concurrent use by multiple threads, each with its own scratch memory.
class DataFile {
 public:
  /// The store of the folder must outlive the file.
  static Result<DataFile> open(const Folder& folder, const std::string& name, DirectIo direct_io);

  std::uint64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

  /// True if a range should be read at once: from a store, or with direct I/O, which leaves the
  /// page cache to the training process. A range that is mostly in the page cache should be read
  /// from there.
  bool prefers_direct_read(std::uint64_t offset, std::size_t length) const;

  /// Reads exactly out.size() bytes at `offset`, through the page cache.
  Result<> read(std::span<std::byte> out, std::uint64_t offset) const;

  /// Reads the first or the last bytes of a record. Each read of a store is a request. So the read
  /// of a tail in a store includes the head of the next record, which is kept for read_head().
  Result<std::vector<std::byte>> read_head(std::uint64_t offset, std::uint64_t bytes) const;
  Result<std::vector<std::byte>> read_tail(std::uint64_t offset, std::uint64_t bytes) const;
  /// Number of bytes to read at each end of a record, if it is as long.
  std::uint64_t ends_bytes() const;

  /// Reads exactly `length` bytes at `offset` into `scratch` and returns the part of `scratch` that
  /// contains them. `scratch` must be page-aligned and hold at least `length` bytes. A direct read
  /// is extended to block boundaries; if `scratch` is too small for that, the read is buffered.
  /// `scratch` may be empty if the file is in a store. Then the bytes are not copied to it.
  Result<ReadBytes> fetch(std::span<std::byte> scratch, std::uint64_t offset, std::size_t length,
                          bool direct) const;

 private:
  DataFile(std::string name, std::string path) : name_(std::move(name)), path_(std::move(path)) {}

  std::string name_;
  std::string path_;
  // Heads of records that were read with the tails before them, by offset.
  struct Heads {
    os::Mutex mutex;
    std::map<std::uint64_t, std::vector<std::byte>> by_offset TC_GUARDED_BY(mutex);
  };

  std::uint64_t bytes_ = 0;
  Store* store_ = nullptr;  // nullptr: the file is in a directory
  std::unique_ptr<Heads> heads_;
  std::optional<os::File> buffered_;
  std::optional<os::File> direct_;
  DirectIo direct_io_ = DirectIo::off;
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

/// Number of bytes that RecordInFile caches at each end of a record. In stock torch's archives, 704
/// bytes precede the payload and about 1,250 follow it.
inline constexpr std::uint64_t kEndsBytes = 2048;
/// Number of bytes that RecordInFile caches at each end of a record in a store. The engine's
/// archives have up to 16 KiB at each end.
inline constexpr std::uint64_t kEndsBytesInStore = std::uint64_t{32} << 10;

// A record in a file. Caches both ends of the record, since they nearly always contain all of the
// archive's headers and its directory.
class RecordInFile final : public format::RecordBytes {
 public:
  RecordInFile(const DataFile& file, std::uint64_t offset, std::uint64_t bytes)
      : file_(file), offset_(offset), bytes_(bytes) {}
  std::uint64_t size() const override { return bytes_; }
  Result<std::span<const std::byte>> at(std::uint64_t offset, std::uint64_t length) override;

 private:
  const DataFile& file_;
  std::uint64_t offset_;
  std::uint64_t bytes_;
  std::vector<std::byte> head_;
  std::vector<std::byte> tail_;
  std::vector<std::byte> other_;
};

}  // namespace torch_ckpt::engine
