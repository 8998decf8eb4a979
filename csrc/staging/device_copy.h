#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "os/function_table.h"
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

/// An event on one of the caller's streams. Once it has occurred, a save's sources on `device` are
/// complete, or a load's targets there may be written. `event` is the device's handle
/// (cudaEvent_t), which the caller must keep alive until the save is staged or the load has ended.
struct ReadyEvent {
  int device = Source::kHost;
  void* event = nullptr;
};

// Copies between device and host memory on streams of its own. The only implementation is for CUDA
// (staging/cuda_copy.cpp). It is registered if the process has loaded a CUDA runtime; otherwise,
// sources on devices are rejected. A copier may be used by one thread at a time;
// several copiers may be used concurrently.
class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;

  /// Starts the copies of all runs, in one submission if the device supports it, and returns
  /// without waiting for them. The sources and the memory must stay valid and unchanged until
  /// wait_oldest() has returned for this submission.
  virtual Result<> submit(std::span<const DeviceRun> runs) = 0;
  virtual Result<> submit_to_device(std::span<const HostRun> runs) = 0;

  /// Waits until the oldest submission not yet waited for is complete on all devices, even if one
  /// of them reports an error.
  virtual Result<> wait_oldest() = 0;

  /// True if wait_oldest() would return immediately. There must be a submission to wait for.
  virtual bool oldest_has_arrived() = 0;

  /// Makes `stream` wait for all submissions: work queued on it from now on starts only after they
  /// complete. Blocks the device, not the host. May be called from any thread, after the last
  /// submission. Fails if a CUDA graph is being captured on `stream`; the capture continues.
  virtual Result<> make_stream_wait(int device, void* stream) = 0;
};

/// Receives a warning for the user about work that continues, but more slowly. The user sees one
/// warning per topic.
using Warn = std::function<void(const std::string& topic, const std::string& text)>;

struct DeviceSupport {
  /// Creates a copier whose copies start after the events in `ready`, which must outlive the
  /// copier. `warn` must not be empty.
  std::unique_ptr<DeviceCopier> (*make_copier)(const std::vector<ReadyEvent>& ready, Warn warn);
  /// Page-locks host memory, so that copies run at the speed of the bus. `device` is the device
  /// used in these copies; without it, CUDA would initialise its first device, even if that device
  /// is not used.
  Result<> (*pin)(std::span<std::byte>, int device);
  void (*unpin)(std::span<std::byte>, int device);
  /// Creates an event, and records it on a stream of the caller. Destroy it with destroy_event().
  Result<void*> (*record_event)(int device, void* stream);
  void (*destroy_event)(int device, void* event);
  Result<> (*wait_for_stream)(int device, void* stream);
};

/// Looks up the functions of a CUDA runtime that the process has loaded, and registers the copies
/// of staging/cuda_copy.cpp. `major` is the runtime's major version. Fails with Errc::system if a
/// function is missing.
Result<> use_cuda_runtime(const os::Lookup& lookup, int major);

/// Called by the file that implements a device. `support` must have static storage duration, or be
/// nullptr.
void register_device_support(const DeviceSupport* support);

/// Returns nullptr if no device is supported.
const DeviceSupport* device_support();

/// Creates a copier for the registered device. Fails with Errc::invalid_argument if there is
/// none. A forked child does not destroy its parent's copiers: it must not touch their device.
Result<std::shared_ptr<DeviceCopier>> make_copier(const std::vector<ReadyEvent>& ready, Warn warn);

// Events on streams of the caller, for which there must be device support. Destroys them. Copies
// that wait for an event must end first.
class RecordedEvents {
 public:
  RecordedEvents() = default;
  ~RecordedEvents();
  RecordedEvents(const RecordedEvents&) = delete;
  RecordedEvents& operator=(const RecordedEvents&) = delete;

  Result<> record(int device, void* stream);
  const std::vector<ReadyEvent>& events() const { return events_; }

 private:
  std::vector<ReadyEvent> events_;
};

}  // namespace torch_ckpt::staging
