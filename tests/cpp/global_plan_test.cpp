#include "planning/global_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "support.h"
#include "templates.h"

namespace torch_ckpt::planning {
namespace {

using test::add;
using test::add_object;
using test::add_tensor;
using test::fails;
using test::Kind;
using test::ok;
using test::row_of;
using test::Sizes;

/// What each rank writes, by name.
std::vector<std::vector<std::string>> written(const GlobalPlan& plan) {
  std::vector<std::vector<std::string>> names(plan.ranks());
  for (std::size_t rank = 0; rank < plan.ranks(); ++rank) {
    for (const std::uint32_t row : plan.owned(rank)) {
      names[rank].emplace_back(plan.of_rank(rank).name(row));
    }
  }
  return names;
}

TEST(StateTemplate, IsTheSameBehindItsBytes) {
  StateTemplate made;
  add_tensor(made, "weight", {300, 1 << 20});
  add_tensor(made, "scalar", {}, "int64");
  add_object(made, "step");
  StateTemplate::Row row = row_of(made, Kind::shard, {8, 4}, {2, 0}, {2, 4});
  row.requires_grad = true;
  const std::vector<StateTemplate::PathPart> path = {{1, false}, {2, true}, {0, false}};
  made.add("a.10.", path, row);
  row.is_here = false;
  add(made, "elsewhere", row);
  const auto again = StateTemplate::decode(made.encode());
  ASSERT_TRUE(ok(again));
  ASSERT_EQ(again->size(), made.size());
  for (std::size_t i = 0; i < made.size(); ++i) {
    EXPECT_EQ(again->name(i), made.name(i));
    EXPECT_EQ(again->row(i), made.row(i));
    EXPECT_TRUE(std::ranges::equal(again->path(i), made.path(i)));
  }
  EXPECT_TRUE(std::ranges::equal(again->extents(again->row(0).size), Sizes{300, 1 << 20}));
  EXPECT_EQ(again->dtype(again->row(1)), "int64");
  EXPECT_EQ(again->encode(), made.encode());
}

TEST(StateTemplate, OfDamagedBytesIsRefused) {
  StateTemplate made;
  add_tensor(made, "weight", {3, 4});
  add_object(made, "step");
  const std::string bytes = made.encode();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_TRUE(fails(StateTemplate::decode(bytes.substr(0, size)), Errc::frame_damaged)) << size;
  }
  EXPECT_TRUE(fails(StateTemplate::decode(bytes + "."), Errc::frame_damaged));
  // Whatever the bytes say, it comes to an end.
  std::mt19937_64 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string damaged = bytes;
    damaged[random() % damaged.size()] = static_cast<char>(random());
    (void)StateTemplate::decode(damaged);
  }
}

TEST(GlobalPlan, WhatSeveralRanksHaveIsWrittenOnce) {
  std::vector<StateTemplate> templates(4);
  for (int rank = 0; rank < 4; ++rank) {
    for (int i = 0; i < 8; ++i) add_tensor(templates[rank], "t" + std::to_string(i), {100});
    add_object(templates[rank], "step");
    add_tensor(templates[rank], "of rank " + std::to_string(rank), {10});
  }
  const auto plan = GlobalPlan::of(std::move(templates));
  ASSERT_TRUE(ok(plan));
  std::map<std::string, int> times;
  for (const auto& of_rank : written(*plan)) {
    int tensors = 0;
    for (const std::string& name : of_rank) {
      ++times[name];
      tensors += name.starts_with("t") ? 1 : 0;
    }
    EXPECT_EQ(tensors, 2);
  }
  EXPECT_EQ(times.size(), 13u);
  for (const auto& [name, count] : times) EXPECT_EQ(count, 1) << name;
}

TEST(GlobalPlan, ReplicasGoToTheRankWithTheFewestBytes) {
  std::vector<StateTemplate> templates(2);
  add_tensor(templates[0], "alone", {1000});
  for (StateTemplate& made : templates) {
    add_tensor(made, "a", {400});
    add_tensor(made, "b", {500});
    add_tensor(made, "c", {200});
  }
  const auto plan = GlobalPlan::of(std::move(templates));
  ASSERT_TRUE(ok(plan));
  EXPECT_EQ(written(*plan), (std::vector<std::vector<std::string>>{{"alone"}, {"a", "b", "c"}}));
}

// Of ranks in a grid: rows of the grid hold replicas, columns shards of random widths.
TEST(GlobalPlan, EachElementOfAShardedTensorIsWrittenOnce) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    std::mt19937_64 random(seed);
    const std::size_t replicas = 1 + random() % 3;
    const std::size_t shards = 1 + random() % 5;
    const auto rows = static_cast<std::int64_t>(random() % 20);
    const auto each =
        (rows + static_cast<std::int64_t>(shards) - 1) / static_cast<std::int64_t>(shards);
    std::vector<StateTemplate> templates(replicas * shards);
    for (std::size_t rank = 0; rank < templates.size(); ++rank) {
      const auto begin = std::min(rows, each * static_cast<std::int64_t>(rank % shards));
      const auto end = std::min(rows, begin + each);
      for (const char* name : {"a", "b", "c"}) {
        add(templates[rank], name,
            row_of(templates[rank], Kind::shard, {rows, 3}, {begin, 0}, {end - begin, 3}));
      }
    }
    const auto plan = GlobalPlan::of(std::move(templates));
    ASSERT_TRUE(ok(plan)) << "seed " << seed;
    std::map<std::string, std::map<std::int64_t, int>> stored;
    for (std::size_t rank = 0; rank < plan->ranks(); ++rank) {
      const StateTemplate& here = plan->of_rank(rank);
      for (const std::uint32_t row : plan->owned(rank)) {
        const std::int64_t begin = here.extents(here.row(row).offsets)[0];
        const std::int64_t length = here.extents(here.row(row).sizes)[0];
        for (std::int64_t i = begin; i < begin + length; ++i) {
          ++stored[std::string(here.name(row))][i];
        }
      }
    }
    for (const char* name : {"a", "b", "c"}) {
      ASSERT_EQ(stored[name].size(), static_cast<std::size_t>(rows)) << "seed " << seed;
      for (const auto& [place, times] : stored[name]) EXPECT_EQ(times, 1) << "seed " << seed;
    }
  }
}

TEST(GlobalPlan, WhatDiffersBetweenRanksIsToldByNameAndRank) {
  const auto refusal = [](const auto& first, const auto& second) {
    std::vector<StateTemplate> templates(2);
    first(templates[0]);
    second(templates[1]);
    const auto plan = GlobalPlan::of(std::move(templates));
    EXPECT_TRUE(fails(plan, Errc::invalid_argument));
    return plan ? std::string() : plan.error().message();
  };
  const auto small = [](StateTemplate& made) { add_tensor(made, "w", {3}); };
  const auto large = [](StateTemplate& made) { add_tensor(made, "w", {4}); };
  const auto whole = [](StateTemplate& made) { add_tensor(made, "w", {3}, "int64"); };
  const auto object = [](StateTemplate& made) { add_object(made, "w"); };
  EXPECT_TRUE(refusal(small, large)
                  .starts_with("w: rank 0 has torch.float32 [3], rank 1 has torch.float32 [4]"));
  EXPECT_TRUE(refusal(small, whole)
                  .starts_with("w: rank 0 has torch.float32 [3], rank 1 has torch.int64 [3]"));
  EXPECT_EQ(refusal(small, object), "w: rank 0 has a plain tensor, rank 1 an object");
}

TEST(GlobalPlan, ShardsThatDoNotMakeUpTheTensorAreRefused) {
  const auto shards = [](std::vector<Sizes> begins_and_lengths) {
    std::vector<StateTemplate> templates(begins_and_lengths.size());
    for (std::size_t rank = 0; rank < templates.size(); ++rank) {
      const Sizes& place = begins_and_lengths[rank];
      add(templates[rank], "w", row_of(templates[rank], Kind::shard, {8}, {place[0]}, {place[1]}));
    }
    return GlobalPlan::of(std::move(templates));
  };
  EXPECT_TRUE(ok(shards({{0, 4}, {4, 4}})));
  EXPECT_TRUE(fails(shards({{0, 4}, {4, 3}}), Errc::invalid_argument));
  EXPECT_TRUE(fails(shards({{0, 5}, {4, 4}}), Errc::invalid_argument));
  EXPECT_TRUE(fails(shards({{0, 4}, {3, 4}}), Errc::invalid_argument));
}

}  // namespace
}  // namespace torch_ckpt::planning
