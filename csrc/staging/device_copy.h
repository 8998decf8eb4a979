#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "staging/source.h"

namespace torch_ckpt::staging {

/// A contiguous copy from a device to the host.
struct DeviceRun {
  const Source* source = nullptr;  // contiguous, on a device
  std::uint64_t offset = 0;        // within the payload
  std::span<std::byte> out;
};

/// A contiguous copy from the host to a device.
struct HostRun {
  std::span<const std::byte> in;
  std::byte* out = nullptr;  // on the device
  int device = 0;
};

/// An event in a stream of the caller. Once it has occurred, the sources on `device` are complete,
/// or its targets may be written. `event` is the device's handle (cudaEvent_t); the caller keeps it
/// alive until the save is staged or the load has ended.
struct ReadyEvent {
  int device = Source::kHost;
  void* event = nullptr;
};

// Copies between device and host memory, on its own streams. The only implementation is for CUDA
// (staging/cuda_copy.cpp), which registers itself. A build without the CUDA toolkit has no
// implementation and rejects sources on devices. A copier is for one thread at a time; several
// copiers may be used at once.
class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;

  /// Starts the copies of all runs, in one submission if the device supports it, and returns
  /// without waiting for them. Memory and sources must stay unchanged until wait_oldest() has
  /// returned.
  virtual Result<> submit(std::span<const DeviceRun> runs) = 0;
  virtual Result<> submit_to_device(std::span<const HostRun> runs) = 0;

  /// Waits until the oldest submission that was not waited for is complete on all devices, even if
  /// one of them reports an error.
  virtual Result<> wait_oldest() = 0;

  /// True if wait_oldest() would return at once. There must be a submission to wait for.
  virtual bool oldest_has_arrived() = 0;

  /// Makes work that is queued on `stream` from now on wait for all submissions. The device waits,
  /// not the host. For any thread, after the last submission. Fails if a CUDA graph is being
  /// captured on `stream`; the capture continues.
  virtual Result<> make_stream_wait(int device, void* stream) = 0;
};

/// Receives a warning for the user, about work that continues more slowly. The user sees one
/// warning for each topic.
using Warn = std::function<void(const std::string& topic, const std::string& text)>;

struct DeviceSupport {
  /// Creates a copier whose copies begin after `ready`, which must outlive the copier. `warn` must
  /// not be empty.
  std::unique_ptr<DeviceCopier> (*make_copier)(const std::vector<ReadyEvent>& ready, Warn warn);
  /// Page-locks host memory, so that copies run at the speed of the bus. `device` is the device of
  /// these copies: CUDA would otherwise initialise its first device, even if it is not used.
  Result<> (*pin)(std::span<std::byte>, int device);
  void (*unpin)(std::span<std::byte>, int device);
};

/// Called once, at program start, by the file that implements a device. `support` is static.
void register_device_support(const DeviceSupport* support);

/// Returns nullptr if this build has no device support.
const DeviceSupport* device_support();

/// Creates a copier of the registered device. Fails with Errc::invalid_argument if this build has
/// none. A forked child does not destroy its parent's copiers: it must not touch their device.
Result<std::shared_ptr<DeviceCopier>> make_copier(const std::vector<ReadyEvent>& ready, Warn warn);

}  // namespace torch_ckpt::staging
