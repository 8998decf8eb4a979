#pragma once

#include <cerrno>

namespace torch_ckpt::os {

/// Repeats a system call like open while signals interrupt it, which happens on slow devices and
/// network file systems. Not for close, which releases the descriptor anyway, nor for fsync, which
/// may report an error only once.
template <typename Call>
int uninterrupted(Call call) {
  int result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace torch_ckpt::os
