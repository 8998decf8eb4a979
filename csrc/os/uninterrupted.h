#pragma once

#include <cerrno>

namespace torch_ckpt::os {

/// Repeats a system call, such as open, for as long as signals interrupt it; this happens on slow
/// devices and network file systems. Must not be used for close, which releases the descriptor in
/// any case, or for fsync, which may report an error only once.
template <typename Call>
int uninterrupted(Call call) {
  int result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace torch_ckpt::os
