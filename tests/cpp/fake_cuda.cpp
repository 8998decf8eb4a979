#include "fake_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string_view>
#include <utility>

#include "support.h"

namespace torch_ckpt::test {
namespace {

FakeCuda* current = nullptr;

}  // namespace

FakeCuda::FakeCuda(int major) : before_(staging::device_support()) {
  EXPECT_EQ(current, nullptr) << "one at a time";
  current = this;
  EXPECT_TRUE(ok(staging::use_cuda_runtime(lookup(), major)));
}

FakeCuda::~FakeCuda() {
  staging::register_device_support(before_);
  current = nullptr;
}

void FakeCuda::fail(const std::string& function, cuda::Code code, std::size_t nth) {
  failures_[function] = {nth, code};
}

std::size_t FakeCuda::calls(const std::string& function) const {
  const auto found = calls_.find(function);
  return found == calls_.end() ? 0 : found->second;
}

std::vector<std::vector<void*>> FakeCuda::waits() const {
  std::vector<std::vector<void*>> all;
  for (const auto& [stream, events] : waits_) all.push_back(events);
  return all;
}

std::size_t FakeCuda::recorded(void* event) const {
  const auto found = recorded_.find(event);
  return found == recorded_.end() ? 0 : found->second;
}

cuda::Code FakeCuda::call(const std::string& function) {
  ++all_calls_;
  ++calls_[function];
  const auto failure = failures_.find(function);
  if (failure == failures_.end() || --failure->second.first > 0) return cuda::kSuccess;
  last_error_ = failure->second.second;
  failures_.erase(failure);
  return last_error_;
}

// Handles are increasing numbers, so that maps keep the order of creation.
void* FakeCuda::make_stream() {
  void* const stream = reinterpret_cast<void*>(++made_ * 16);
  waits_[stream];
  return stream;
}

void* FakeCuda::make_event() {
  void* const event = reinterpret_cast<void*>(++made_ * 16);
  events_.insert(event);
  most_events_ = std::max(most_events_, events_.size());
  return event;
}

namespace {

cuda::Code called(const char* function) {
  // Called at the end of the process, or of a test that does not use CUDA.
  return current == nullptr ? kNoDevice : current->call(function);
}

const char* cudaGetErrorString(cuda::Code code) {
  return code == kNotSupported ? "operation not supported" : "an error of CUDA's";
}

cuda::Code cudaGetLastError() {
  return current == nullptr ? cuda::kSuccess : current->take_last_error();
}

cuda::Code cudaPeekAtLastError() {
  return current == nullptr ? cuda::kSuccess : current->last_error();
}

int cuDevicePrimaryCtxGetState(int device, unsigned int* flags, int* active) {
  *flags = 0;
  *active = current != nullptr && current->has_context(device) ? 1 : 0;
  return 0;
}

cuda::Code cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long,
                                   int* found) {
  const bool is_known = symbol == std::string_view("cuDevicePrimaryCtxGetState");
  *function = is_known ? reinterpret_cast<void*>(&cuDevicePrimaryCtxGetState) : nullptr;
  *found = is_known ? cuda::kEntryPointFound : cuda::kEntryPointFound + 1;
  return called("cudaGetDriverEntryPoint");
}

cuda::Code cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int,
                                            unsigned long long flags, int* found) {
  return cudaGetDriverEntryPoint(symbol, function, flags, found);
}

cuda::Code cudaGetDevice(int* device) {
  *device = current == nullptr ? 0 : current->device();
  return called("cudaGetDevice");
}

cuda::Code cudaSetDevice(int device) {
  const cuda::Code code = called("cudaSetDevice");
  if (code == cuda::kSuccess) current->set_device(device);
  return code;
}

cuda::Code cudaThreadExchangeStreamCaptureMode(int*) {
  return called("cudaThreadExchangeStreamCaptureMode");
}

cuda::Code cudaStreamCreateWithFlags(cuda::Stream* stream, unsigned int) {
  const cuda::Code code = called("cudaStreamCreateWithFlags");
  if (code == cuda::kSuccess) *stream = static_cast<cuda::Stream>(current->make_stream());
  return code;
}

cuda::Code cudaStreamDestroy(cuda::Stream stream) {
  const cuda::Code code = called("cudaStreamDestroy");
  if (code == cuda::kSuccess) current->destroy_stream(stream);
  return code;
}

cuda::Code cudaStreamSynchronize(cuda::Stream) { return called("cudaStreamSynchronize"); }

cuda::Code cudaStreamWaitEvent(cuda::Stream stream, cuda::Event event, unsigned int) {
  const cuda::Code code = called("cudaStreamWaitEvent");
  if (code == cuda::kSuccess) current->wait(stream, event);
  return code;
}

cuda::Code cudaStreamIsCapturing(cuda::Stream, int* status) {
  *status = cuda::kNotCapturing;
  return called("cudaStreamIsCapturing");
}

cuda::Code cudaEventCreateWithFlags(cuda::Event* event, unsigned int) {
  const cuda::Code code = called("cudaEventCreateWithFlags");
  if (code == cuda::kSuccess) *event = static_cast<cuda::Event>(current->make_event());
  return code;
}

cuda::Code cudaEventDestroy(cuda::Event event) {
  const cuda::Code code = called("cudaEventDestroy");
  if (code == cuda::kSuccess) current->destroy_event(event);
  return code;
}

cuda::Code cudaEventRecord(cuda::Event event, cuda::Stream) {
  const cuda::Code code = called("cudaEventRecord");
  if (code == cuda::kSuccess) current->record(event);
  return code;
}

cuda::Code cudaEventQuery(cuda::Event) { return called("cudaEventQuery"); }

cuda::Code cudaEventSynchronize(cuda::Event) { return called("cudaEventSynchronize"); }

cuda::Code cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, cuda::Stream) {
  const cuda::Code code = called("cudaMemcpyAsync");
  if (code == cuda::kSuccess) std::memcpy(to, from, bytes);
  return code;
}

cuda::Code cudaHostRegister(void*, std::size_t, unsigned int) { return called("cudaHostRegister"); }

cuda::Code cudaHostUnregister(void*) { return called("cudaHostUnregister"); }

cuda::Code cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes,
                                std::size_t count, cuda::CopyAttributes*, std::size_t*, std::size_t,
                                cuda::Stream) {
  const cuda::Code code = called("cudaMemcpyBatchAsync");
  for (std::size_t i = 0; code == cuda::kSuccess && i < count; ++i) {
    std::memcpy(to[i], from[i], bytes[i]);
  }
  return code;
}

// The functions by name.
const std::map<std::string, void*, std::less<>> kFunctions = {
    {"cudaGetErrorString", reinterpret_cast<void*>(&cudaGetErrorString)},
    {"cudaGetLastError", reinterpret_cast<void*>(&cudaGetLastError)},
    {"cudaPeekAtLastError", reinterpret_cast<void*>(&cudaPeekAtLastError)},
    {"cudaGetDriverEntryPoint", reinterpret_cast<void*>(&cudaGetDriverEntryPoint)},
    {"cudaGetDriverEntryPointByVersion",
     reinterpret_cast<void*>(&cudaGetDriverEntryPointByVersion)},
    {"cudaGetDevice", reinterpret_cast<void*>(&cudaGetDevice)},
    {"cudaSetDevice", reinterpret_cast<void*>(&cudaSetDevice)},
    {"cudaThreadExchangeStreamCaptureMode",
     reinterpret_cast<void*>(&cudaThreadExchangeStreamCaptureMode)},
    {"cudaStreamCreateWithFlags", reinterpret_cast<void*>(&cudaStreamCreateWithFlags)},
    {"cudaStreamDestroy", reinterpret_cast<void*>(&cudaStreamDestroy)},
    {"cudaStreamSynchronize", reinterpret_cast<void*>(&cudaStreamSynchronize)},
    {"cudaStreamWaitEvent", reinterpret_cast<void*>(&cudaStreamWaitEvent)},
    {"cudaStreamIsCapturing", reinterpret_cast<void*>(&cudaStreamIsCapturing)},
    {"cudaEventCreateWithFlags", reinterpret_cast<void*>(&cudaEventCreateWithFlags)},
    {"cudaEventDestroy", reinterpret_cast<void*>(&cudaEventDestroy)},
    {"cudaEventRecord", reinterpret_cast<void*>(&cudaEventRecord)},
    {"cudaEventQuery", reinterpret_cast<void*>(&cudaEventQuery)},
    {"cudaEventSynchronize", reinterpret_cast<void*>(&cudaEventSynchronize)},
    {"cudaMemcpyAsync", reinterpret_cast<void*>(&cudaMemcpyAsync)},
    {"cudaHostRegister", reinterpret_cast<void*>(&cudaHostRegister)},
    {"cudaHostUnregister", reinterpret_cast<void*>(&cudaHostUnregister)},
    {"cudaMemcpyBatchAsync", reinterpret_cast<void*>(&cudaMemcpyBatchAsync)},
};

}  // namespace

os::Lookup FakeCuda::lookup() { return lookup_without({}); }

os::Lookup FakeCuda::lookup_without(std::set<std::string> functions) {
  return [missing = std::move(functions)](const char* name) -> void* {
    if (missing.contains(name)) return nullptr;
    const auto found = kFunctions.find(name);
    return found == kFunctions.end() ? nullptr : found->second;
  };
}

}  // namespace torch_ckpt::test
