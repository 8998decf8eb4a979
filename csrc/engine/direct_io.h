#pragma once

namespace torch_ckpt::engine {

/// Determines when to use direct I/O, which bypasses the page cache.
enum class DirectIo {
  automatic,  // for large reads and writes, if the file system supports it
  on,         // always; fails if the file system does not support it
  off,
};

}  // namespace torch_ckpt::engine
