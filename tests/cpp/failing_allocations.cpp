#include "failing_allocations.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>

namespace {

constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

std::atomic<std::size_t> asked{0};
std::atomic<std::size_t> first_to_fail{kNever};
std::atomic<std::size_t> end_of_failures{kNever};

std::atomic<bool> is_metered{false};
std::atomic<std::ptrdiff_t> live_bytes{0};
std::atomic<std::ptrdiff_t> most_bytes{0};

void meter(void* memory, int sign) {
  if (!is_metered || memory == nullptr) return;
  const auto bytes = static_cast<std::ptrdiff_t>(::malloc_usable_size(memory));
  const std::ptrdiff_t live = live_bytes += sign * bytes;
  if (live > most_bytes) most_bytes = live;
}

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (first_to_fail != kNever) {
    const std::size_t number = ++asked;
    if (number >= first_to_fail && number < end_of_failures) throw std::bad_alloc();
  }
  void* memory = nullptr;
  if (::posix_memalign(&memory, std::max(alignment, sizeof(void*)),
                       std::max<std::size_t>(bytes, 1))) {
    throw std::bad_alloc();
  }
  meter(memory, 1);
  return memory;
}

void release(void* memory) {
  meter(memory, -1);
  std::free(memory);
}

}  // namespace

// Replaces operator new for the entire program. The array forms call these. So do the standard
// library's non-throwing forms, but AddressSanitizer replaces those, and its memory does not match
// the deletes here.
void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return allocate(bytes, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace torch_ckpt::test {

FailingAllocations::FailingAllocations(std::size_t first, std::size_t count) {
  asked = 0;
  end_of_failures = count > kNever - first ? kNever : first + count;
  first_to_fail = first;
}

FailingAllocations::~FailingAllocations() { first_to_fail = kNever; }

HeapMeter::HeapMeter() {
  live_bytes = 0;
  most_bytes = 0;
  is_metered = true;
}

HeapMeter::~HeapMeter() { is_metered = false; }

std::size_t HeapMeter::most() const { return static_cast<std::size_t>(most_bytes.load()); }

bool FailingAllocations::has_come() { return asked >= first_to_fail; }

}  // namespace torch_ckpt::test
