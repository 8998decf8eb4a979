#include "planning/save_coordinator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "support.h"
#include "templates.h"

namespace torch_ckpt::planning {
namespace {

using namespace test;

// One rank: its state, its plan, and the message that it has sent last.
class Rank {
 public:
  explicit Rank(const Rows& rows) { set(rows); }

  void set(const Rows& rows) {
    const RankState state = rows.state();
    template_ = state.state().encode();
    parts_ = state.encode();
  }
  SaveCoordinator::Message message(bool with_parts = false, std::string_view fingerprints = "") {
    const bool is_known = !with_parts && plan_.is_of(template_, parts_);
    sent_ = plan_.message(is_known ? std::nullopt : std::optional<std::string_view>(parts_),
                          fingerprints);
    return {sent_, is_known ? std::string_view() : template_};
  }
  Result<> accept(std::string_view reply) { return plan_.accept(template_, parts_, reply); }
  bool has_sent_parts() const { return sent_.front() == 0; }
  std::size_t items() const { return plan_.items().size() / sizeof(std::uint32_t); }

 private:
  std::string template_;
  std::string parts_;
  std::string sent_;
  RankPlan plan_;
};

Rows replicas(int count, const char* own) {
  Rows rows;
  for (int i = 0; i < count; ++i) rows.add_tensor("t" + std::to_string(i), {100});
  rows.add_object(own);
  return rows;
}

class SaveCoordinatorTest : public testing::Test {
 protected:
  std::vector<SaveCoordinator::Message> messages(bool with_parts = false) {
    std::vector<SaveCoordinator::Message> sent;
    for (Rank& rank : ranks_) sent.push_back(rank.message(with_parts));
    return sent;
  }
  /// Agrees on a plan, in one round. Returns the replies.
  std::vector<std::string> agree(bool with_parts = false) {
    auto replies = coordinator_.assign(messages(with_parts));
    EXPECT_TRUE(ok(replies));
    EXPECT_EQ(replies->size(), ranks_.size());
    for (std::size_t rank = 0; rank < replies->size(); ++rank) {
      EXPECT_TRUE(ok(ranks_[rank].accept((*replies)[rank])));
    }
    return std::move(*replies);
  }
  std::vector<std::size_t> items() const {
    std::vector<std::size_t> counts;
    for (const Rank& rank : ranks_) counts.push_back(rank.items());
    return counts;
  }

  std::vector<Rank> ranks_ = {Rank(replicas(6, "a")), Rank(replicas(6, "b"))};
  SaveCoordinator coordinator_;
};

TEST_F(SaveCoordinatorTest, EachRankGetsItsItems) {
  agree();
  EXPECT_EQ(items(), (std::vector<std::size_t>{4, 4}));
  EXPECT_EQ(coordinator_.number(), 1u);
}

TEST_F(SaveCoordinatorTest, RanksWithUnchangedStatesSendAndGetOnlyTheNumberOfThePlan) {
  const auto first = agree();
  const auto second = agree();
  for (const Rank& rank : ranks_) EXPECT_FALSE(rank.has_sent_parts());
  EXPECT_EQ(items(), (std::vector<std::size_t>{4, 4}));
  EXPECT_EQ(coordinator_.number(), 1u);
  EXPECT_LT(second[0].size(), first[0].size());
  EXPECT_EQ(second[0], second[1]);
}

TEST_F(SaveCoordinatorTest, OneChangedStateMakesANewPlanForAllRanks) {
  agree();
  ranks_[1].set(replicas(8, "b"));
  agree();
  EXPECT_FALSE(ranks_[0].has_sent_parts());
  EXPECT_TRUE(ranks_[1].has_sent_parts());
  EXPECT_EQ(coordinator_.number(), 2u);
  EXPECT_EQ(ranks_[0].items() + ranks_[1].items(), 8u + 2);
}

TEST_F(SaveCoordinatorTest, PlansOfTheSameStatesHaveOneIdentity) {
  agree();
  const std::uint64_t first = coordinator_.plan_hash();
  ranks_[1].set(replicas(8, "b"));
  agree();
  EXPECT_NE(coordinator_.plan_hash(), first);
  ranks_[1].set(replicas(6, "b"));
  agree();
  EXPECT_EQ(coordinator_.number(), 3u);
  EXPECT_EQ(coordinator_.plan_hash(), first);
}

TEST_F(SaveCoordinatorTest, AllRanksSendTheirPartsAgainIfOneRankMissedAReply) {
  agree();
  ranks_[0].set(replicas(7, "a"));
  const auto replies = coordinator_.assign(messages());
  ASSERT_TRUE(ok(replies));
  ASSERT_TRUE(ok(ranks_[0].accept((*replies)[0])));
  const auto again = coordinator_.assign(messages());
  ASSERT_TRUE(ok(again));
  EXPECT_TRUE(again->empty());
  agree(true);
  EXPECT_EQ(ranks_[0].items() + ranks_[1].items(), 7u + 2);
}

TEST_F(SaveCoordinatorTest, ANewCoordinatorAsksForTheParts) {
  agree();
  coordinator_ = SaveCoordinator();
  const auto replies = coordinator_.assign(messages());
  ASSERT_TRUE(ok(replies));
  EXPECT_TRUE(replies->empty());
}

TEST_F(SaveCoordinatorTest, AnotherNumberOfRanksAsksForTheParts) {
  agree();
  ranks_.pop_back();
  const auto replies = coordinator_.assign(messages());
  ASSERT_TRUE(ok(replies));
  EXPECT_TRUE(replies->empty());
}

TEST_F(SaveCoordinatorTest, StatesThatContradictEachOtherAreRefusedAndTheLastPlanStays) {
  agree();
  Rows other;
  other.add_tensor("t0", {101});
  ranks_[1].set(other);
  EXPECT_TRUE(fails(coordinator_.assign(messages()), Errc::unsavable));
  EXPECT_EQ(coordinator_.number(), 1u);
  ranks_[1].set(replicas(6, "b"));
  agree();
  EXPECT_EQ(coordinator_.number(), 1u);
}

TEST_F(SaveCoordinatorTest, ReplicasAreComparedByTheFingerprintsInTheLastMessages) {
  Rows rows;
  rows.add_tensor("t", {3});
  ranks_[0].set(rows);
  ranks_[1].set(rows);
  const std::string_view sums[2] = {"1234", "1235"};
  const auto compared = [&](int second) {
    const std::vector<SaveCoordinator::Message> sent = {ranks_[0].message(false, sums[0]),
                                                        ranks_[1].message(false, sums[second])};
    const auto replies = coordinator_.assign(sent);
    EXPECT_TRUE(ok(replies));
    for (std::size_t rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(ok(ranks_[rank].accept((*replies)[rank])));
    }
    return coordinator_.differing_replicas().size();
  };
  EXPECT_EQ(compared(1), 1u);
  EXPECT_EQ(compared(0), 0u);
  EXPECT_EQ(compared(1), 1u);
}

TEST_F(SaveCoordinatorTest, DamagedBytesAreRejected) {
  const auto sent = messages();
  for (std::size_t size = 0; size < sent[0].first.size(); ++size) {
    const std::vector<SaveCoordinator::Message> damaged = {
        {sent[0].first.substr(0, size), sent[0].second}, sent[1]};
    EXPECT_TRUE(fails(coordinator_.assign(damaged), Errc::frame_damaged)) << size;
  }
  const auto replies = agree();
  for (std::size_t size = 0; size < replies[0].size(); ++size) {
    // A reply without items is one for an unchanged state.
    if (size == 1) continue;
    EXPECT_TRUE(fails(ranks_[0].accept(replies[0].substr(0, size)), Errc::frame_damaged)) << size;
  }
  // Decoding ends without a crash for any bytes.
  std::mt19937_64 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string message(sent[0].first);
    std::string reply = replies[0];
    message[random() % message.size()] = static_cast<char>(random());
    reply[random() % reply.size()] = static_cast<char>(random());
    (void)coordinator_.assign(
        std::vector<SaveCoordinator::Message>{{message, sent[0].second}, sent[1]});
    (void)ranks_[0].accept(reply);
  }
}

}  // namespace
}  // namespace torch_ckpt::planning
