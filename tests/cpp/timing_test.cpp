#include "engine/timing.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace torch_ckpt::engine {
namespace {

TEST(Timing, SumsTheTimeOfAllThreadsByActivity) {
  Timing timing;
  timing.add(Activity::write, 50);
  timing.add(Activity::write, 10);
  timing.add(Activity::fsync, 7);
  EXPECT_EQ(timing.busy_ns(Activity::write), 60);
  EXPECT_EQ(timing.busy_ns(Activity::fsync), 7);
  EXPECT_EQ(timing.busy_ns(Activity::stage), 0);
}

TEST(Timing, MeasuresTheTimeOfAScope) {
  Timing timing;
  const std::int64_t before = timing.now_ns();
  {
    const ScopedTimer timed(timing, Activity::stage);
    while (timing.now_ns() == before) continue;
  }
  const std::int64_t after = timing.now_ns();
  EXPECT_GT(timing.busy_ns(Activity::stage), 0);
  EXPECT_LE(timing.busy_ns(Activity::stage), after - before);
}

TEST(Timing, StartsWithoutMilestones) {
  const Timing timing;
  EXPECT_EQ(timing.staged_ns, 0);
  EXPECT_EQ(timing.ended_ns, 0);
}

TEST(Timing, CanBeSharedByManyThreads) {
  Timing timing;
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&timing] {
        for (int i = 0; i < 500; ++i) timing.add(Activity::write, 2);
      });
    }
  }
  EXPECT_EQ(timing.busy_ns(Activity::write), 4 * 500 * 2);
}

}  // namespace
}  // namespace torch_ckpt::engine
