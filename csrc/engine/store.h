// The files of a session: in a local directory, or in a store, such as a bucket.
//
//   1. A save calls Store::write() for each piece of a file, in ascending order, from several
//      threads: a call may begin before the earlier ones have returned. All pieces of a file have
//      the same size, except the last. The last call returns once the file is complete.
//   2. A load calls Store::size() before the first read of a file, and then Store::read(). It
//      delivers the bytes to tensors from the memory in which the store has received them.
//   3. The caller of the session removes what a failed save has written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "error.h"
#include "os/directory.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {

/// Bytes of a file on their way to a store.
struct FilePiece {
  std::uint64_t file_bytes = 0;  // of the complete file
  std::uint64_t offset = 0;
  std::size_t bytes = 0;

  bool is_last() const { return offset + bytes == file_bytes; }
};

/// Bytes of a file, in memory that `owner` keeps alive; without an owner, in memory of the caller.
struct ReadBytes {
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner = nullptr;
};

// Files that are not in a local directory. Safe for concurrent use by multiple threads.
class Store {
 public:
  Store() = default;
  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// The path or URL of the store, for messages.
  virtual std::string path() const = 0;
  std::string path_of(std::string_view name) const { return path() + "/" + std::string(name); }

  /// Writes the first piece.bytes bytes of the chunk. Returns when the store no longer needs the
  /// chunk. If the store may still need it after an error, `chunk` becomes nullptr. Fails soon
  /// after `is_cancelled` has become true. `chunk` is nullptr for an empty file.
  virtual Result<> write(const std::string& name, const FilePiece& piece,
                         std::unique_ptr<staging::Chunk>& chunk,
                         const std::function<bool()>& is_cancelled) = 0;

  /// Returns the size of a file.
  virtual Result<std::uint64_t> size(const std::string& name) = 0;
  /// Reads exactly `bytes` bytes at `offset`. The result has an owner.
  virtual Result<ReadBytes> read(const std::string& name, std::uint64_t offset,
                                 std::size_t bytes) = 0;
};

/// A directory or a store with the files of a session. Owns the descriptor of a local directory.
class Folder {
 public:
  Folder(os::Directory directory) : files_(std::move(directory)) {}
  Folder(std::shared_ptr<Store> store) : files_(std::move(store)) {}
  /// Returns a second folder, with a descriptor that shares the lock of this descriptor.
  Result<Folder> duplicate() const;

  /// Returns nullptr if the files are in a store.
  const os::Directory* directory() const { return std::get_if<os::Directory>(&files_); }
  /// Returns nullptr if the files are in a directory.
  Store* store() const {
    const auto* store = std::get_if<std::shared_ptr<Store>>(&files_);
    return store == nullptr ? nullptr : store->get();
  }

  std::string path() const {
    return directory() != nullptr ? directory()->path() : store()->path();
  }
  std::string path_of(std::string_view name) const {
    return directory() != nullptr ? directory()->path_of(name) : store()->path_of(name);
  }
  /// Makes creations in the folder durable.
  Result<> sync() const {
    if (directory() != nullptr) return directory()->sync();
    return {};
  }
  /// Closes the descriptor of a local directory.
  void close() {
    if (auto* directory = std::get_if<os::Directory>(&files_)) directory->close();
  }

 private:
  std::variant<os::Directory, std::shared_ptr<Store>> files_;
};

inline Result<Folder> Folder::duplicate() const {
  if (directory() == nullptr) return Folder(std::get<std::shared_ptr<Store>>(files_));
  auto own = directory()->duplicate();
  if (!own) return own.error();
  return Folder(std::move(*own));
}

/// Returns the size of the parts, and of the pieces, of a file in a store. A multipart
/// upload has at most 10,000 parts; the number of parts stays below.
constexpr std::size_t piece_bytes_in_store(std::uint64_t file_bytes) {
  constexpr std::uint64_t kMebibyte = std::uint64_t{1} << 20;
  constexpr std::uint64_t kLeastMebibytes = 16;
  constexpr std::uint64_t kMostParts = 9000;
  const std::uint64_t mebibytes =
      (file_bytes + kMostParts * kMebibyte - 1) / (kMostParts * kMebibyte);
  return static_cast<std::size_t>(std::max(kLeastMebibytes, mebibytes) * kMebibyte);
}

}  // namespace torch_ckpt::engine
