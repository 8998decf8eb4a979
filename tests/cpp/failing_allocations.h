#pragma once

#include <cstddef>

namespace torch_ckpt::test {

/// While it lives, `count` of the process's calls of operator new throw std::bad_alloc, from number
/// `first` on, which counts from 1 over all threads. One at a time.
class FailingAllocations {
 public:
  explicit FailingAllocations(std::size_t first, std::size_t count = 1);
  ~FailingAllocations();
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;

  /// Whether the first of them has been asked for.
  static bool has_come();
};

/// While it lives, counts the bytes that the process has from operator new. One at a time, in a
/// process whose other threads allocate nothing meanwhile.
class HeapMeter {
 public:
  HeapMeter();
  ~HeapMeter();
  HeapMeter(const HeapMeter&) = delete;
  HeapMeter& operator=(const HeapMeter&) = delete;

  /// The most bytes at any time so far, beyond those at its beginning.
  std::size_t most() const;
};

}  // namespace torch_ckpt::test
