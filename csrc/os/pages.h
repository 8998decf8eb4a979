#pragma once

#include <cstddef>
#include <span>

#include "error.h"
#include "os/fork_guard.h"

namespace torch_ckpt::os {

// Page-aligned anonymous memory. All pages are populated, because copying into unpopulated pages
// takes three times as long. Move-only. The destructor unmaps the memory, except in a forked child:
// the child does not inherit it, and may have mapped other memory at the same address.
class Pages {
 public:
  /// bytes: a positive multiple of 4096.
  static Result<Pages> allocate(std::size_t bytes);

  Pages() = default;
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages();

  std::span<std::byte> bytes() const { return {address_, size_}; }

 private:
  Pages(std::byte* address, std::size_t size) : address_(address), size_(size) {}

  std::byte* address_ = nullptr;
  std::size_t size_ = 0;
  ProcessMark process_;
};

}  // namespace torch_ckpt::os
