#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "os/fault.h"

namespace torch_ckpt::test {

// Blocks threads until it is opened, at the latest by its destructor, so that a failing test does
// not hang. Safe for concurrent use by multiple threads.
class Gate {
 public:
  Gate() = default;
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void open() { state_->open(); }
  /// Waits until `count` threads in total have reached the gate.
  void wait_for_arrivals(std::size_t count = 1) { state_->wait_for_arrivals(count); }
  std::size_t arrivals() const { return state_->arrivals(); }
  /// Returns a function that blocks the calling thread. It may outlive the gate.
  std::function<void()> passage() const {
    return [state = state_] { state->pass(); };
  }

 private:
  class State {
   public:
    void open() {
      const std::lock_guard lock(mutex_);
      open_ = true;
      changed_.notify_all();
    }
    void wait_for_arrivals(std::size_t count) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return arrived_ >= count; });
    }
    std::size_t arrivals() const {
      const std::lock_guard lock(mutex_);
      return arrived_;
    }
    void pass() {
      std::unique_lock lock(mutex_);
      ++arrived_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
    }

   private:
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    bool open_ = false;        // guarded by mutex_
    std::size_t arrived_ = 0;  // guarded by mutex_
  };

  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Blocks every call of one operation of csrc/os, from the `from`-th on (from 1), until it is
// opened. `also` is called for each call of any operation, before it blocks; its result is the
// result of the hook.
class HeldOperation {
 public:
  explicit HeldOperation(std::string operation, std::size_t from = 1, os::FaultHook also = {})
      : hook_([operation = std::move(operation), from, also = std::move(also),
               pass = gate_.passage(), calls = std::make_shared<std::atomic<std::size_t>>(0)](
                  std::string_view called, std::string_view path) {
          const int result = also ? also(called, path) : 0;
          if (called == operation && ++*calls >= from) pass();
          return result;
        }) {}
  // The destructor of the hook waits for the blocked calls.
  ~HeldOperation() { gate_.open(); }
  HeldOperation(const HeldOperation&) = delete;
  HeldOperation& operator=(const HeldOperation&) = delete;

  void open() { gate_.open(); }
  /// Waits until `count` calls in total are blocked.
  void wait_until_held(std::size_t count = 1) { gate_.wait_for_arrivals(count); }
  std::size_t held() const { return gate_.arrivals(); }

 private:
  Gate gate_;
  os::ScopedFaultHook hook_;
};

}  // namespace torch_ckpt::test
