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

/// One run of device memory on its way to the host.
struct DeviceRun {
  const Source* source = nullptr;  // contiguous, on a device
  std::uint64_t offset = 0;        // within the payload
  std::span<std::byte> out;
};

/// One run of host memory on its way to a device.
struct HostRun {
  std::span<const std::byte> in;
  std::byte* out = nullptr;  // on the device
  int device = 0;
};

/// A moment in a stream of the caller's, after which the sources on `device` are complete, or
/// targets may be written. `event` is the device's own handle (cudaEvent_t); the caller keeps it
/// alive until the save has staged or the load has ended.
struct ReadyEvent {
  int device = Source::kHost;
  void* event = nullptr;
};

// Copies device memory into host memory, or the other way round, on streams of its own. CUDA is one
// implementation, in one added file that registers itself; a build without the toolkit has none and
// refuses device sources. submit() and wait_oldest() are for one thread at a time; several copiers
// may work at once.
class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;

  /// Starts the copies of all runs, in one submission where the device can, and returns without
  /// waiting for them. Memory and sources must stay as they are until they have been waited for.
  virtual Result<> submit(std::span<const DeviceRun> runs) = 0;
  virtual Result<> submit_to_device(std::span<const HostRun> runs) = 0;

  /// Waits until everything of the oldest submission that was not waited for has arrived, on all
  /// devices, be it that one of them has failed.
  virtual Result<> wait_oldest() = 0;

  /// Whether wait_oldest() would return at once. There is such a submission.
  virtual bool oldest_has_arrived() = 0;

  /// Makes the work that is queued on `stream` from now on wait, on the device, for all that has
  /// been submitted; the host does not wait. For any thread, once nothing more is submitted. Fails
  /// where a CUDA graph is being captured on `stream`, and leaves the capture as it is.
  virtual Result<> make_stream_wait(int device, void* stream) = 0;
};

/// Receives a sentence for the user about work that goes on by a slower way. The topic is the same
/// for all warnings of which the user should see one.
using Warn = std::function<void(const std::string& topic, const std::string& text)>;

struct DeviceSupport {
  /// A copier whose copies begin after `ready`, which lives for as long as the copier. `warn` is
  /// not empty.
  std::unique_ptr<DeviceCopier> (*make_copier)(const std::vector<ReadyEvent>& ready, Warn warn);
  /// Page-locks host memory, so that copies into it run at the bus's speed. The device is the one
  /// that the copies come from: without it CUDA would set up its first device, used or not.
  Result<> (*pin)(std::span<std::byte>, int device);
  void (*unpin)(std::span<std::byte>, int device);
};

/// Called once, at start-up, by the file that implements a device. `support` lives for ever.
void register_device_support(const DeviceSupport* support);

/// nullptr where this build has no device support.
const DeviceSupport* device_support();

/// A copier of the registered device, or Errc::invalid_argument where this build has none. A forked
/// child never destroys a copier of its parent's: it may not touch the parent's device.
Result<std::shared_ptr<DeviceCopier>> make_copier(const std::vector<ReadyEvent>& ready, Warn warn);

}  // namespace torch_ckpt::staging
