#include "fake_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace torch_ckpt::test {
namespace {

FakeCuda* current = nullptr;

}  // namespace

FakeCuda::FakeCuda() {
  EXPECT_EQ(current, nullptr) << "one at a time";
  current = this;
}

FakeCuda::~FakeCuda() { current = nullptr; }

void FakeCuda::fail(const std::string& function, cudaError_t code, std::size_t nth) {
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

cudaError_t FakeCuda::call(const std::string& function) {
  ++all_calls_;
  ++calls_[function];
  const auto failure = failures_.find(function);
  if (failure == failures_.end() || --failure->second.first > 0) return cudaSuccess;
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

cudaError_t called(const char* function) {
  // Called at the end of the process, or of a test that does not use CUDA.
  return current == nullptr ? cudaErrorNoDevice : current->call(function);
}

}  // namespace
}  // namespace torch_ckpt::test

using torch_ckpt::test::called;
using torch_ckpt::test::current;

extern "C" {

const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorNotSupported ? "operation not supported" : "an error of CUDA's";
}

cudaError_t cudaGetLastError() {
  return current == nullptr ? cudaSuccess : current->take_last_error();
}

cudaError_t cudaPeekAtLastError() {
  return current == nullptr ? cudaSuccess : current->last_error();
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  *found = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return called("cudaGetDevice");
}

cudaError_t cudaSetDevice(int) { return called("cudaSetDevice"); }

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return called("cudaThreadExchangeStreamCaptureMode");
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  const cudaError_t code = called("cudaStreamCreateWithFlags");
  if (code == cudaSuccess) *stream = static_cast<cudaStream_t>(current->make_stream());
  return code;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t code = called("cudaStreamDestroy");
  if (code == cudaSuccess) current->destroy_stream(stream);
  return code;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return called("cudaStreamSynchronize"); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  const cudaError_t code = called("cudaStreamWaitEvent");
  if (code == cudaSuccess) current->wait(stream, event);
  return code;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return called("cudaStreamIsCapturing");
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  const cudaError_t code = called("cudaEventCreateWithFlags");
  if (code == cudaSuccess) *event = static_cast<cudaEvent_t>(current->make_event());
  return code;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t code = called("cudaEventDestroy");
  if (code == cudaSuccess) current->destroy_event(event);
  return code;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  const cudaError_t code = called("cudaEventRecord");
  if (code == cudaSuccess) current->record(event);
  return code;
}

cudaError_t cudaEventQuery(cudaEvent_t) { return called("cudaEventQuery"); }

cudaError_t cudaEventSynchronize(cudaEvent_t) { return called("cudaEventSynchronize"); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  const cudaError_t code = called("cudaMemcpyAsync");
  if (code == cudaSuccess) std::memcpy(to, from, bytes);
  return code;
}

cudaError_t cudaHostRegister(void*, std::size_t, unsigned int) {
  return called("cudaHostRegister");
}

cudaError_t cudaHostUnregister(void*) { return called("cudaHostUnregister"); }

#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes,
                                 std::size_t count, cudaMemcpyAttributes*, std::size_t*,
                                 std::size_t, cudaStream_t) {
  const cudaError_t code = called("cudaMemcpyBatchAsync");
  for (std::size_t i = 0; code == cudaSuccess && i < count; ++i) {
    std::memcpy(to[i], from[i], bytes[i]);
  }
  return code;
}
#endif

}  // extern "C"
