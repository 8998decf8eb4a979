#include "engine/results_channel.h"

#include <gtest/gtest.h>

#include <boost/asio/post.hpp>
#include <chrono>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "engine/context.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::minutes kLongest{2};

TEST(ResultsChannel, WithoutPartsIsCompleteAtOnce) {
  ResultsChannel<> channel(0);
  EXPECT_TRUE(channel.wait_for(milliseconds(0)));
}

TEST(ResultsChannel, IsCompleteWithTheLastResult) {
  ResultsChannel<> channel(3);
  for (int sent = 0; sent < 3; ++sent) {
    EXPECT_FALSE(channel.wait_for(milliseconds(0)));
    channel.send({});
  }
  EXPECT_TRUE(channel.wait_for(kLongest));
  EXPECT_TRUE(channel.wait_for(milliseconds(0)));
}

TEST(ResultsChannel, DeliversResultsAndErrorsInOrder) {
  ResultsChannel<std::string> channel(3);
  channel.send(std::string("first"));
  channel.send(format_error(Errc::internal, "failed"));
  channel.send(std::string("last"));
  ASSERT_TRUE(channel.wait_for(kLongest));
  ASSERT_EQ(channel.messages().size(), 3);
  EXPECT_EQ(channel.messages()[0].value(), "first");
  EXPECT_EQ(channel.messages()[1].error().detail, "failed");
  EXPECT_EQ(channel.messages()[2].value(), "last");
}

TEST(ResultsChannel, ReceivesEachResultOfManyThreadsOnce) {
  constexpr std::size_t kThreads = 8;
  constexpr std::size_t kResults = 100;
  ResultsChannel<std::size_t> channel(kThreads * kResults);
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&channel, i] {
        for (std::size_t n = 0; n < kResults; ++n) channel.send(i * kResults + n);
      });
    }
    EXPECT_TRUE(channel.wait_for(kLongest));
  }
  std::vector<int> seen(kThreads * kResults);
  for (const auto& message : channel.messages()) ++seen.at(message.value());
  EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
}

TEST(ResultsChannel, NeedsNoThreadOfTheExecutor) {
  ResultsChannel<> channel(2);
  channel.send({});
  context().executor.join();
  channel.send({});
  EXPECT_TRUE(channel.wait_for(kLongest));
}

TEST(ResultsChannel, IsCompleteWhileAllThreadsOfTheExecutorAreBusy) {
  ASSERT_TRUE(test::ok(context().executor.ensure_threads({}, 0)));
  const std::size_t threads = context().executor.threads();
  std::latch busy(static_cast<std::ptrdiff_t>(threads));
  std::latch released(1);
  for (std::size_t i = 0; i < threads; ++i) {
    boost::asio::post(context().executor.pool(), [&] {
      busy.count_down();
      released.wait();
    });
  }
  busy.wait();
  ResultsChannel<> channel(1);
  EXPECT_FALSE(channel.wait_for(milliseconds(0)));
  channel.send({});
  EXPECT_TRUE(channel.wait_for(kLongest));
  released.count_down();
  context().executor.join();
}

}  // namespace
}  // namespace torch_ckpt::engine
