#include "planning/global_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "planning/replicas.h"
#include "support.h"
#include "templates.h"

namespace torch_ckpt::planning {
namespace {

using namespace test;

/// The values that each rank writes, by name.
std::vector<std::vector<std::string>> written(const GlobalPlan& plan) {
  std::vector<std::vector<std::string>> names(plan.ranks());
  for (std::size_t rank = 0; rank < plan.ranks(); ++rank) {
    for (const std::uint32_t row : plan.owned(rank)) {
      names[rank].emplace_back(plan.of_rank(rank).name(row));
    }
  }
  return names;
}

Rows some_rows() {
  Rows rows;
  rows.add_tensor("weight", {300, 1 << 20});
  rows.add_tensor("scalar", {}, "int64");
  rows.add_object("step");
  rows.add_shard("w0", {8, 4}, {2, 0}, {2, 4});
  rows.add_shard("w1", {8, 4}, {2, 0}, {2, 4}, "float32", ~std::uint64_t{0});
  rows.add_empty_shard("elsewhere", {8, 4});
  rows.add_shard("w2", {7}, {3}, {4});
  rows.add_shards("of several parts", {9}, {{{0}, {2}}, {{5}, {4}}});
  rows.add_tensor("last", {2});
  return rows;
}

TEST(StateTemplate, SurvivesARoundTrip) {
  StateTemplate made = some_rows().state().state();
  StateTemplate::Row row;
  row.requires_grad = true;
  const std::vector<StateTemplate::PathPart> path = {{1, false}, {2, true}, {0, false}};
  made.add("a.10.", path, row);
  const auto again = StateTemplate::decode(made.encode());
  ASSERT_TRUE(ok(again));
  ASSERT_EQ(again->size(), made.size());
  for (std::size_t i = 0; i < made.size(); ++i) {
    EXPECT_EQ(again->name(i), made.name(i));
    EXPECT_EQ(again->row(i), made.row(i));
    EXPECT_TRUE(std::ranges::equal(again->path(i), made.path(i)));
  }
  EXPECT_TRUE(std::ranges::equal(again->sizes(again->row(0)), Sizes{300, 1 << 20}));
  EXPECT_EQ(again->dtype(again->row(1)), "int64");
  EXPECT_EQ(again->encode(), made.encode());
}

TEST(RankState, SurvivesARoundTrip) {
  const RankState made = some_rows().state();
  const auto again = RankState::decode(made.shared_template(), made.encode());
  ASSERT_TRUE(ok(again));
  ASSERT_EQ(again->items(), made.items());
  for (std::size_t item = 0; item < made.items(); ++item) {
    EXPECT_EQ(again->row_of(item), made.row_of(item)) << item;
    EXPECT_EQ(again->has(item), made.has(item)) << item;
    EXPECT_EQ(again->bytes(item), made.bytes(item)) << item;
    if (made.box(item) == RankState::kNone) continue;
    const std::uint32_t boxes[2] = {made.box(item), again->box(item)};
    EXPECT_TRUE(std::ranges::equal(again->offsets(boxes[1]), made.offsets(boxes[0])));
    EXPECT_TRUE(std::ranges::equal(again->sizes(boxes[1]), made.sizes(boxes[0])));
    EXPECT_EQ(again->layout(boxes[1]), made.layout(boxes[0]));
  }
  EXPECT_EQ(made.bytes(3), 4u * 2 * 4);
  EXPECT_EQ(made.bytes(8), 4u * 4);
  EXPECT_EQ(again->encode(), made.encode());
}

TEST(StateTemplate, RejectsDamagedBytes) {
  const RankState made = some_rows().state();
  const std::string of_template = made.state().encode();
  const std::string of_rank = made.encode();
  const auto decoded = [&](const std::string& first, const std::string& second) -> Result<> {
    auto found = StateTemplate::decode(first);
    if (!found) return std::move(found).error();
    auto state =
        RankState::decode(std::make_shared<const StateTemplate>(std::move(*found)), second);
    if (!state) return std::move(state).error();
    return {};
  };
  EXPECT_TRUE(ok(decoded(of_template, of_rank)));
  for (std::size_t size = 0; size < of_template.size(); ++size) {
    EXPECT_TRUE(fails(decoded(of_template.substr(0, size), of_rank), Errc::frame_damaged)) << size;
  }
  for (std::size_t size = 0; size < of_rank.size(); ++size) {
    EXPECT_TRUE(fails(decoded(of_template, of_rank.substr(0, size)), Errc::frame_damaged)) << size;
  }
  EXPECT_TRUE(fails(decoded(of_template + ".", of_rank), Errc::frame_damaged));
  EXPECT_TRUE(fails(decoded(of_template, of_rank + "."), Errc::frame_damaged));
  // Decoding ends without a crash for any bytes.
  std::mt19937_64 random(7);
  for (int round = 0; round < 4000; ++round) {
    std::string damaged[2] = {of_template, of_rank};
    std::string& one = damaged[round % 2];
    one[random() % one.size()] = static_cast<char>(random());
    (void)decoded(damaged[0], damaged[1]);
  }
}

TEST(GlobalPlan, ReplicatedValuesAreWrittenOnce) {
  std::vector<Rows> ranks(4);
  for (int rank = 0; rank < 4; ++rank) {
    for (int i = 0; i < 8; ++i)
      ranks[rank].add_tensor(std::string("t").append(std::to_string(i)), {100});
    ranks[rank].add_object("step");
    ranks[rank].add_tensor(std::string("of rank ").append(std::to_string(rank)), {10});
  }
  const auto plan = GlobalPlan::of(states_of(ranks));
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

TEST(GlobalPlan, ReplicasAreAssignedToTheRankWithTheFewestBytes) {
  std::vector<Rows> ranks(2);
  ranks[0].add_tensor("alone", {1000});
  for (Rows& made : ranks) {
    made.add_tensor("a", {400});
    made.add_tensor("b", {500});
    made.add_tensor("c", {200});
  }
  const auto plan = GlobalPlan::of(states_of(ranks));
  ASSERT_TRUE(ok(plan));
  EXPECT_EQ(written(*plan), (std::vector<std::vector<std::string>>{{"alone"}, {"a", "b", "c"}}));
}

// Ranks in a grid: each row of the grid holds replicas, its columns hold shards of random widths.
TEST(GlobalPlan, EachElementOfAShardedTensorIsWrittenOnce) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    std::mt19937_64 random(seed);
    const std::size_t replicas = 1 + random() % 3;
    const std::size_t shards = 1 + random() % 5;
    const auto rows = static_cast<std::int64_t>(random() % 20);
    const auto each =
        (rows + static_cast<std::int64_t>(shards) - 1) / static_cast<std::int64_t>(shards);
    std::vector<Rows> ranks(replicas * shards);
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto begin = std::min(rows, each * static_cast<std::int64_t>(rank % shards));
      const auto end = std::min(rows, begin + each);
      for (const char* name : {"a", "b", "c"}) {
        ranks[rank].add_shard(name, {rows, 3}, {begin, 0}, {end - begin, 3});
      }
    }
    const auto plan = GlobalPlan::of(states_of(ranks));
    ASSERT_TRUE(ok(plan)) << "seed " << seed;
    std::map<std::string, std::map<std::int64_t, int>> stored;
    for (std::size_t rank = 0; rank < plan->ranks(); ++rank) {
      const RankState& here = plan->of_rank(rank);
      std::uint64_t bytes = 0;
      for (const std::uint32_t row : plan->owned(rank)) bytes += here.bytes(row);
      EXPECT_EQ(plan->bytes()[rank], bytes) << "seed " << seed;
      for (const std::uint32_t row : plan->owned(rank)) {
        const std::int64_t begin = here.offsets(here.box(row))[0];
        const std::int64_t length = here.sizes(here.box(row))[0];
        for (std::int64_t i = begin; i < begin + length; ++i) {
          ++stored[std::string(here.state().name(row))][i];
        }
      }
    }
    for (const char* name : {"a", "b", "c"}) {
      ASSERT_EQ(stored[name].size(), static_cast<std::size_t>(rows)) << "seed " << seed;
      for (const auto& [place, times] : stored[name]) EXPECT_EQ(times, 1) << "seed " << seed;
    }
  }
}

TEST(GlobalPlan, ADifferenceBetweenRanksIsReportedWithNameAndRanks) {
  const auto refusal = [](const auto& first, const auto& second) {
    std::vector<Rows> ranks(2);
    first(ranks[0]);
    second(ranks[1]);
    const auto plan = GlobalPlan::of(states_of(ranks));
    EXPECT_TRUE(fails(plan, Errc::unsavable));
    return plan ? std::string() : plan.error().message();
  };
  const auto small = [](Rows& made) { made.add_tensor("w", {3}); };
  const auto large = [](Rows& made) { made.add_tensor("w", {4}); };
  const auto whole = [](Rows& made) { made.add_tensor("w", {3}, "int64"); };
  const auto object = [](Rows& made) { made.add_object("w"); };
  EXPECT_TRUE(refusal(small, large)
                  .starts_with("w: rank 0 has torch.float32 [3], rank 1 has torch.float32 [4]"));
  EXPECT_TRUE(refusal(small, whole)
                  .starts_with("w: rank 0 has torch.float32 [3], rank 1 has torch.int64 [3]"));
  EXPECT_EQ(refusal(small, object), "w: rank 0 has a plain tensor, rank 1 has an object");
}

TEST(GlobalPlan, TheSizeOfADTensorIsComparedOnlyOnRanksThatHaveIt) {
  std::vector<Rows> ranks(3);
  ranks[0].add_empty_shard("scalar", {0});
  ranks[0].add_empty_shard("rows", {7});
  ranks[1].add_shard("scalar", {}, {}, {});
  ranks[1].add_shard("rows", {8}, {0}, {4});
  ranks[2].add_empty_shard("scalar", {0});
  ranks[2].add_shard("rows", {8}, {4}, {4});
  const auto plan = GlobalPlan::of(states_of(ranks));
  ASSERT_TRUE(ok(plan));
  EXPECT_EQ(written(*plan),
            (std::vector<std::vector<std::string>>{{}, {"scalar", "rows"}, {"rows"}}));
  for (std::size_t number = 0; number < plan->names(); ++number) {
    const StateTemplate& first = plan->first_template(number);
    const Sizes expected = plan->name(number) == "scalar" ? Sizes{} : Sizes{8};
    EXPECT_TRUE(std::ranges::equal(first.sizes(first.row(plan->first_row(number))), expected));
  }
  ranks[2] = Rows();
  ranks[2].add_shard("rows", {9}, {4}, {4});
  const auto refused = GlobalPlan::of(states_of(ranks));
  ASSERT_TRUE(fails(refused, Errc::unsavable));
  EXPECT_TRUE(refused.error().message().starts_with(
      "rows: rank 1 has torch.float32 [8], rank 2 has torch.float32 [9]"));
}

TEST(GlobalPlan, ShardsThatDoNotCoverTheTensorAreRejected) {
  const auto shards = [](std::vector<Sizes> begins_and_lengths) {
    std::vector<Rows> ranks(begins_and_lengths.size());
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const Sizes& place = begins_and_lengths[rank];
      ranks[rank].add_shard("w", {8}, {place[0]}, {place[1]});
    }
    return GlobalPlan::of(states_of(ranks));
  };
  EXPECT_TRUE(ok(shards({{0, 4}, {4, 4}})));
  EXPECT_TRUE(fails(shards({{0, 4}, {4, 3}}), Errc::unsavable));
  EXPECT_TRUE(fails(shards({{0, 5}, {4, 4}}), Errc::unsavable));
  EXPECT_TRUE(fails(shards({{0, 4}, {3, 4}}), Errc::unsavable));
}

TEST(GlobalPlan, AShardOutsideItsTensorIsRejected) {
  // Offsets and sizes of each rank's shard of a tensor of [8, 2]. Each shard has as many elements
  // as the tensor, and its corners cancel out in the dimensions that are divided.
  using Boxes = std::vector<std::pair<Sizes, Sizes>>;
  const auto plan = [](const Boxes& boxes) {
    std::vector<Rows> ranks(boxes.size());
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      ranks[rank].add_shard("w", {8, 2}, boxes[rank].first, boxes[rank].second);
    }
    return GlobalPlan::of(states_of(ranks));
  };
  EXPECT_TRUE(ok(plan({{{0, 0}, {4, 2}}, {{4, 0}, {4, 2}}})));
  for (const Boxes& boxes : {Boxes{{{4, 0}, {8, 2}}}, Boxes{{{0, 1}, {4, 2}}, {{4, 1}, {4, 2}}},
                             Boxes{{{0, 0}, {8, 2}}, {{9, 0}, {0, 2}}}}) {
    const auto refused = plan(boxes);
    ASSERT_TRUE(fails(refused, Errc::unsavable));
    EXPECT_NE(refused.error().message().find("outside the tensor"), std::string::npos);
  }
}

TEST(GlobalPlan, ANameThatIsTooLongIsRejected) {
  std::vector<Rows> ranks(1);
  ranks[0].add_tensor(std::string(index::CheckpointIndex::kMaxNameBytes, 'n'), {1});
  EXPECT_TRUE(ok(GlobalPlan::of(states_of(ranks))));
  ranks[0].add_tensor(std::string(index::CheckpointIndex::kMaxNameBytes + 1, 'n'), {1});
  EXPECT_TRUE(fails(GlobalPlan::of(states_of(ranks)), Errc::unsavable));
}

TEST(GlobalPlan, ALargerTensorWithTheShardsOfAnotherIsRejected) {
  std::vector<Rows> ranks(2);
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    Rows& here = ranks[static_cast<std::size_t>(rank)];
    here.add_shard("whole", {8}, {4 * rank}, {4});
    here.add_shard("larger", {9}, {4 * rank}, {4});
  }
  const auto plan = GlobalPlan::of(states_of(ranks));
  ASSERT_TRUE(fails(plan, Errc::unsavable));
  EXPECT_TRUE(plan.error().message().starts_with("larger: the shards of all ranks have 8"));
}

// The first and the last two ranks have a mesh each; `second` are the shards of the last two.
Result<GlobalPlan> plan_of_two_meshes(const std::vector<std::pair<Sizes, Sizes>>& second) {
  std::vector<Rows> ranks(4);
  for (std::uint64_t rank = 0; rank < 4; ++rank) {
    const std::uint64_t mesh = rank / 2 + 1;
    const Sizes begin{static_cast<std::int64_t>(rank % 2) * 4};
    ranks[rank].add_tensor("plain", {3});
    ranks[rank].add_shard("one mesh", {8}, begin, {4});
    const auto& [offsets, sizes] = mesh == 1 ? std::pair(begin, Sizes{4}) : second[rank % 2];
    ranks[rank].add_shard("two meshes", {8}, offsets, sizes, "float32", mesh);
    ranks[rank].add_shard("no elements", {0}, {0}, {0}, "float32", mesh);
  }
  return GlobalPlan::of(states_of(ranks));
}

TEST(GlobalPlan, OnlyShardsOnSeveralMeshesAreCopies) {
  const auto plan = plan_of_two_meshes({{{0}, {4}}, {{4}, {4}}});
  ASSERT_TRUE(ok(plan));
  std::vector<std::uint32_t> checksums = {7, 8, 7, 8};
  for (std::size_t rank = 0; rank < 4; ++rank) {
    ASSERT_EQ(plan->copies(rank).size(), 1u);
    EXPECT_EQ(plan->of_rank(rank).state().name(plan->copies(rank)[0]), "two meshes");
  }
  const auto compare = [&] {
    std::vector<std::string_view> bytes;
    for (const std::uint32_t& checksum : checksums) {
      bytes.emplace_back(reinterpret_cast<const char*>(&checksum), sizeof checksum);
    }
    return differing_copies(*plan, bytes);
  };
  EXPECT_TRUE(compare().value().empty());
  checksums[3] = 9;
  const auto differing = compare().value();
  using Ranks = std::vector<std::vector<std::uint32_t>>;
  ASSERT_EQ(differing.size(), 1u);
  EXPECT_EQ(differing[0].name, "two meshes");
  EXPECT_EQ(differing[0].groups, (Ranks{{1}, {3}}));
  EXPECT_EQ(differing[0].meshes, (Ranks{{0, 1}, {2, 3}}));
  EXPECT_TRUE(fails(differing_copies(*plan, {}), Errc::frame_damaged));
}

TEST(GlobalPlan, EachShardOfATensorWithoutAMeshIsWrittenOnceAfterOtherItems) {
  std::vector<Rows> ranks(2);
  ranks[0].add_shards("sharded", {6}, {{{0}, {1}}, {{3}, {3}}});
  ranks[1].add_shards("sharded", {6}, {{{3}, {3}}, {{1}, {2}}});
  for (Rows& rank : ranks) rank.add_tensor("plain", {100});
  const auto plan = GlobalPlan::of(states_of(ranks));
  ASSERT_TRUE(ok(plan));
  std::map<std::int64_t, std::int64_t> stored;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const RankState& here = plan->of_rank(rank);
    EXPECT_EQ(plan->owned(rank).size(), 2u);
    for (const std::uint32_t item : plan->owned(rank)) {
      if (here.name(item) == "plain") {
        EXPECT_EQ(item, plan->owned(rank).front());
      } else {
        stored[here.offsets(here.box(item))[0]] = here.sizes(here.box(item))[0];
      }
    }
    // Without a mesh, nothing shows that the shards of two ranks are copies.
    ASSERT_EQ(plan->copies(rank).size(), 1u);
    const std::uint32_t copy = plan->copies(rank)[0];
    EXPECT_EQ(here.offsets(here.box(copy))[0], 3);
  }
  EXPECT_EQ(stored, (std::map<std::int64_t, std::int64_t>{{0, 1}, {1, 2}, {3, 3}}));
}

TEST(GlobalPlan, MeshesThatDivideATensorDifferentlyAreRejected) {
  const auto plan = plan_of_two_meshes({{{0}, {5}}, {{5}, {3}}});
  ASSERT_TRUE(fails(plan, Errc::unsavable));
  EXPECT_TRUE(plan.error().message().starts_with("two meshes: DTensors with this name"));
  EXPECT_NE(plan.error().message().find("the mesh of ranks 0-1 and the mesh of ranks 2-3"),
            std::string::npos);
}

TEST(GlobalPlan, RanksAreListedAsRanges) {
  using Ranks = std::vector<std::uint32_t>;
  EXPECT_EQ(text_of_ranks(Ranks{3}), "rank 3");
  EXPECT_EQ(text_of_ranks(Ranks{0, 1, 2, 5, 7, 8}), "ranks 0-2, 5, 7-8");
}

}  // namespace
}  // namespace torch_ckpt::planning
