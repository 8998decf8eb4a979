#pragma once

#include <cerrno>

namespace torch_ckpt::os {

/// The result of a call like open, made again while a signal interrupts it: on slow devices and
/// network file systems one may. Not for close, whose descriptor has gone, nor for fsync, whose
/// error may never come twice.
template <typename Call>
int uninterrupted(Call call) {
  int result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace torch_ckpt::os
