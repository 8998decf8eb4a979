#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "staging/cuda_runtime.h"
#include "staging/device_copy.h"

namespace torch_ckpt::test {

namespace cuda = staging::cuda;

// Errors of CUDA.
constexpr cuda::Code kInvalidValue = 1;
constexpr cuda::Code kOutOfMemory = 2;
constexpr cuda::Code kInvalidConfiguration = 9;
constexpr cuda::Code kNoDevice = 100;
constexpr cuda::Code kLaunchFailure = 719;
constexpr cuda::Code kNotSupported = 801;

// A fake CUDA runtime with the functions that csrc/staging/cuda_copy.cpp calls. Copies happen
// during the call, between host addresses. Like the real runtime, it keeps the last error of a
// thread until the thread reads it. For one thread, and one at a time per process.
class FakeCuda {
 public:
  explicit FakeCuda(int major = cuda::kMajorWithBatches);
  ~FakeCuda();
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  static os::Lookup lookup();
  /// Returns a lookup that lacks these functions.
  static os::Lookup lookup_without(std::set<std::string> functions);

  /// The n-th call of a function from now on (from 1) fails.
  void fail(const std::string& function, cuda::Code code, std::size_t nth = 1);
  /// Sets an error, as if an earlier call of the caller had failed.
  void set_last_error(cuda::Code code) { last_error_ = code; }
  cuda::Code last_error() const { return last_error_; }
  /// The calling thread's device, and the devices that have a context. Selecting a device creates a
  /// context on it.
  int device() const { return device_; }
  void set_device(int device) {
    device_ = device;
    contexts_.insert(device);
  }
  bool has_context(int device) const { return contexts_.contains(device); }

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
  cuda::Code call(const std::string& function);
  void* make_stream();
  void destroy_stream(void* stream) { waits_.erase(stream); }
  void* make_event();
  void destroy_event(void* event) { events_.erase(event); }
  void record(void* event) { recorded_[event] = ++records_; }
  void wait(void* stream, void* event) { waits_[stream].push_back(event); }
  cuda::Code take_last_error() { return std::exchange(last_error_, cuda::kSuccess); }

 private:
  const staging::DeviceSupport* const before_;
  std::map<std::string, std::pair<std::size_t, cuda::Code>> failures_;  // calls until then
  std::map<std::string, std::size_t> calls_;
  std::size_t all_calls_ = 0;
  cuda::Code last_error_ = cuda::kSuccess;
  int device_ = 0;
  std::set<int> contexts_;
  std::size_t made_ = 0;
  std::map<void*, std::vector<void*>> waits_;  // by stream
  std::set<void*> events_;
  std::size_t most_events_ = 0;
  std::map<void*, std::size_t> recorded_;
  std::size_t records_ = 0;
};

}  // namespace torch_ckpt::test
