#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "engine/collective_buffer.h"
#include "engine/direct_io.h"
#include "engine/file_image.h"
#include "engine/store.h"
#include "engine/timing.h"
#include "error.h"
#include "os/file.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {

/// A file of which several ranks write parts.
struct SharedFile {
  std::string name;
  std::uint64_t bytes = 0;
  // Collects short runs; nullptr: each rank writes its own.
  std::shared_ptr<CollectiveBuffer> collective = nullptr;
  std::uint32_t number = 0;  // in the collective buffer
  // The image is a file of its own, and begins with `head`.
  bool is_packed = false;
  std::string head = {};
};

// A file written by a save: a data file, in a directory or a store, or a file of which several
// ranks write parts. Call open(), write() any number of times, then finish(). After an error, call
// close(), and remove() if the save has failed. write() may be called concurrently, but only once
// for bytes for which is_collective() is true; the other methods must be called by one thread at a
// time.
class OutputFile {
 public:
  /// `folder`, `name` and `image` must outlive the OutputFile. shared: used if the image is
  /// scattered.
  OutputFile(const Folder& folder, const std::string& name, const FileImage& image,
             const SharedFile& shared)
      : folder_(folder),
        name_(name),
        image_(image),
        bytes_(image.is_scattered() ? shared.bytes : image.bytes()),
        collective_(shared.collective.get()),
        number_(shared.number) {}

  /// Returns true if the collective buffer collects some of these bytes of the image. Such writes
  /// must follow each other in the order of the image, and may have to wait.
  bool is_collective(std::uint64_t offset, std::size_t bytes) const;
  /// Creates the file and reserves disk space for it. A data file must not exist yet; a file that
  /// several ranks write may have been created by another rank.
  Result<> open(DirectIo direct_io);
  /// Writes the first `bytes` bytes of the chunk, which are the image's bytes from `offset` on;
  /// begins behind the first `written` bytes. Returns how many bytes are written then. If these are
  /// fewer, the write waits for other ranks; call write() again a little later.
  Result<std::uint64_t> write(const staging::Chunk& chunk, std::size_t bytes, std::uint64_t offset,
                              std::uint64_t written);
  /// True if the file is in a store. Then call send() instead of write().
  bool is_in_store() const { return folder_.store() != nullptr; }
  /// Writes a piece of the file; see Store::write(). `piece.file_bytes` is set by this function.
  Result<> send(FilePiece piece, std::unique_ptr<staging::Chunk>& chunk,
                const std::function<bool()>& is_cancelled);
  /// Fsyncs the file if `sync` is true, and closes it.
  Result<> finish(bool sync, Timing& timing);
  /// Closes the file, unless finish() has closed it.
  void close() {
    file_.reset();
    edges_.reset();
  }
  /// Deletes a data file if open() created it. A file that several ranks write is left to the
  /// coordinator.
  void remove() const noexcept;

 private:
  class Parts;

  Result<> write_image(const staging::Chunk& chunk, std::size_t bytes, std::uint64_t offset);
  Result<> write_segment(std::span<const std::byte> data, std::uint64_t offset);

  const Folder& folder_;
  const std::string& name_;
  const FileImage& image_;
  const std::uint64_t bytes_;
  CollectiveBuffer* const collective_;
  const std::uint32_t number_;  // in the collective buffer
  // Since when a write has been waiting for other ranks.
  std::optional<CollectiveBuffer::Clock::time_point> waiting_since_;
  std::optional<os::File> file_;
  // Buffered, for the bytes of a file of parts that direct I/O cannot write; empty without direct
  // I/O.
  std::optional<os::File> edges_;
  bool is_created_ = false;
  bool is_padded_ = false;  // zeros follow the last byte; finish() removes them
  std::optional<os::FileIdentity> identity_;
};

}  // namespace torch_ckpt::engine
