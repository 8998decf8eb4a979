#include "engine/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <boost/asio/post.hpp>
#include <latch>
#include <thread>
#include <vector>

namespace torch_ckpt::engine {
namespace {

namespace asio = boost::asio;

TEST(Executor, IsOneForTheProcess) {
  std::vector<asio::thread_pool*> seen(8);
  {
    std::vector<std::jthread> threads;
    for (auto& pool : seen) threads.emplace_back([&pool] { pool = &executor(); });
  }
  for (const auto* pool : seen) EXPECT_EQ(pool, seen.front());
}

TEST(Executor, RunsAsManyTasksAtOnceAsItHasThreads) {
  const auto count = static_cast<std::ptrdiff_t>(executor_threads());
  std::latch all(count);
  std::latch done(count);
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    asio::post(executor(), [&] {
      all.arrive_and_wait();
      done.count_down();
    });
  }
  done.wait();
}

TEST(Executor, JoiningEndsTheWorkItHas) {
  std::atomic<int> done{0};
  for (int i = 0; i < 100; ++i) asio::post(executor(), [&] { ++done; });
  join_executor();
  EXPECT_EQ(done, 100);
}

TEST(Executor, AfterJoiningThereIsANewOne) {
  join_executor();
  std::latch done(1);
  asio::post(executor(), [&] { done.count_down(); });
  done.wait();
}

TEST(Executor, JoiningTwiceOrWithoutWorkIsFine) {
  join_executor();
  join_executor();
  executor();
  join_executor();
}

}  // namespace
}  // namespace torch_ckpt::engine
