#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_ckpt::staging {

/// The memory that holds a payload. The engine does not own it: the caller that starts a session
/// must keep it alive and unchanged until the session has staged it.
struct Source {
  static constexpr int kHost = -1;

  /// One dimension of a strided source, outermost first.
  struct Dim {
    std::uint64_t size = 0;
    std::int64_t stride_bytes = 0;
  };

  const std::byte* address = nullptr;
  std::uint64_t bytes = 0;  // of the payload, without gaps between elements
  int device = kHost;       // CUDA device ordinal, or kHost
  /// Empty for contiguous bytes. Otherwise the dimensions in the payload's order, with
  /// product(sizes) * item_bytes == bytes.
  std::vector<Dim> dims;
  std::size_t item_bytes = 1;
};

}  // namespace torch_ckpt::staging
