#include "engine/executor.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/post.hpp>
#include <functional>
#include <latch>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "support.h"

namespace torch_ckpt::engine {
namespace {

namespace asio = boost::asio;

using test::ok;

// The priority of the calling thread.
int nice_now() { return ::getpriority(PRIO_PROCESS, 0); }
bool idle_io_now() { return ::syscall(SYS_ioprio_get, 1, 0) >> 13 == 3; }

/// Runs `body` once in each of the pool's threads, in all of them at the same time.
void in_each_thread(const PoolSpec& threads, std::size_t count, const std::function<void()>& body) {
  std::latch all(static_cast<std::ptrdiff_t>(count));
  std::latch done(static_cast<std::ptrdiff_t>(count));
  for (std::size_t i = 0; i < count; ++i) {
    asio::post(context().executor.pool(threads), [&] {
      all.arrive_and_wait();
      body();
      done.count_down();
    });
  }
  done.wait();
}

TEST(Executor, IsTheSameForTheWholeProcess) {
  std::vector<asio::io_context*> seen(8);
  {
    std::vector<std::jthread> threads;
    for (auto& pool : seen) threads.emplace_back([&pool] { pool = &context().executor.pool(); });
  }
  for (const auto* pool : seen) EXPECT_EQ(pool, seen.front());
}

TEST(Executor, RunsAsManyTasksAtOnceAsItHasThreads) {
  ASSERT_TRUE(ok(context().executor.ensure_threads({}, 11)));
  const auto count = static_cast<std::ptrdiff_t>(context().executor.threads());
  EXPECT_GE(count, 11);
  std::latch all(count);
  std::latch done(count);
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    asio::post(context().executor.pool(), [&] {
      all.arrive_and_wait();
      done.count_down();
    });
  }
  done.wait();
}

TEST(Executor, CompletesQueuedWorkWhenJoined) {
  std::atomic<int> done{0};
  for (int i = 0; i < 100; ++i) asio::post(context().executor.pool(), [&] { ++done; });
  context().executor.join();
  EXPECT_EQ(done, 100);
}

TEST(Executor, CreatesANewPoolAfterItWasJoined) {
  context().executor.join();
  std::latch done(1);
  asio::post(context().executor.pool(), [&] { done.count_down(); });
  done.wait();
}

TEST(Executor, CanBeJoinedTwiceOrWithoutWork) {
  context().executor.join();
  context().executor.join();
  context().executor.pool();
  context().executor.join();
}

TEST(Executor, HasOnePoolForEqualSpecs) {
  const PoolSpec quiet{{19, true}, 2};
  std::vector<asio::io_context*> seen(8);
  {
    std::vector<std::jthread> threads;
    for (auto& pool : seen) {
      threads.emplace_back([&pool, quiet] { pool = &context().executor.pool(quiet); });
    }
  }
  for (const auto* pool : seen) EXPECT_EQ(pool, seen.front());
}

TEST(Executor, HasAPoolForEachSpec) {
  const std::vector<PoolSpec> settings{
      {}, {{0, false}, 2}, {{5, false}, 2}, {{5, true}, 2}, {{6, false}, 2}, {{5, false}, 3}};
  std::set<asio::io_context*> pools;
  for (const PoolSpec& threads : settings) pools.insert(&context().executor.pool(threads));
  EXPECT_EQ(pools.size(), settings.size());
}

TEST(Executor, HasTheRequestedNumberOfThreads) {
  const PoolSpec three{{0, false}, 3};
  std::mutex mutex;
  std::set<std::thread::id> seen;
  const auto remember = [&] {
    const std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  };
  in_each_thread(three, 3, remember);
  EXPECT_EQ(seen.size(), 3);
  // The pool does not grow with the number of tasks.
  std::latch done(100);
  for (int i = 0; i < 100; ++i) {
    asio::post(context().executor.pool(three), [&] {
      remember();
      done.count_down();
    });
  }
  done.wait();
  EXPECT_EQ(seen.size(), 3);
}

TEST(Executor, GrowsByNeedAndNotWithTheNumberOfCores) {
  context().executor.join();
  context().executor.pool();
  EXPECT_EQ(context().executor.threads(), kMinThreads);
  ASSERT_TRUE(ok(context().executor.ensure_threads({}, 7)));
  EXPECT_EQ(context().executor.threads(), 7);
  ASSERT_TRUE(ok(context().executor.ensure_threads({}, 5)));
  EXPECT_EQ(context().executor.threads(), 7);
  const PoolSpec three{{19, true}, 3};
  ASSERT_TRUE(ok(context().executor.ensure_threads(three, 9)));
  EXPECT_EQ(context().executor.threads(three), 3);
}

TEST(Executor, AddsAThreadForEachLongTaskWhateverItsSize) {
  context().executor.join();
  ASSERT_TRUE(ok(context().executor.ensure_threads({}, 7)));
  std::latch released(1);
  std::latch done(3);
  const LongTask task = [&](const std::shared_ptr<const void>&) {
    released.wait();
    done.count_down();
  };
  ASSERT_TRUE(ok(context().executor.post_long_tasks(3, "test", task, [](const Error&) {})));
  EXPECT_EQ(context().executor.threads(), 10);
  // While the long tasks run, other work still has all seven threads.
  in_each_thread({}, 7, [] {});
  released.count_down();
  done.wait();
}

TEST(Executor, LowersThePriorityOfEachThreadOfALowPriorityPool) {
  const int loud = nice_now();
  std::atomic<int> quiet{0};
  in_each_thread({{11, true}, 5}, 5,
                 [&] { quiet += nice_now() == std::max(loud, 11) && idle_io_now() ? 1 : 0; });
  EXPECT_EQ(quiet, 5);
}

TEST(Executor, LeavesThePriorityOfTheDefaultPoolUnchanged) {
  const int loud = nice_now();
  context().executor.pool({{19, true}, 2});
  ASSERT_TRUE(ok(context().executor.ensure_threads({}, 0)));
  const std::size_t count = context().executor.threads();
  std::atomic<std::size_t> alike{0};
  in_each_thread({}, count, [&] { alike += nice_now() == loud && !idle_io_now() ? 1 : 0; });
  EXPECT_EQ(alike, count);
}

TEST(Executor, LowersThePriorityOfARecreatedPoolAgain) {
  const PoolSpec threads{{19, false}, 2};
  context().executor.pool(threads);
  context().executor.join();
  std::atomic<int> quiet{0};
  in_each_thread(threads, 2, [&] { quiet += nice_now() == 19 ? 1 : 0; });
  EXPECT_EQ(quiet, 2);
}

TEST(Executor, CompletesWorkThatOnePoolPostsToAnotherWhenJoined) {
  const PoolSpec quiet{{19, true}, 2};
  std::atomic<int> done{0};
  for (int i = 0; i < 50; ++i) {
    asio::post(context().executor.pool(quiet),
               [&] { asio::post(context().executor.pool(), [&] { ++done; }); });
  }
  context().executor.join();
  // Completes work in a default pool that was created after the first join had started.
  context().executor.join();
  EXPECT_EQ(done, 50);
}

}  // namespace
}  // namespace torch_ckpt::engine
