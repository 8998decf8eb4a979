// Copies between CUDA devices and the host. No other file uses CUDA.
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

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "staging/device_copy.h"

namespace torch_ckpt::staging {
namespace {

Error cuda_error(cudaError_t code, const char* call) {
  Error error = format_error(Errc::system, cudaGetErrorString(code));
  error.operation = call;
  return error;
}

#define TC_CUDA(call) \
  if (const cudaError_t code_ = (call); code_ != cudaSuccess) return cuda_error(code_, #call)

// True if the device has a primary context. Selecting a device creates one, which takes hundreds of
// megabytes of device memory. Returns false if the driver lacks this query.
bool has_context(int device) {
  // cuDevicePrimaryCtxGetState, a function of the driver API, accepts the runtime's device numbers.
  using GetState = int (*)(int device, unsigned int* flags, int* active);
  static const GetState get_state = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    constexpr unsigned int kSince = 7000;
    const cudaError_t code = cudaGetDriverEntryPointByVersion(
        "cuDevicePrimaryCtxGetState", &function, kSince, cudaEnableDefault, &found);
#else
    const cudaError_t code =
        cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &function, cudaEnableDefault, &found);
#endif
    const bool is_there = code == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return is_there ? reinterpret_cast<GetState>(function) : nullptr;
  }();
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
      : device_(device), caller_has_error_(cudaPeekAtLastError() != cudaSuccess) {
    cudaGetDevice(&before_);
    // Select the device first: exchanging the mode creates a context on the selected device.
    status_ = cudaSetDevice(device);
    if (status_ == cudaSuccess) cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~DeviceGuard() {
    if (status_ == cudaSuccess) cudaThreadExchangeStreamCaptureMode(&mode_);
    if (before_ != device_ && has_context(before_)) cudaSetDevice(before_);
    if (!caller_has_error_) static_cast<void>(cudaGetLastError());
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t status() const { return status_; }

 private:
  const int device_;
  const bool caller_has_error_;
  int before_ = 0;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  cudaError_t status_ = cudaSuccess;
};

#define TC_ON_DEVICE(device)     \
  const DeviceGuard on_(device); \
  if (on_.status() != cudaSuccess) return cuda_error(on_.status(), "cudaSetDevice")

// Copies from or to one device that are submitted together.
struct Batch {
  bool to_device = false;
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<std::size_t> bytes;
};

Result<> copy_one_by_one(const Batch& batch, cudaStream_t stream) {
  for (std::size_t i = 0; i < batch.to.size(); ++i) {
    TC_CUDA(cudaMemcpyAsync(batch.to[i], batch.from[i], batch.bytes[i],
                            batch.to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                            stream));
  }
  return {};
}

// False if the user has disabled batches. Some drivers have hung on them.
bool batches_are_allowed() {
  const char* const given = std::getenv("TORCH_CKPT_CUDA_BATCHES");
  return given == nullptr || std::string_view(given) != "0";
}

#if CUDART_VERSION >= 13000
// Some drivers have hung on calls with very many copies.
constexpr std::size_t kMaxCopiesInBatch = 1024;

cudaError_t copy_as_batch(Batch& batch, int device, cudaStream_t stream) {
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.srcLocHint = {cudaMemLocationTypeDevice, device};
  attributes.dstLocHint = {cudaMemLocationTypeHost, 0};
  // Leave the multiprocessors to training.
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  if (batch.to_device) std::swap(attributes.srcLocHint, attributes.dstLocHint);
  cudaError_t code = cudaSuccess;
  for (std::size_t at = 0; at < batch.to.size() && code == cudaSuccess; at += kMaxCopiesInBatch) {
    std::size_t first = 0;
    const std::size_t count = std::min(kMaxCopiesInBatch, batch.to.size() - at);
    code = cudaMemcpyBatchAsync(batch.to.data() + at, batch.from.data() + at,
                                batch.bytes.data() + at, count, &attributes, &first, 1, stream);
  }
  return code;
}
#endif

class CudaCopier final : public DeviceCopier {
 public:
  CudaCopier(const std::vector<ReadyEvent>& ready, Warn warn)
      : ready_(ready), warn_(std::move(warn)) {}

  ~CudaCopier() override {
    for (auto& [device, side] : streams_) {
      const DeviceGuard on(device);
      cudaStreamSynchronize(side.stream);
      for (cudaEvent_t event : side.events) cudaEventDestroy(event);
      cudaStreamDestroy(side.stream);
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
                         return cudaEventQuery(part.second) != cudaErrorNotReady;
                       });
  }

  Result<> make_stream_wait(int device, void* stream) override {
    const auto side = streams_.find(device);
    if (side == streams_.end() || side->second.last == nullptr) return {};
    TC_ON_DEVICE(device);
    const auto waiting = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    TC_CUDA(cudaStreamIsCapturing(waiting, &capture));
    if (capture != cudaStreamCaptureStatusNone) {
      // Waiting for an event from outside the capture would invalidate the capture.
      return format_error(Errc::invalid_argument,
                          "a CUDA graph is being captured on the stream that should wait for the "
                          "copies; call this after the capture");
    }
    TC_CUDA(cudaStreamWaitEvent(waiting, side->second.last, 0));
    return {};
  }

 private:
  struct DeviceStream {
    cudaStream_t stream = nullptr;
    std::vector<cudaEvent_t> events;       // all events of the stream
    std::vector<cudaEvent_t> free_events;  // with capacity for all of them
    cudaEvent_t last = nullptr;            // of the last submission, even if it was waited for
    bool batches = batches_are_allowed();  // false once the driver has rejected a batch
  };
  using Submission = std::vector<std::pair<int, cudaEvent_t>>;

  static Result<> wait_for(int device, cudaEvent_t event) {
    TC_ON_DEVICE(device);
    TC_CUDA(cudaEventSynchronize(event));
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
    if (auto copied = copy_batch(batch, device, **side); !copied) return copied;
    auto event = free_event_of(**side);
    if (!event) return event.error();
    if (const cudaError_t code = cudaEventRecord(*event, (*side)->stream); code != cudaSuccess) {
      (*side)->free_events.push_back(*event);
      return cuda_error(code, "cudaEventRecord");
    }
    (*side)->last = *event;
    submission.emplace_back(device, *event);
    return {};
  }

  Result<> copy_batch(Batch& batch, int device, DeviceStream& side) {
#if CUDART_VERSION >= 13000
    if (batch.to.size() > 1 && side.batches) {
      const cudaError_t code = copy_as_batch(batch, device, side.stream);
      if (code == cudaSuccess) return {};
      // Drivers older than the toolkit do not support batches, and some drivers reject some kinds
      // of memory. Submit all copies again one by one, including those that the batch has
      // submitted. If the device has a permanent error, the first of these copies returns it.
      side.batches = false;
      warn_("CUDA batches, device " + std::to_string(device),
            "copies to and from CUDA device " + std::to_string(device) +
                " are submitted one by one, which is slower for many small tensors, because "
                "cudaMemcpyBatchAsync failed: " +
                cudaGetErrorString(code) +
                ". Update the driver, or set TORCH_CKPT_CUDA_BATCHES=0 to skip the attempt.");
    }
#else
    static_cast<void>(device);
#endif
    return copy_one_by_one(batch, side.stream);
  }

  /// Returns a free event or creates one. Reserves capacity in free_events, so that returning the
  /// event allocates nothing.
  static Result<cudaEvent_t> free_event_of(DeviceStream& side) {
    if (side.free_events.empty()) {
      side.events.reserve(side.events.size() + 1);
      side.free_events.reserve(side.events.size() + 1);
      cudaEvent_t event = nullptr;
      TC_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
      side.events.push_back(event);
      return event;
    }
    const cudaEvent_t event = side.free_events.back();
    side.free_events.pop_back();
    return event;
  }

  void wait_for_all() {
    for (auto& [device, side] : streams_) {
      const DeviceGuard on(device);
      cudaStreamSynchronize(side.stream);
    }
  }

  /// Returns the copier's stream on the selected device. Stores a new stream only after making it
  /// wait for all of ready_; otherwise, later copies could read incomplete sources.
  Result<DeviceStream*> stream_of(int device) {
    if (const auto found = streams_.find(device); found != streams_.end()) return &found->second;
    DeviceStream side;
    TC_CUDA(cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking));
    for (const ReadyEvent& event : ready_) {
      const cudaError_t code =
          cudaStreamWaitEvent(side.stream, static_cast<cudaEvent_t>(event.event), 0);
      if (code == cudaSuccess) continue;
      cudaStreamDestroy(side.stream);
      return cuda_error(code, "cudaStreamWaitEvent");
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
  TC_CUDA(cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable));
  return {};
}

void unpin(std::span<std::byte> memory, int device) {
  const DeviceGuard on(device);
  cudaHostUnregister(memory.data());
}

Result<void*> record_event(int device, void* stream) {
  TC_ON_DEVICE(device);
  cudaEvent_t event = nullptr;
  TC_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  if (const cudaError_t code = cudaEventRecord(event, static_cast<cudaStream_t>(stream));
      code != cudaSuccess) {
    cudaEventDestroy(event);
    return cuda_error(code, "cudaEventRecord");
  }
  return event;
}

void destroy_event(int device, void* event) {
  const DeviceGuard on(device);
  cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

Result<> wait_for_stream(int device, void* stream) {
  TC_ON_DEVICE(device);
  TC_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
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

const bool kRegistered = (register_device_support(&kCuda), true);

}  // namespace
}  // namespace torch_ckpt::staging
