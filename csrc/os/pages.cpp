#include "os/pages.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include "os/fault.h"

namespace torch_ckpt::os {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

Error allocation_error(std::size_t bytes) {
  Error error = system_error(errno, "mmap", "");
  error.detail =
      "could not allocate " + std::to_string(bytes) + " bytes of host memory for a staging chunk";
  return error;
}

}  // namespace

Result<Pages> Pages::allocate(std::size_t bytes) {
  TC_FAULT("mmap", "");
  // Align for huge pages if the size permits: a direct write of a chunk then pins two pages instead
  // of a thousand.
  const std::size_t alignment = bytes % kHugePageBytes == 0 ? kHugePageBytes : kPageBytes;
  const std::size_t reserved = bytes + alignment - kPageBytes;
  void* mapped =
      ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return allocation_error(bytes);
  auto* const begin = static_cast<std::byte*>(mapped);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(begin) & (alignment - 1);
  std::byte* const address = begin + before;
  if (before > 0) ::munmap(begin, before);
  if (reserved > before + bytes) ::munmap(address + bytes, reserved - before - bytes);
  Pages pages(address, bytes);
  // Keep the pages out of forked children, which do not use them: a fork during a direct transfer
  // makes pages copy-on-write, and parts of the transfer may be lost (open(2), O_DIRECT).
  ::madvise(address, bytes, MADV_DONTFORK);
  ::madvise(address, bytes, MADV_HUGEPAGE);
  if (::madvise(address, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINVAL) return allocation_error(bytes);
    // Linux before 5.14 lacks MADV_POPULATE_WRITE.
    for (std::size_t at = 0; at < bytes; at += kPageBytes) address[at] = std::byte{0};
  }
  return pages;
}

Pages::Pages(Pages&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      process_(other.process_) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(size_, other.size_);
  std::swap(process_, other.process_);
  return *this;
}

Pages::~Pages() {
  if (address_ != nullptr && !process_.inherited()) ::munmap(address_, size_);
}

}  // namespace torch_ckpt::os
