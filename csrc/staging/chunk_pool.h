#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "error.h"
#include "os/pages.h"
#include "staging/source.h"

namespace torch_ckpt::staging {

// One piece of host memory that a file image passes through. Page-aligned and prefaulted.
// Not thread-safe; whoever holds the chunk uses it alone.
class Chunk {
 public:
  static Result<std::unique_ptr<Chunk>> allocate(std::size_t bytes);
  ~Chunk();
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  std::span<std::byte> bytes() const { return pages_.bytes(); }

  /// Page-locks the chunk for copies from a device; does nothing when it is already, or without
  /// devices.
  Result<> pin(int device);

 private:
  explicit Chunk(os::Pages pages) : pages_(std::move(pages)) {}

  os::Pages pages_;
  int pinned_for_ = Source::kHost;
};

// Keeps chunks from one save to the next, since a cold page costs three times a warm one.
// Safe for concurrent use by multiple threads.
class ChunkPool {
 public:
  /// The process's pool; made anew in a forked child.
  static ChunkPool& instance();

  /// A kept chunk of just this size, or a new one, for which kept chunks of other sizes are freed.
  Result<std::unique_ptr<Chunk>> take(std::size_t bytes);
  /// A kept chunk of just this size, or nullptr.
  std::unique_ptr<Chunk> take_kept(std::size_t bytes);
  void give_back(std::unique_ptr<Chunk> chunk);

  /// Frees kept chunks until at most `bytes` are kept.
  void trim(std::size_t bytes);
  std::size_t kept_bytes() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Chunk>> kept_;  // guarded by mutex_
};

}  // namespace torch_ckpt::staging
