// Copies between CUDA devices and the host. No other file calls the CUDA runtime.
//
// 1. Each copier has its own non-blocking stream on each device, so that copies neither wait for
//    the training stream nor delay it.
// 2. The copier's stream first waits, on the device, for the caller's ready events. Once they have
//    occurred, the sources are complete and targets may be overwritten.
// 3. The copies of a chunk form one submission, followed by an event. If the runtime has
//    cudaMemcpyBatchAsync, the submission is a single call to it. Engine threads wait for nothing
//    on a device except these events. Events are reused, so there are only as many as submissions
//    in flight.
// 4. The owner of the sources keeps them alive until the last event has been waited for, so that
//    the caching allocator cannot reuse their memory. record_stream is not needed.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "staging/cuda_runtime.h"
#include "staging/device_copy.h"

namespace torch_ckpt::staging {
namespace {

bool has_batches = false;  // set by use_cuda_runtime()

Error cuda_error(cuda::Code code, const os::AnyFunction& function) {
  Error error = format_error(Errc::system, cuda::get_error_string(code));
  error.operation = function.name();
  return error;
}

#define TC_CUDA(function, ...)                                                       \
  if (const cuda::Code code_ = cuda::function(__VA_ARGS__); code_ != cuda::kSuccess) \
  return cuda_error(code_, cuda::function)

// cuDevicePrimaryCtxGetState, a function of the driver API, accepts the runtime's device numbers.
using GetContextState = int (*)(int device, unsigned int* flags, int* active);

// Looked up on first use, because the lookup may initialize the driver; a process that has only
// imported torch_ckpt must still be able to fork. nullptr if the driver lacks the function.
std::atomic<GetContextState> get_context_state{nullptr};
std::atomic<bool> has_looked_up_context_state{false};  // reset by use_cuda_runtime()

GetContextState look_up_context_state() {
  constexpr const char* kSymbol = "cuDevicePrimaryCtxGetState";
  constexpr unsigned int kSince = 7000;
  void* function = nullptr;
  int found = -1;
  if (cuda::get_driver_entry_point_by_version) {
    cuda::get_driver_entry_point_by_version(kSymbol, &function, kSince, cuda::kEnableDefault,
                                            &found);
  } else if (cuda::get_driver_entry_point) {
    cuda::get_driver_entry_point(kSymbol, &function, cuda::kEnableDefault, &found);
  }
  return found == cuda::kEntryPointFound ? reinterpret_cast<GetContextState>(function) : nullptr;
}

// True if the device has a primary context. Selecting a device creates one, which takes hundreds of
// megabytes of device memory. Returns false if the driver lacks this query.
bool has_context(int device) {
  if (!has_looked_up_context_state) {
    get_context_state = look_up_context_state();
    has_looked_up_context_state = true;
  }
  const GetContextState get_state = get_context_state;
  unsigned int flags = 0;
  int active = 0;
  return get_state != nullptr && get_state(device, &flags, &active) == 0 && active != 0;
}

// Selects a device, and restores the calling thread's CUDA state at the end of the scope:
//
// - The selected device: the thread often belongs to the training code. The previous device is not
//   selected again if it has no context. A thread's initial device is 0, which the process may not
//   use at all, and selecting it would create a context.
// - The capture mode: CUDA calls in this scope must not invalidate a CUDA graph capture that
//   another thread has started.
// - The last error: the runtime keeps it for the thread until it is read. Errors in this scope are
//   returned by value and cleared; otherwise torch would report them as its own. An error from
//   before the scope is preserved for the caller.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device)
      : device_(device), caller_has_error_(cuda::peek_at_last_error() != cuda::kSuccess) {
    cuda::get_device(&before_);
    // Select the device first: exchanging the mode creates a context on the selected device.
    status_ = cuda::set_device(device);
    if (status_ == cuda::kSuccess) cuda::exchange_capture_mode(&mode_);
  }
  ~DeviceGuard() {
    if (status_ == cuda::kSuccess) cuda::exchange_capture_mode(&mode_);
    if (before_ != device_ && has_context(before_)) cuda::set_device(before_);
    if (!caller_has_error_) static_cast<void>(cuda::get_last_error());
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cuda::Code status() const { return status_; }

 private:
  const int device_;
  const bool caller_has_error_;
  int before_ = 0;
  int mode_ = cuda::kCaptureRelaxed;
  cuda::Code status_ = cuda::kSuccess;
};

#define TC_ON_DEVICE(device)     \
  const DeviceGuard on_(device); \
  if (on_.status() != cuda::kSuccess) return cuda_error(on_.status(), cuda::set_device)

// Copies from or to one device that are submitted together.
struct Batch {
  bool to_device = false;
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<std::size_t> bytes;
};

Result<> copy_one_by_one(const Batch& batch, cuda::Stream stream) {
  for (std::size_t i = 0; i < batch.to.size(); ++i) {
    TC_CUDA(memcpy_async, batch.to[i], batch.from[i], batch.bytes[i],
            batch.to_device ? cuda::kHostToDevice : cuda::kDeviceToHost, stream);
  }
  return {};
}

// False if the runtime has no batches, or if the user has disabled them. Some drivers have hung on
// them.
bool batches_are_allowed() {
  if (!has_batches) return false;
  const char* const given = std::getenv("TORCH_CKPT_CUDA_BATCHES");
  return given == nullptr || std::string_view(given) != "0";
}

// Some drivers have hung on calls with very many copies.
constexpr std::size_t kMaxCopiesInBatch = 1024;

cuda::Code copy_as_batch(Batch& batch, int device, cuda::Stream stream) {
  cuda::CopyAttributes attributes;
  attributes.source_access_order = cuda::kStreamOrder;
  attributes.source = {cuda::kDeviceLocation, device};
  attributes.target = {cuda::kHostLocation, 0};
  // Leave the multiprocessors to training.
  attributes.flags = cuda::kPreferOverlapWithCompute;
  if (batch.to_device) std::swap(attributes.source, attributes.target);
  cuda::Code code = cuda::kSuccess;
  for (std::size_t at = 0; at < batch.to.size() && code == cuda::kSuccess;
       at += kMaxCopiesInBatch) {
    std::size_t first = 0;
    const std::size_t count = std::min(kMaxCopiesInBatch, batch.to.size() - at);
    code = cuda::memcpy_batch_async(batch.to.data() + at, batch.from.data() + at,
                                    batch.bytes.data() + at, count, &attributes, &first, 1, stream);
  }
  return code;
}

class CudaCopier final : public DeviceCopier {
 public:
  CudaCopier(const std::vector<ReadyEvent>& ready, Warn warn)
      : ready_(ready), warn_(std::move(warn)) {}

  ~CudaCopier() override {
    for (auto& [device, side] : streams_) {
      const DeviceGuard on(device);
      cuda::stream_synchronize(side.stream);
      for (cuda::Event event : side.events) cuda::event_destroy(event);
      cuda::stream_destroy(side.stream);
    }
  }

  Result<> submit(std::span<const DeviceRun> runs) override {
    std::map<int, Batch> batches;
    for (const DeviceRun& run : runs) {
      Batch& batch = batches[run.source->device];
      batch.to.push_back(run.out.data());
      batch.from.push_back(run.source->address + run.offset);
      batch.bytes.push_back(run.out.size());
    }
    return submit_all(batches);
  }

  Result<> submit_to_device(std::span<const HostRun> runs) override {
    std::map<int, Batch> batches;
    for (const HostRun& run : runs) {
      Batch& batch = batches[run.device];
      batch.to_device = true;
      batch.to.push_back(run.out);
      batch.from.push_back(run.in.data());
      batch.bytes.push_back(run.in.size());
    }
    return submit_all(batches);
  }

  Result<> wait_oldest() override {
    const Submission oldest = std::move(submissions_.front());
    submissions_.pop_front();
    Result<> status;
    // Wait for all devices even after an error, because they may still use the memory.
    for (const auto& [device, event] : oldest) {
      if (auto waited = wait_for(device, event); !waited && status) status = waited;
      streams_.at(device).free_events.push_back(event);
    }
    return status;
  }

  bool oldest_has_arrived() override {
    return std::all_of(submissions_.front().begin(), submissions_.front().end(),
                       [](const auto& part) {
                         const DeviceGuard on(part.first);
                         // Returns true on an error, which wait_oldest() will report.
                         return cuda::event_query(part.second) != cuda::kNotReady;
                       });
  }

  Result<> make_stream_wait(int device, void* stream) override {
    const auto side = streams_.find(device);
    if (side == streams_.end() || side->second.last == nullptr) return {};
    TC_ON_DEVICE(device);
    const auto waiting = static_cast<cuda::Stream>(stream);
    int capture = cuda::kNotCapturing;
    TC_CUDA(stream_is_capturing, waiting, &capture);
    if (capture != cuda::kNotCapturing) {
      // Waiting for an event from outside the capture would invalidate the capture.
      return format_error(Errc::invalid_argument,
                          "a CUDA graph is being captured on the stream that should wait for the "
                          "copies; call this after the capture");
    }
    TC_CUDA(stream_wait_event, waiting, side->second.last, 0);
    return {};
  }

 private:
  struct DeviceStream {
    cuda::Stream stream = nullptr;
    std::vector<cuda::Event> events;       // all events of the stream
    std::vector<cuda::Event> free_events;  // with capacity for all of them
    cuda::Event last = nullptr;            // of the last submission, even if it was waited for
    bool batches = batches_are_allowed();  // false once the driver has rejected a batch
  };
  using Submission = std::vector<std::pair<int, cuda::Event>>;

  static Result<> wait_for(int device, cuda::Event event) {
    TC_ON_DEVICE(device);
    TC_CUDA(event_synchronize, event);
    return {};
  }

  Result<> submit_all(std::map<int, Batch>& batches) {
    // After an error, the caller reuses the memory, so wait for the copies submitted so far.
    try {
      Submission submission;
      for (auto& [device, batch] : batches) {
        if (auto done = submit_to(device, batch, submission); !done) {
          wait_for_all();
          return done;
        }
      }
      submissions_.push_back(std::move(submission));
      return {};
    } catch (...) {
      wait_for_all();
      throw;
    }
  }

  Result<> submit_to(int device, Batch& batch, Submission& submission) {
    TC_ON_DEVICE(device);
    auto side = stream_of(device);
    if (!side) return side.error();
    TC_TRY(copy_batch(batch, device, **side));
    auto event = free_event_of(**side);
    if (!event) return event.error();
    if (const cuda::Code code = cuda::event_record(*event, (*side)->stream);
        code != cuda::kSuccess) {
      (*side)->free_events.push_back(*event);
      return cuda_error(code, cuda::event_record);
    }
    (*side)->last = *event;
    submission.emplace_back(device, *event);
    return {};
  }

  Result<> copy_batch(Batch& batch, int device, DeviceStream& side) {
    if (batch.to.size() > 1 && side.batches) {
      const cuda::Code code = copy_as_batch(batch, device, side.stream);
      if (code == cuda::kSuccess) return {};
      // Drivers older than the runtime do not support batches, and some drivers reject some kinds
      // of memory. Submit all copies again one by one, including those that the batch has
      // submitted. If the device has a permanent error, the first of these copies returns it.
      side.batches = false;
      warn_("CUDA batches, device " + std::to_string(device),
            "copies to and from CUDA device " + std::to_string(device) +
                " are submitted one by one, which is slower for many small tensors, because "
                "cudaMemcpyBatchAsync failed: " +
                cuda::get_error_string(code) +
                ". Update the driver, or set TORCH_CKPT_CUDA_BATCHES=0 to skip the attempt.");
    }
    return copy_one_by_one(batch, side.stream);
  }

  /// Returns a free event or creates one. Reserves capacity in free_events, so that returning the
  /// event allocates nothing.
  static Result<cuda::Event> free_event_of(DeviceStream& side) {
    if (side.free_events.empty()) {
      side.events.reserve(side.events.size() + 1);
      side.free_events.reserve(side.events.size() + 1);
      cuda::Event event = nullptr;
      TC_CUDA(event_create, &event, cuda::kDisableTiming | cuda::kBlockingSync);
      side.events.push_back(event);
      return event;
    }
    const cuda::Event event = side.free_events.back();
    side.free_events.pop_back();
    return event;
  }

  void wait_for_all() {
    for (auto& [device, side] : streams_) {
      const DeviceGuard on(device);
      cuda::stream_synchronize(side.stream);
    }
  }

  /// Returns the copier's stream on the selected device. Stores a new stream only after making it
  /// wait for all of ready_; otherwise, later copies could read incomplete sources.
  Result<DeviceStream*> stream_of(int device) {
    if (const auto found = streams_.find(device); found != streams_.end()) return &found->second;
    DeviceStream side;
    TC_CUDA(stream_create, &side.stream, cuda::kNonBlocking);
    for (const ReadyEvent& event : ready_) {
      const cuda::Code code =
          cuda::stream_wait_event(side.stream, static_cast<cuda::Event>(event.event), 0);
      if (code == cuda::kSuccess) continue;
      cuda::stream_destroy(side.stream);
      return cuda_error(code, cuda::stream_wait_event);
    }
    return &streams_.emplace(device, std::move(side)).first->second;
  }

  const std::vector<ReadyEvent>& ready_;
  const Warn warn_;
  std::map<int, DeviceStream> streams_;  // by device ordinal
  std::deque<Submission> submissions_;
};

Result<> pin(std::span<std::byte> memory, int device) {
  TC_ON_DEVICE(device);
  TC_CUDA(host_register, memory.data(), memory.size(), cuda::kPortable);
  return {};
}

void unpin(std::span<std::byte> memory, int device) {
  const DeviceGuard on(device);
  cuda::host_unregister(memory.data());
}

Result<void*> record_event(int device, void* stream) {
  TC_ON_DEVICE(device);
  cuda::Event event = nullptr;
  TC_CUDA(event_create, &event, cuda::kDisableTiming);
  if (const cuda::Code code = cuda::event_record(event, static_cast<cuda::Stream>(stream));
      code != cuda::kSuccess) {
    cuda::event_destroy(event);
    return cuda_error(code, cuda::event_record);
  }
  return event;
}

void destroy_event(int device, void* event) {
  const DeviceGuard on(device);
  cuda::event_destroy(static_cast<cuda::Event>(event));
}

Result<> wait_for_stream(int device, void* stream) {
  TC_ON_DEVICE(device);
  TC_CUDA(stream_synchronize, static_cast<cuda::Stream>(stream));
  return {};
}

constexpr DeviceSupport kCuda{
    [](const std::vector<ReadyEvent>& ready, Warn warn) {
      return std::unique_ptr<DeviceCopier>(std::make_unique<CudaCopier>(ready, std::move(warn)));
    },
    pin,
    unpin,
    record_event,
    destroy_event,
    wait_for_stream};

}  // namespace

Result<> use_cuda_runtime(const os::Lookup& lookup, int major) {
  if (const char* const missing = cuda::functions.load(lookup)) {
    return format_error(Errc::system, std::string("the CUDA runtime has no function ") + missing);
  }
  has_looked_up_context_state = false;
  has_batches = cuda::memcpy_batch_async && major == cuda::kMajorWithBatches;
  register_device_support(&kCuda);
  return {};
}

}  // namespace torch_ckpt::staging
