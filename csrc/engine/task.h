#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>

namespace torch_ckpt::engine {

// Work that is posted to a thread pool repeatedly, but never while an earlier post is pending. It
// contains the memory that Asio needs for posting, so posting cannot fail.
class Task {
 public:
  Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  /// Runs run() on a pool thread. Until then, the pending post keeps `owner` alive, which contains
  /// this task.
  template <class Run>
  void post(boost::asio::io_context& pool, std::shared_ptr<const void> owner, Run run) noexcept {
    boost::asio::post(pool, handler(std::move(owner), std::move(run)));
  }

  /// Returns a handler for other Asio operations, such as timers. It keeps `owner` alive, too.
  template <class Run>
  auto handler(std::shared_ptr<const void> owner, Run run) {
    return Handler<Run>{this, std::move(owner), std::move(run)};
  }

 private:
  template <class T>
  struct Allocator {
    using value_type = T;

    explicit Allocator(Task* of) : task(of) {}
    template <class U>
    Allocator(const Allocator<U>& other) : task(other.task) {}

    T* allocate(std::size_t count) {
      static_assert(sizeof(T) <= kBytes);
      return static_cast<T*>(task->allocate(count * sizeof(T), std::align_val_t(alignof(T))));
    }
    void deallocate(T* memory, std::size_t) {
      task->deallocate(memory, std::align_val_t(alignof(T)));
    }
    bool operator==(const Allocator&) const = default;

    Task* task;
  };

  template <class Run>
  struct Handler {
    using allocator_type = Allocator<void*>;
    allocator_type get_allocator() const noexcept { return allocator_type(task); }
    template <class... Results>
    void operator()(const Results&...) {
      run();
    }

    Task* task;
    std::shared_ptr<const void> owner;
    Run run;
  };

  void* allocate(std::size_t bytes, std::align_val_t alignment) {
    if (is_used_ || bytes > sizeof(memory_)) return ::operator new(bytes, alignment);
    is_used_ = true;
    return memory_;
  }
  void deallocate(void* memory, std::align_val_t alignment) {
    if (memory != memory_) return ::operator delete(memory, alignment);
    is_used_ = false;
  }

  static constexpr std::size_t kBytes = 192;

  // Asio frees the memory before it calls the handler, so the handler may post the task again.
  bool is_used_ = false;
  alignas(std::max_align_t) std::byte memory_[kBytes];
};

}  // namespace torch_ckpt::engine
