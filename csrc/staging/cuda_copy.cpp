// The one file that knows CUDA.
//
// 1. Each copier has one non-blocking side stream per device, so that copies neither wait for nor
//    delay the stream that trains.
// 2. The side stream first waits, on the device, for the moment at which the caller's stream had
//    produced the sources, or had done what it does with the targets.
// 3. The runs of a chunk are one submission (cudaMemcpyBatchAsync where the runtime has it), with
// an
//    event behind it. Waiting for that event is the only time that a thread of ours waits for the
//    device.
// 4. Sources are kept alive by their owner until the last event has been waited for, so that the
//    caching allocator cannot hand their memory to anybody else meanwhile; nothing needs
//    record_stream.

#include <cuda_runtime_api.h>

#include <deque>
#include <map>
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

// The calling thread is often one of the training's, which goes on with the device that it had; and
// what we do must not end a capture of a CUDA graph that another thread has begun.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaThreadExchangeStreamCaptureMode(&mode_);
    cudaGetDevice(&before_);
    status_ = cudaSetDevice(device);
  }
  ~OnDevice() {
    cudaSetDevice(before_);
    cudaThreadExchangeStreamCaptureMode(&mode_);
    // An error of ours has been told by value; left behind, torch would take it for one of its own.
    static_cast<void>(cudaGetLastError());
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  cudaError_t status() const { return status_; }

 private:
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

Result<> copy_batch(Batch& batch, int device, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  if (batch.to.size() > 1) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.srcLocHint = {cudaMemLocationTypeDevice, device};
    attributes.dstLocHint = {cudaMemLocationTypeHost, 0};
    if (batch.to_device) std::swap(attributes.srcLocHint, attributes.dstLocHint);
    std::size_t first = 0;
    const cudaError_t code =
        cudaMemcpyBatchAsync(batch.to.data(), batch.from.data(), batch.bytes.data(),
                             batch.to.size(), &attributes, &first, 1, stream);
    if (code == cudaSuccess) return {};
    // Drivers older than the toolkit do not have it.
    if (code != cudaErrorNotSupported && code != cudaErrorCallRequiresNewerDriver) {
      return cuda_error(code, "cudaMemcpyBatchAsync");
    }
    static_cast<void>(cudaGetLastError());
  }
#else
  static_cast<void>(device);
#endif
  return copy_one_by_one(batch, stream);
}

class CudaCopier final : public DeviceCopier {
 public:
  explicit CudaCopier(const std::vector<DeviceMoment>& ready) : ready_(ready) {}

  ~CudaCopier() override {
    for (auto& [device, lane] : lanes_) {
      const OnDevice on(device);
      cudaStreamSynchronize(lane.stream);
      for (cudaEvent_t event : lane.events) cudaEventDestroy(event);
      cudaStreamDestroy(lane.stream);
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
    for (const auto& [device, event] : oldest) {
      TC_ON_DEVICE(device);
      TC_CUDA(cudaEventSynchronize(event));
    }
    return {};
  }

  Result<> hold_back(int device, void* stream) override {
    const auto lane = lanes_.find(device);
    if (lane == lanes_.end() || lane->second.events.empty()) return {};
    TC_ON_DEVICE(device);
    TC_CUDA(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), lane->second.events.back(), 0));
    return {};
  }

 private:
  struct Lane {
    cudaStream_t stream = nullptr;
    // Kept to the end: hold_back() may use the last one at any time.
    std::vector<cudaEvent_t> events;
  };
  using Submission = std::vector<std::pair<int, cudaEvent_t>>;

  Result<> submit_all(std::map<int, Batch>& batches) {
    Submission submission;
    for (auto& [device, batch] : batches) {
      if (auto done = submit_to(device, batch, submission); !done) {
        // What has been submitted must not arrive in memory that its owner takes back.
        wait_for_all();
        return done;
      }
    }
    submissions_.push_back(std::move(submission));
    return {};
  }

  Result<> submit_to(int device, Batch& batch, Submission& submission) {
    TC_ON_DEVICE(device);
    auto lane = lane_of(device);
    if (!lane) return lane.error();
    if (auto copied = copy_batch(batch, device, (*lane)->stream); !copied) return copied;
    cudaEvent_t event = nullptr;
    TC_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    (*lane)->events.push_back(event);
    TC_CUDA(cudaEventRecord(event, (*lane)->stream));
    submission.emplace_back(device, event);
    return {};
  }

  void wait_for_all() {
    for (auto& [device, lane] : lanes_) {
      const OnDevice on(device);
      cudaStreamSynchronize(lane.stream);
    }
  }

  // On that device.
  Result<Lane*> lane_of(int device) {
    Lane& lane = lanes_[device];
    if (lane.stream == nullptr) {
      TC_CUDA(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking));
      for (const DeviceMoment& moment : ready_) {
        TC_CUDA(cudaStreamWaitEvent(lane.stream, static_cast<cudaEvent_t>(moment.event), 0));
      }
    }
    return &lane;
  }

  const std::vector<DeviceMoment>& ready_;
  std::map<int, Lane> lanes_;  // by device ordinal
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
    [](const std::vector<DeviceMoment>& ready) {
      return std::unique_ptr<DeviceCopier>(std::make_unique<CudaCopier>(ready));
    },
    pin, unpin};

const bool kRegistered = (register_device_support(&kCuda), true);

}  // namespace
}  // namespace torch_ckpt::staging
