#include "engine/throttle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "support.h"

namespace torch_ckpt::engine {
namespace {

using namespace std::chrono_literals;
using TimePoint = Throttle::Clock::time_point;

// Any time will do; this is no special value.
constexpr TimePoint kNow{1'000'000s};

TEST(Throttle, WithoutABandwidthHasNoLimit) {
  EXPECT_FALSE(Throttle(0).limits());
  EXPECT_TRUE(Throttle(1).limits());
}

TEST(Throttle, StartsTheFirstWriteAtOnce) {
  Throttle throttle(1000);
  EXPECT_EQ(throttle.reserve(1'000'000, kNow), kNow);
}

TEST(Throttle, StartsTheNextWriteAfterTheDurationOfTheLastOne) {
  Throttle throttle(1000);
  throttle.reserve(500, kNow);
  EXPECT_EQ(throttle.reserve(2000, kNow), kNow + 500ms);
  EXPECT_EQ(throttle.reserve(1, kNow + 100ms), kNow + 2500ms);
}

TEST(Throttle, StartsALateWriteAtOnce) {
  Throttle throttle(1000);
  throttle.reserve(500, kNow);
  EXPECT_EQ(throttle.reserve(500, kNow + 600ms), kNow + 600ms);
}

TEST(Throttle, AccumulatesNoBandwidthWhileIdle) {
  Throttle throttle(1000);
  throttle.reserve(500, kNow);
  throttle.reserve(1000, kNow + 1h);
  EXPECT_EQ(throttle.reserve(1000, kNow + 1h), kNow + 1h + 1s);
}

TEST(Throttle, NeedsNoTimeForNoBytes) {
  Throttle throttle(1000);
  EXPECT_EQ(throttle.reserve(0, kNow), kNow);
  EXPECT_EQ(throttle.reserve(1, kNow), kNow);
}

TEST(Throttle, SupportsLargeWritesAtSmallBandwidths) {
  Throttle throttle(1);
  throttle.reserve(std::uint64_t{64} << 20, kNow);
  EXPECT_EQ(throttle.reserve(1, kNow), kNow + std::chrono::seconds(64 << 20));
}

TEST(Throttle, StaysBelowItsBandwidthForAnyWrites) {
  test::Random random(1);
  constexpr std::uint64_t kBandwidth = 123'456'789;
  Throttle throttle(kBandwidth);
  struct Write {
    TimePoint begin;
    std::uint64_t bytes;
  };
  std::vector<Write> writes;
  TimePoint now = kNow;
  for (int i = 0; i < 200; ++i) {
    now += std::chrono::nanoseconds(random.any_scale(1'000'000'000));
    const std::uint64_t bytes = random.any_scale(std::uint64_t{64} << 20);
    writes.push_back({throttle.reserve(bytes, now), bytes});
    ASSERT_GE(writes.back().begin, now);
  }
  // Between the starts of any two writes there are at most as many bytes as the bandwidth allows,
  // except for rounding each time to whole nanoseconds.
  for (std::size_t first = 0; first < writes.size(); ++first) {
    double bytes = 0;
    for (std::size_t last = first; last < writes.size(); ++last) {
      const std::chrono::duration<double> time = writes[last].begin - writes[first].begin;
      const double rounding = 1e-9 * kBandwidth * static_cast<double>(last - first + 1);
      ASSERT_LE(bytes, time.count() * kBandwidth + rounding) << first << " to " << last;
      bytes += static_cast<double>(writes[last].bytes);
    }
  }
}

TEST(Throttle, ReservesTimesThatDoNotOverlapForManyThreads) {
  Throttle throttle(1000);
  constexpr std::size_t kEach = 250;
  std::vector<std::vector<TimePoint>> begins(4);
  {
    std::vector<std::jthread> threads;
    for (auto& of : begins) {
      threads.emplace_back([&throttle, &of] {
        for (std::size_t i = 0; i < kEach; ++i) of.push_back(throttle.reserve(1, kNow));
      });
    }
  }
  std::vector<TimePoint> all;
  for (const auto& of : begins) all.insert(all.end(), of.begin(), of.end());
  std::sort(all.begin(), all.end());
  for (std::size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(all[i], kNow + std::chrono::milliseconds(i)) << i;
  }
}

}  // namespace
}  // namespace torch_ckpt::engine
