#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "staging/device_copy.h"

namespace torch_ckpt::test {

// A fake device in host memory, registered for the object's lifetime. Its addresses cannot be
// dereferenced. Copies from it arrive late and in reverse order, in a thread of the device. Copies
// to it arrive as late as possible: a wait copies the bytes that the host memory holds by then. The
// device detects misuse: a copier in two threads at once, a range outside its tensor, memory that
// is unpinned twice or was never pinned. Safe for concurrent use by multiple threads; one at a time
// per process.
class FakeDevice {
 public:
  /// Called before each copy, in the thread that submits it; may block, fail or throw.
  using CopyHook = std::function<Result<>(const staging::Source& source, std::uint64_t offset)>;
  using WriteHook = std::function<Result<>(const staging::HostRun& run)>;

  FakeDevice();
  ~FakeDevice();
  FakeDevice(const FakeDevice&) = delete;
  FakeDevice& operator=(const FakeDevice&) = delete;

  /// Adds a tensor on the device.
  staging::Source upload(std::string payload);

  /// Allocates memory on the device for copies from the host, full of question marks.
  std::byte* allocate(std::size_t bytes, int device = 0);
  /// Allocates memory at the address at which the last allocation ends.
  std::byte* allocate_adjacent(std::size_t bytes);
  /// The present contents of such memory.
  std::string contents(const std::byte* allocated) const;

  void on_copy(CopyHook hook);
  void on_write(WriteHook hook);
  /// Called in the device's thread before the copies of a submission; may block, which delays this
  /// submission.
  void on_arrival(std::function<void()> hook);
  /// Called after memory has been unpinned.
  void on_unpin(std::function<void()> hook);
  /// Each copier that is created from now on issues this warning.
  void warn(std::string text);
  /// Makes pinning fail: copies then use memory that is not page-locked.
  void fail_pins(Error error);
  /// Makes the wait for any submission fail, after it has arrived.
  void fail_waits(Error error);
  /// Waits until `count` submissions have arrived.
  void wait_for_arrivals(std::size_t count) const;
  std::size_t copiers() const;
  /// Events that the last copier waits for before its first copy.
  std::vector<staging::ReadyEvent> ready() const;
  std::size_t submissions() const;
  /// (device, stream) of each call of make_stream_wait.
  std::vector<std::pair<int, void*>> waiting_streams() const;
  std::size_t pins() const;
  std::size_t pinned_now() const;

 private:
  class Copier;
  std::string payload_at(std::uintptr_t address, std::uint64_t offset, std::size_t bytes) const;
  void check(const staging::HostRun& run) const;
  void write(std::byte* address, std::string_view bytes);
  std::function<void()> arrive_hook() const;
  static Result<> pin(std::span<std::byte> memory, int device);
  static void unpin(std::span<std::byte> memory, int device);

  struct Tensor {
    std::uintptr_t address;
    std::string payload;
  };

  struct Memory {
    std::uintptr_t address;
    int device;
    std::string bytes;

    bool holds(std::uintptr_t at, std::size_t count) const;
  };
  struct Pinned {
    std::span<const std::byte> memory;
    int device;
  };

  const staging::DeviceSupport* before_;
  std::atomic<std::size_t> arrivals_{0};
  mutable std::mutex mutex_;
  std::vector<Tensor> tensors_;                         // guarded by mutex_
  std::vector<Memory> memories_;                        // guarded by mutex_
  CopyHook copy_hook_;                                  // guarded by mutex_
  WriteHook write_hook_;                                // guarded by mutex_
  std::function<void()> unpin_hook_;                    // guarded by mutex_
  std::string warning_;                                 // guarded by mutex_
  Result<> pin_result_;                                 // guarded by mutex_
  std::function<void()> arrive_hook_;                   // guarded by mutex_
  Result<> wait_result_;                                // guarded by mutex_
  std::vector<staging::ReadyEvent> ready_;              // guarded by mutex_
  std::size_t copiers_ = 0;                             // guarded by mutex_
  std::size_t submissions_ = 0;                         // guarded by mutex_
  std::vector<std::pair<int, void*>> waiting_streams_;  // guarded by mutex_
  std::size_t pins_ = 0;                                // guarded by mutex_
  std::vector<Pinned> pinned_;                          // guarded by mutex_
};

// Removes device support for the object's lifetime, regardless of the build.
class NoDevice {
 public:
  NoDevice() : before_(staging::device_support()) { staging::register_device_support(nullptr); }
  ~NoDevice() { staging::register_device_support(before_); }
  NoDevice(const NoDevice&) = delete;
  NoDevice& operator=(const NoDevice&) = delete;

 private:
  const staging::DeviceSupport* before_;
};

}  // namespace torch_ckpt::test
