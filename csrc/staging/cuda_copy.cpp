// The one file that knows CUDA.
//
// 1. Each copier has one non-blocking side stream per device, so that copies neither wait for nor
//    delay the stream that trains.
// 2. The side stream first waits, on the device, for the moment at which the caller's stream had
//    produced the sources, or had done what it does with the targets.
// 3. The runs of a chunk are one submission (cudaMemcpyBatchAsync where the runtime has it), with
//    an event behind it. Waiting for that event is the only time that a thread of ours waits for
//    the device. An event that has been waited for marks a later submission, so there are as many
//    as submissions in flight.
// 4. Sources are kept alive by their owner until the last event has been waited for, so that the
//    caching allocator cannot hand their memory to anybody else meanwhile; nothing needs
//    record_stream.

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

// Whether the device's primary context is there: selecting a device makes it, and it takes hundreds
// of megabytes of the device's memory. False where the driver cannot be asked.
bool has_context(int device) {
  // cuDevicePrimaryCtxGetState of the driver's API, to which the runtime's device numbers are
  // known.
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

// The calling thread is often one of the training's, which goes on with the device that it had; and
// what we do must not end a capture of a CUDA graph that another thread has begun.
// A thread of ours begins with device 0, which it may never have used: what has no context is not
// selected again.
// The runtime keeps the last error of each thread until the thread asks for it. An error of our
// calls is returned by value and cleared here, or torch would report it as one of its own. An error
// that the caller already had stays, so that the caller still finds it.
class OnDevice {
 public:
  explicit OnDevice(int device)
      : device_(device), caller_has_error_(cudaPeekAtLastError() != cudaSuccess) {
    cudaGetDevice(&before_);
    // First, since exchanging the mode makes the context of the device that is selected.
    status_ = cudaSetDevice(device);
    if (status_ == cudaSuccess) cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~OnDevice() {
    if (status_ == cudaSuccess) cudaThreadExchangeStreamCaptureMode(&mode_);
    if (before_ != device_ && has_context(before_)) cudaSetDevice(before_);
    if (!caller_has_error_) static_cast<void>(cudaGetLastError());
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  cudaError_t status() const { return status_; }

 private:
  const int device_;
  const bool caller_has_error_;
  int before_ = 0;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  cudaError_t status_ = cudaSuccess;
};

#define TC_ON_DEVICE(device)  \
  const OnDevice on_(device); \
  if (on_.status() != cudaSuccess) return cuda_error(on_.status(), "cudaSetDevice")

// Copies of one device, in one direction, that are submitted together.
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

// False if the user turns batches off, because drivers have hung on them.
bool batches_are_allowed() {
  const char* const given = std::getenv("TORCH_CKPT_CUDA_BATCHES");
  return given == nullptr || std::string_view(given) != "0";
}

#if CUDART_VERSION >= 13000
// Of one call: very many have made drivers hang.
constexpr std::size_t kMostInBatch = 1024;

cudaError_t copy_as_batch(Batch& batch, int device, cudaStream_t stream) {
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.srcLocHint = {cudaMemLocationTypeDevice, device};
  attributes.dstLocHint = {cudaMemLocationTypeHost, 0};
  // The copies are beside the training, which needs the multiprocessors.
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  if (batch.to_device) std::swap(attributes.srcLocHint, attributes.dstLocHint);
  cudaError_t code = cudaSuccess;
  for (std::size_t at = 0; at < batch.to.size() && code == cudaSuccess; at += kMostInBatch) {
    std::size_t first = 0;
    const std::size_t count = std::min(kMostInBatch, batch.to.size() - at);
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
      const OnDevice on(device);
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
    // All devices, also after an error: until then the memory belongs to them.
    for (const auto& [device, event] : oldest) {
      if (auto arrived = wait_for(device, event); !arrived && status) status = arrived;
      streams_.at(device).free_events.push_back(event);
    }
    return status;
  }

  bool oldest_has_arrived() override {
    return std::all_of(submissions_.front().begin(), submissions_.front().end(),
                       [](const auto& part) {
                         const OnDevice on(part.first);
                         // An error, too, is for wait_oldest() to tell.
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
      // To wait for an event from outside would end the capture with an error of its own.
      return format_error(Errc::invalid_argument,
                          "a CUDA graph is being captured on the stream that should wait for the "
                          "copies");
    }
    TC_CUDA(cudaStreamWaitEvent(waiting, side->second.last, 0));
    return {};
  }

 private:
  struct DeviceStream {
    cudaStream_t stream = nullptr;
    std::vector<cudaEvent_t> events;       // all of them
    std::vector<cudaEvent_t> free_events;  // with room for all of them
    // Marks the last submission until there is another one, waited for or not.
    cudaEvent_t last = nullptr;
    bool batches = batches_are_allowed();  // until the driver refuses one
  };
  using Submission = std::vector<std::pair<int, cudaEvent_t>>;

  static Result<> wait_for(int device, cudaEvent_t event) {
    TC_ON_DEVICE(device);
    TC_CUDA(cudaEventSynchronize(event));
    return {};
  }

  Result<> submit_all(std::map<int, Batch>& batches) {
    // What has been submitted must not arrive in memory that its owner takes back.
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
      // Drivers older than the toolkit have no batches, and some refuse some memory. The part that
      // was submitted is copied again, in the same order. The first of these copies returns an
      // error that stays with the device.
      side.batches = false;
      warn_("CUDA batches, device " + std::to_string(device),
            "the copies to and from CUDA device " + std::to_string(device) +
                " are submitted one by one, which takes more time for many small tensors, because "
                "cudaMemcpyBatchAsync failed: " +
                cudaGetErrorString(code) +
                ". Update the driver, or set TORCH_CKPT_CUDA_BATCHES=0 to skip the attempt.");
    }
#else
    static_cast<void>(device);
#endif
    return copy_one_by_one(batch, side.stream);
  }

  /// Takes no memory when the event is freed again.
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
      const OnDevice on(device);
      cudaStreamSynchronize(side.stream);
    }
  }

  /// The stream of the device that is selected. It is kept only if it waits for all of ready_:
  /// later copies would otherwise read sources that are not complete.
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
  const OnDevice on(device);
  cudaHostUnregister(memory.data());
}

constexpr DeviceSupport kCuda{
    [](const std::vector<ReadyEvent>& ready, Warn warn) {
      return std::unique_ptr<DeviceCopier>(std::make_unique<CudaCopier>(ready, std::move(warn)));
    },
    pin, unpin};

const bool kRegistered = (register_device_support(&kCuda), true);

}  // namespace
}  // namespace torch_ckpt::staging
