// The one file that knows CUDA. Copies run on a non-blocking side stream, so that they neither wait
// for nor delay the stream that trains; the caller has made sure that the source is complete.

#include <cuda_runtime_api.h>

#include <map>

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

class CudaCopier final : public DeviceCopier {
 public:
  ~CudaCopier() override {
    for (const auto& [device, stream] : streams_) {
      cudaSetDevice(device);
      cudaStreamSynchronize(stream);
      cudaStreamDestroy(stream);
    }
  }

  Result<> copy(const Source& source, std::uint64_t offset, std::span<std::byte> out) override {
    TC_CUDA(cudaSetDevice(source.device));
    cudaStream_t& stream = streams_[source.device];
    if (stream == nullptr) {
      TC_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }
    TC_CUDA(cudaMemcpyAsync(out.data(), source.address + offset, out.size(), cudaMemcpyDeviceToHost,
                            stream));
    TC_CUDA(cudaStreamSynchronize(stream));
    return {};
  }

 private:
  std::map<int, cudaStream_t> streams_;  // by device ordinal
};

Result<> pin(std::span<std::byte> memory, int device) {
  TC_CUDA(cudaSetDevice(device));
  TC_CUDA(cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable));
  return {};
}

void unpin(std::span<std::byte> memory, int device) {
  cudaSetDevice(device);
  cudaHostUnregister(memory.data());
}

constexpr DeviceSupport kCuda{
    [] { return std::unique_ptr<DeviceCopier>(std::make_unique<CudaCopier>()); }, pin, unpin};

const bool kRegistered = (register_device_support(&kCuda), true);

}  // namespace
}  // namespace torch_ckpt::staging
