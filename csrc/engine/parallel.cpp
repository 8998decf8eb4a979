#include "engine/parallel.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/post.hpp>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "engine/first_failure.h"
#include "os/cores.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {
namespace {

// Tasks that a caller waits for. Posted handlers own it, because the last of them may still use it
// when the caller continues.
class TaskGroup : public std::enable_shared_from_this<TaskGroup> {
 public:
  TaskGroup(boost::asio::io_context& pool, std::size_t tasks, std::string_view operation,
            std::function<Result<bool>()> step)
      : pool_(pool), operation_(operation), step_(std::move(step)), running_(tasks) {}

  void post() noexcept {
    try {
      boost::asio::post(pool_, [self = shared_from_this()] { self->run(); });
    } catch (...) {
      end(exception_error(std::current_exception(), operation_));
    }
  }

  Result<> wait() {
    {
      const os::MutexLock lock(mutex_);
      while (running_ > 0) ended_.wait(mutex_);
    }
    if (auto error = failure_.get()) return *error;
    return {};
  }

 private:
  void run() noexcept {
    Result<bool> more = false;
    try {
      if (!failure_.is_set()) more = step_();
    } catch (...) {
      more = exception_error(std::current_exception(), operation_);
    }
    if (more && *more) return post();
    end(more ? Result<>() : Result<>(more.error()));
  }

  void end(Result<> status) noexcept {
    if (!status) failure_.set(std::move(status).error());
    const os::MutexLock lock(mutex_);
    --running_;
    ended_.notify_all();
  }

  boost::asio::io_context& pool_;
  const std::string operation_;
  const std::function<Result<bool>()> step_;
  FirstFailure<> failure_;
  os::Mutex mutex_;
  os::CondVar ended_;
  std::size_t running_ TC_GUARDED_BY(mutex_);
};

}  // namespace

Result<> run_tasks(Context& context, const PoolSpec& spec, std::size_t tasks,
                   std::string_view operation, std::function<Result<bool>()> step) {
  TC_TRY(context.executor.ensure_threads(spec, tasks));
  const auto group =
      std::make_shared<TaskGroup>(context.executor.pool(spec), tasks, operation, std::move(step));
  for (std::size_t i = 0; i < tasks; ++i) group->post();
  return group->wait();
}

Result<> run_parallel(Context& context, std::size_t count, std::string_view operation,
                      const std::function<Result<>(std::size_t)>& task) {
  std::atomic<std::size_t> next{0};
  return run_tasks(context, {}, std::min(count, os::usable_cores()), operation,
                   [&]() -> Result<bool> {
                     const std::size_t n = next++;
                     if (n >= count) return false;
                     TC_TRY(task(n));
                     return true;
                   });
}

}  // namespace torch_ckpt::engine
