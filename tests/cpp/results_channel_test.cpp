#include "engine/results_channel.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "engine/executor.h"

namespace torch_ckpt::engine {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::minutes kLongest{2};

TEST(ResultsChannel, OfNoPartsIsCompleteAtOnce) {
  ResultsChannel channel(0);
  EXPECT_TRUE(channel.wait_for(milliseconds(0)));
}

TEST(ResultsChannel, IsCompleteWithTheLastResult) {
  ResultsChannel channel(3);
  for (int sent = 0; sent < 3; ++sent) {
    EXPECT_FALSE(channel.wait_for(milliseconds(0)));
    channel.send({});
  }
  EXPECT_TRUE(channel.wait_for(kLongest));
  EXPECT_TRUE(channel.wait_for(milliseconds(0)));
}

TEST(ResultsChannel, CountsFailuresLikeSuccesses) {
  ResultsChannel channel(2);
  channel.send(format_error(Errc::internal, "failed"));
  channel.send({});
  EXPECT_TRUE(channel.wait_for(kLongest));
}

TEST(ResultsChannel, TakesResultsFromManyThreads) {
  constexpr std::size_t kThreads = 8;
  constexpr std::size_t kResults = 100;
  ResultsChannel channel(kThreads * kResults);
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&channel] {
      for (std::size_t sent = 0; sent < kResults; ++sent) channel.send({});
    });
  }
  EXPECT_TRUE(channel.wait_for(kLongest));
}

TEST(ResultsChannel, GivesItsResultsWithoutTheExecutorsThreads) {
  ResultsChannel channel(2);
  channel.send({});
  join_executor();
  channel.send({});
  EXPECT_TRUE(channel.wait_for(kLongest));
}

}  // namespace
}  // namespace torch_ckpt::engine
