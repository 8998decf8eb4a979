#include "engine/parallel.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/post.hpp>
#include <latch>
#include <thread>

#include "engine/first_failure.h"

namespace torch_ckpt::engine {

Result<> run_parallel(Context& context, std::size_t count, std::string_view operation,
                      const std::function<Result<>(std::size_t)>& task) {
  const std::size_t threads =
      std::min<std::size_t>(count, std::max(1U, std::thread::hardware_concurrency()));
  if (auto ensured = context.executor.ensure_threads({}, 0); !ensured) return ensured;
  std::atomic<std::size_t> next{0};
  FirstFailure<> failure;
  std::latch done(static_cast<std::ptrdiff_t>(threads));
  const auto run = [&] {
    try {
      for (std::size_t n = next++; n < count && !failure.is_set(); n = next++) {
        if (auto ran = task(n); !ran) failure.set(ran.error());
      }
    } catch (...) {
      failure.set(exception_error(std::current_exception(), operation));
    }
  };
  for (std::size_t i = 0; i < threads; ++i) {
    try {
      boost::asio::post(context.executor.pool(), [&] {
        run();
        done.count_down();
      });
    } catch (...) {
      // Tasks posted earlier use local variables, so wait for them.
      failure.set(exception_error(std::current_exception(), operation));
      done.count_down();
    }
  }
  done.wait();
  if (auto error = failure.get()) return *error;
  return {};
}

}  // namespace torch_ckpt::engine
