#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "error.h"
#include "staging/source.h"

namespace torch_ckpt::staging {

// Copies device memory into host memory. CUDA is one implementation, in one added file that
// registers itself; a build without the toolkit has none and refuses device sources.
// One object belongs to one file's strand and is not thread-safe; several may run at once.
class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;

  /// Fills `out` with bytes [offset, offset + out.size()) of a contiguous device source, on a
  /// stream of the copier's own, and returns once they have arrived.
  virtual Result<> copy(const Source& source, std::uint64_t offset, std::span<std::byte> out) = 0;
};

struct DeviceSupport {
  std::unique_ptr<DeviceCopier> (*make_copier)();
  /// Page-locks host memory, so that copies into it run at the bus's speed. The device is the one
  /// that the copies come from: without it CUDA would set up its first device, used or not.
  Result<> (*pin)(std::span<std::byte>, int device);
  void (*unpin)(std::span<std::byte>, int device);
};

/// Called once, at start-up, by the file that implements a device. `support` lives for ever.
void register_device_support(const DeviceSupport* support);

/// nullptr where this build has no device support.
const DeviceSupport* device_support();

}  // namespace torch_ckpt::staging
