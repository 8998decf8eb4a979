#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace torch_ckpt::test {

// A fake CUDA runtime. It defines the functions that csrc/staging/cuda_copy.cpp calls, and the
// linker prefers them to the library's. Copies happen during the call, between host addresses. Like
// the real runtime, it keeps the last error of a thread until the thread reads it. For one thread,
// and one at a time per process.
class FakeCuda {
 public:
  FakeCuda();
  ~FakeCuda();
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  /// The n-th call of a function from now on (from 1) fails.
  void fail(const std::string& function, cudaError_t code, std::size_t nth = 1);
  /// Sets an error, as if an earlier call of the caller had failed.
  void set_last_error(cudaError_t code) { last_error_ = code; }
  cudaError_t last_error() const { return last_error_; }

  std::size_t calls() const { return all_calls_; }
  std::size_t calls(const std::string& function) const;
  /// Present events, and the largest number of events at any time.
  std::size_t events() const { return events_.size(); }
  std::size_t streams() const { return waits_.size(); }
  std::size_t most_events() const { return most_events_; }
  /// The events that the present streams wait for, in order of their creation.
  std::vector<std::vector<void*>> waits() const;
  /// How many events had been recorded when this event was last recorded; 0: never.
  std::size_t recorded(void* event) const;
  std::size_t records() const { return records_; }

  // For the functions of the fake runtime.
  cudaError_t call(const std::string& function);
  void* make_stream();
  void destroy_stream(void* stream) { waits_.erase(stream); }
  void* make_event();
  void destroy_event(void* event) { events_.erase(event); }
  void record(void* event) { recorded_[event] = ++records_; }
  void wait(void* stream, void* event) { waits_[stream].push_back(event); }
  cudaError_t take_last_error() { return std::exchange(last_error_, cudaSuccess); }

 private:
  std::map<std::string, std::pair<std::size_t, cudaError_t>> failures_;  // calls until then
  std::map<std::string, std::size_t> calls_;
  std::size_t all_calls_ = 0;
  cudaError_t last_error_ = cudaSuccess;
  std::size_t made_ = 0;
  std::map<void*, std::vector<void*>> waits_;  // by stream
  std::set<void*> events_;
  std::size_t most_events_ = 0;
  std::map<void*, std::size_t> recorded_;
  std::size_t records_ = 0;
};

}  // namespace torch_ckpt::test
