#include "engine/timing.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace torch_ckpt::engine {
namespace {

TEST(Timing, SumsTheTimeOfAllThreadsByActivity) {
  Timing timing(false);
  timing.add(Activity::write, 0, 100, 150);
  timing.add(Activity::write, 1, 120, 130);
  timing.add(Activity::fsync, 0, 0, 7);
  EXPECT_EQ(timing.busy_ns(Activity::write), 60);
  EXPECT_EQ(timing.busy_ns(Activity::fsync), 7);
  EXPECT_EQ(timing.busy_ns(Activity::stage), 0);
}

TEST(Timing, RecordsEventsOnlyForATrace) {
  Timing plain(false);
  Timing traced(true);
  for (Timing* timing : {&plain, &traced}) timing->add(Activity::checksum, 3, 10, 20);
  EXPECT_TRUE(plain.events().empty());
  const auto events = traced.events();
  ASSERT_EQ(events.size(), 1);
  EXPECT_EQ(events[0].activity, Activity::checksum);
  EXPECT_EQ(events[0].file, 3);
  EXPECT_EQ(events[0].begin_ns, 10);
  EXPECT_EQ(events[0].end_ns, 20);
}

TEST(Timing, MeasuresTheTimeOfAScope) {
  Timing timing(true);
  const std::int64_t before = timing.now_ns();
  { const ScopedTimer timed(timing, Activity::stage, 5); }
  const std::int64_t after = timing.now_ns();
  const auto events = timing.events();
  ASSERT_EQ(events.size(), 1);
  EXPECT_EQ(events[0].activity, Activity::stage);
  EXPECT_EQ(events[0].file, 5);
  EXPECT_GE(events[0].begin_ns, before);
  EXPECT_LE(events[0].begin_ns, events[0].end_ns);
  EXPECT_LE(events[0].end_ns, after);
  EXPECT_EQ(timing.busy_ns(Activity::stage), events[0].end_ns - events[0].begin_ns);
}

TEST(Timing, StartsWithoutMilestones) {
  const Timing timing(false);
  EXPECT_EQ(timing.staged_ns, 0);
  EXPECT_EQ(timing.ended_ns, 0);
}

TEST(Timing, CanBeSharedByManyThreads) {
  Timing timing(true);
  {
    std::vector<std::jthread> threads;
    for (std::size_t file = 0; file < 4; ++file) {
      threads.emplace_back([&timing, file] {
        for (int i = 0; i < 500; ++i) timing.add(Activity::write, file, i, i + 2);
      });
    }
  }
  EXPECT_EQ(timing.busy_ns(Activity::write), 4 * 500 * 2);
  EXPECT_EQ(timing.events().size(), 4 * 500);
}

}  // namespace
}  // namespace torch_ckpt::engine
