#pragma once

#include <cstddef>

namespace torch_ckpt::test {

/// During its lifetime, `count` calls of operator new throw std::bad_alloc, from call number
/// `first` on, counted from 1 over all threads of the process. One at a time.
class FailingAllocations {
 public:
  explicit FailingAllocations(std::size_t first, std::size_t count = 1);
  ~FailingAllocations();
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;

  /// True once the first of them has been reached.
  static bool has_come();
};

/// During its lifetime, counts the bytes that are allocated with operator new. One at a time, in a
/// process whose other threads allocate nothing.
class HeapMeter {
 public:
  HeapMeter();
  ~HeapMeter();
  HeapMeter(const HeapMeter&) = delete;
  HeapMeter& operator=(const HeapMeter&) = delete;

  /// The largest number of bytes so far, beyond those at construction.
  std::size_t most() const;
};

}  // namespace torch_ckpt::test
