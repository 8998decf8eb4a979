#include "planning/plan_metadata.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "index/checkpoint_index.h"
#include "index/metadata_seal.h"
#include "planning/changes.h"
#include "support.h"
#include "templates.h"

namespace torch_ckpt::planning {
namespace {

using format::FileResult;
using format::ItemLocation;
using index::CheckpointIndex;
using namespace test;
using Files = std::vector<FileResult>;

/// Two ranks with a sharded tensor, a plain tensor and a number.
GlobalPlan plan_of_two() {
  std::vector<Rows> ranks(2);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const auto begin = static_cast<std::int64_t>(4 * rank);
    ranks[rank].add_shard("w", {8, 2}, {begin, 0}, {4, 2});
    ranks[rank].add_tensor("plain", {3});
    ranks[rank].add_object("step");
  }
  return GlobalPlan::of(test::states_of(ranks)).value();
}

void set_locations(FileResult& file, const std::vector<ItemLocation>& locations) {
  file.locations = format::ItemLocations(locations);
  file.crcs.assign(locations.size(), 0);
}

/// A file for each rank, with its rows back to back.
std::vector<Files> written(const GlobalPlan& plan, std::uint64_t length = 500,
                           std::string_view suffix = "_0.distcp") {
  std::vector<Files> made(plan.ranks());
  for (std::size_t rank = 0; rank < plan.ranks(); ++rank) {
    FileResult& file = made[rank].emplace_back();
    file.name = "__" + std::to_string(rank) + std::string(suffix);
    file.checksum_table = "table of " + file.name;
    std::vector<ItemLocation> locations;
    for (std::size_t i = 0; i < plan.owned(rank).size(); ++i) {
      locations.push_back({i, length * i, length});
    }
    set_locations(file, locations);
  }
  return made;
}

std::string whole(const index::EncodedMetadata& metadata) {
  std::string contents;
  for (const std::string_view piece : metadata.pieces()) contents += piece;
  return contents;
}

Result<index::EncodedMetadata> encode(PlanMetadata& metadata, const std::vector<Files>& files) {
  const std::vector<WrittenFiles> all(files.begin(), files.end());
  return metadata.encode(all, {{{"checkpoint_id", "here"}, {"save_id", {}}}, "1.0.0"});
}

std::string encoded(PlanMetadata& metadata, const std::vector<Files>& files) {
  const auto made = encode(metadata, files);
  EXPECT_TRUE(ok(made));
  return whole(made.value());
}

CheckpointIndex decoded(const std::string& file) {
  auto index = CheckpointIndex::decode(test::bytes_of(file), "here");
  EXPECT_TRUE(ok(index));
  return std::move(index).value();
}

TEST(PlanMetadata, ContainsTheLocationOfEachShard) {
  const GlobalPlan plan = plan_of_two();
  PlanMetadata metadata(plan);
  const CheckpointIndex index = decoded(encoded(metadata, written(plan)));
  ASSERT_EQ(index.entries().size(), 3u);
  const CheckpointIndex::Entry& w = index.entries()[index.find("w").value()];
  ASSERT_EQ(w.shard_count, 2u);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const CheckpointIndex::Shard& shard = index.shards(w)[rank];
    EXPECT_EQ(index.text(index.files()[shard.file]), "__" + std::to_string(rank) + "_0.distcp");
    EXPECT_EQ(index.extents(shard.offsets)[0], static_cast<std::int64_t>(4 * rank));
    EXPECT_EQ(shard.length, 500u);
    EXPECT_EQ(index.text(index.tables()[shard.file]),
              "table of __" + std::to_string(rank) + "_0.distcp");
  }
}

TEST(PlanMetadata, OfALaterSaveEqualsThatOfANewPlan) {
  const GlobalPlan plan = plan_of_two();
  PlanMetadata kept(plan);
  kept.describe();
  encoded(kept, written(plan));
  auto with_another_file = written(plan);
  with_another_file[1].push_back({"__1_1.distcp", {}, {}, "nothing in it"});
  for (const auto& files : {written(plan, 500, "_later_0.distcp"), written(plan, 600),
                            with_another_file, written(plan, 600), written(plan)}) {
    PlanMetadata fresh(plan);
    EXPECT_EQ(encoded(kept, files), encoded(fresh, files));
  }
}

TEST(PlanMetadata, IsNotChangedByALaterSave) {
  const GlobalPlan plan = plan_of_two();
  PlanMetadata metadata(plan);
  const std::vector<Files> files = written(plan);
  const std::vector<WrittenFiles> all(files.begin(), files.end());
  const auto first = metadata.encode(all, {{}, "1.0.0"});
  ASSERT_TRUE(ok(first));
  const std::string before = whole(*first);
  ASSERT_TRUE(ok(metadata.encode(all, {{}, "2.0.0"})));
  EXPECT_EQ(whole(*first), before);
}

TEST(PlanMetadata, RejectsAMissingLocation) {
  const GlobalPlan plan = plan_of_two();
  PlanMetadata metadata(plan);
  auto files = written(plan);
  auto locations = files[1][0].locations.decoded();
  locations.pop_back();
  set_locations(files[1][0], locations);
  const auto refused = encode(metadata, files);
  ASSERT_TRUE(fails(refused, Errc::metadata_inconsistent));
  EXPECT_EQ(refused.error().message().substr(0, 6), "rank 1");
  decoded(encoded(metadata, written(plan)));
}

TEST(PlanMetadata, RejectsAValueThatIsReportedTwiceInsteadOfAMissingOne) {
  const GlobalPlan plan = plan_of_two();
  PlanMetadata metadata(plan);
  auto files = written(plan);
  auto locations = files[0][0].locations.decoded();
  ASSERT_GE(locations.size(), 2u);
  locations.back() = locations.front();
  set_locations(files[0][0], locations);
  EXPECT_TRUE(fails(encode(metadata, files), Errc::metadata_inconsistent));
}

TEST(PlanMetadata, RejectsALocationOfAnItemThatIsNotInThePlan) {
  const GlobalPlan plan = plan_of_two();
  PlanMetadata metadata(plan);
  auto files = written(plan);
  auto locations = files[1][0].locations.decoded();
  locations.push_back({locations.size(), 5000, 500});
  set_locations(files[1][0], locations);
  EXPECT_TRUE(fails(encode(metadata, files), Errc::metadata_inconsistent));
}

TEST(MetadataSeal, DoesNotMatchOtherBytes) {
  const GlobalPlan plan = plan_of_two();
  PlanMetadata metadata(plan);
  std::string file = encoded(metadata, written(plan));
  file[10] ^= 1;
  EXPECT_TRUE(fails(index::bytes_sealed(test::bytes_of(file)), Errc::checksum_mismatch));
  file.pop_back();
  EXPECT_EQ(index::bytes_sealed(test::bytes_of(file)).value(), std::nullopt);
}

class PlanChanges : public ::testing::Test {
 protected:
  void change(std::string_view name) {
    for (std::size_t rank = 0; rank < plan_.ranks(); ++rank) {
      for (std::size_t i = 0; i < plan_.owned(rank).size(); ++i) {
        if (plan_.name(plan_.entry(rank, i)) == name) now_[rank][0].crcs[i] = 7;
      }
    }
  }
  Changes changes(std::string_view ignored = "") const {
    const std::vector<WrittenFiles> before(before_.begin(), before_.end());
    const std::vector<WrittenFiles> now(now_.begin(), now_.end());
    return changes_between(plan_, before, now, ignored);
  }

  const GlobalPlan plan_ = plan_of_two();
  const std::vector<Files> before_ = written(plan_);
  std::vector<Files> now_ = written(plan_);
};

TEST_F(PlanChanges, AreEmptyIfNoNumberHasMoved) {
  change("w");
  EXPECT_EQ(changes().moved, std::nullopt);
  change("step");
  EXPECT_EQ(changes("step").moved, std::nullopt);
}

TEST_F(PlanChanges, ListTheTensorsOfAnUnchangedGroup) {
  change("step");
  const Changes found = changes();
  ASSERT_TRUE(found.moved);
  EXPECT_EQ(plan_.name(*found.moved), "step");
  ASSERT_EQ(found.unchanged.size(), 1u);
  EXPECT_EQ(found.unchanged[0].first, "");
  EXPECT_EQ(found.unchanged[0].second.size(), 2u);
}

TEST(PlanChangesOfIntegers, DoNotCount) {
  std::vector<Rows> ranks(1);
  ranks[0].add_tensor("generator", {16}, "uint8");
  ranks[0].add_tensor("order", {9}, "int64");
  ranks[0].add_object("step");
  const GlobalPlan plan = GlobalPlan::of(test::states_of(ranks)).value();
  const std::vector<Files> before = written(plan);
  std::vector<Files> now = written(plan);
  for (std::size_t i = 0; i < plan.owned(0).size(); ++i) {
    if (plan.name(plan.entry(0, i)) == "step") now[0][0].crcs[i] = 7;
  }
  const Changes found =
      changes_between(plan, std::vector<WrittenFiles>(before.begin(), before.end()),
                      std::vector<WrittenFiles>(now.begin(), now.end()), "");
  EXPECT_TRUE(found.moved);
  EXPECT_TRUE(found.unchanged.empty());
}

TEST_F(PlanChanges, OfOneShardCountForItsGroup) {
  change("step");
  change("w");
  const Changes found = changes();
  EXPECT_TRUE(found.unchanged.empty());
}

}  // namespace
}  // namespace torch_ckpt::planning
