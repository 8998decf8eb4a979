#include "planning/read_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "support.h"

namespace torch_ckpt::planning {
namespace {

using test::Random;

constexpr ReadPlanLimits kLimits{
    .batch_bytes = 1000, .small_bytes = 400, .gap_bytes = 50, .piece_bytes = 300};

WantedRecord whole(std::size_t file, std::uint64_t offset, std::uint64_t length) {
  return {file, offset, length, length};
}

std::vector<ReadUnit> plan(const std::vector<WantedRecord>& records) {
  return plan_reads(records, kLimits);
}

using Indices = std::vector<std::size_t>;

TEST(ReadPlan, SmallNeighboursAreReadAtOnce) {
  const auto units = plan({whole(0, 0, 100), whole(0, 100, 100), whole(0, 200, 100)});
  ASSERT_EQ(units.size(), 1);
  EXPECT_TRUE(units[0].is_batch);
  EXPECT_EQ(units[0].records, (Indices{0, 1, 2}));
  EXPECT_EQ(units[0].begin, 0);
  EXPECT_EQ(units[0].length, 300);
}

TEST(ReadPlan, TheOrderOfTheFileCountsAndNotThatOfTheRequests) {
  const auto units = plan({whole(1, 0, 10), whole(0, 100, 10), whole(0, 90, 10)});
  ASSERT_EQ(units.size(), 2);
  EXPECT_EQ(units[0].records, (Indices{2, 1}));
  EXPECT_EQ(units[0].begin, 90);
  EXPECT_EQ(units[1].file, 1);
  EXPECT_EQ(units[1].records, (Indices{0}));
}

TEST(ReadPlan, ASmallGapIsReadOverAndALargeOneIsNot) {
  const auto units = plan({whole(0, 0, 100), whole(0, 150, 100), whole(0, 301, 100)});
  ASSERT_EQ(units.size(), 2);
  EXPECT_EQ(units[0].records, (Indices{0, 1}));
  EXPECT_EQ(units[0].length, 250);
  EXPECT_EQ(units[1].begin, 301);
}

TEST(ReadPlan, ABatchStopsAtItsLimit) {
  const auto units =
      plan({whole(0, 0, 400), whole(0, 400, 400), whole(0, 800, 200), whole(0, 1000, 1)});
  ASSERT_EQ(units.size(), 2);
  EXPECT_EQ(units[0].length, 1000);
  EXPECT_EQ(units[1].records, (Indices{3}));
}

TEST(ReadPlan, ALargeRecordIsCutIntoPiecesOfWhatIsWanted) {
  const auto units = plan({{0, 64, 5000, 700}});
  ASSERT_EQ(units.size(), 3);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_FALSE(units[i].is_batch);
    EXPECT_EQ(units[i].piece, i);
    EXPECT_EQ(units[i].pieces, 3);
    EXPECT_EQ(units[i].begin, 300 * i);
  }
  EXPECT_EQ(units[1].length, 300);
  EXPECT_EQ(units[2].length, 100);
}

TEST(ReadPlan, AMultipleOfThePieceSizeLeavesNoEmptyPiece) {
  EXPECT_EQ(plan({{0, 0, 5000, 600}}).size(), 2);
}

TEST(ReadPlan, ALargeRecordOfWhichNothingIsWantedIsLookedAtOnce) {
  const auto units = plan({{0, 0, 5000, 0}});
  ASSERT_EQ(units.size(), 1);
  EXPECT_EQ(units[0].length, 0);
  EXPECT_EQ(units[0].pieces, 1);
}

TEST(ReadPlan, ASmallRecordOfWhichLittleIsWantedIsReadLikeALargeOne) {
  const auto units = plan({{0, 0, 400, 199}, {0, 400, 400, 200}});
  ASSERT_EQ(units.size(), 2);
  EXPECT_FALSE(units[0].is_batch);
  EXPECT_TRUE(units[1].is_batch);
}

TEST(ReadPlan, ARecordSmallerThanTheGapIsNeverCut) {
  const auto units = plan({{0, 0, 50, 1}});
  ASSERT_EQ(units.size(), 1);
  EXPECT_TRUE(units[0].is_batch);
}

TEST(ReadPlan, OneRecordWantedTwiceIsReadOnce) {
  const auto units = plan({whole(0, 0, 100), whole(0, 0, 100)});
  ASSERT_EQ(units.size(), 1);
  EXPECT_EQ(units[0].records, (Indices{0, 1}));
  EXPECT_EQ(units[0].length, 100);
}

TEST(ReadPlan, NoRecordsIsNoWork) { EXPECT_TRUE(plan({}).empty()); }

TEST(ReadPlan, OffsetsNearTheEndOfTheNumbersDoNotOverflow) {
  const std::uint64_t last = ~std::uint64_t{0};
  const auto units = plan({whole(0, last - 10, 100), whole(0, last, 100), whole(0, 5, 10)});
  std::size_t records = 0;
  for (const ReadUnit& unit : units) {
    EXPECT_LE(unit.length, kLimits.batch_bytes);
    records += unit.records.size();
  }
  EXPECT_EQ(records, 3);
}

TEST(ReadPlan, EveryRecordIsReadWholeByUnitsWithinTheLimits) {
  Random random(1);
  SCOPED_TRACE(random.seed_text());
  for (int round = 0; round < 500; ++round) {
    std::vector<WantedRecord> records(random.between(0, 40));
    for (WantedRecord& record : records) {
      record.file = random.between(0, 2);
      record.offset = random.between(0, 3000);
      record.length = random.between(0, 1500);
      record.wanted = random.between(0, record.length);
    }
    const auto units = plan(records);
    std::vector<std::uint64_t> covered(records.size(), 0);
    std::vector<int> batches(records.size(), 0);
    for (const ReadUnit& unit : units) {
      ASSERT_FALSE(unit.records.empty());
      if (!unit.is_batch) {
        const WantedRecord& record = records[unit.records.front()];
        ASSERT_EQ(unit.records.size(), 1);
        ASSERT_EQ(unit.file, record.file);
        ASSERT_LE(unit.length, kLimits.piece_bytes);
        ASSERT_EQ(unit.begin, covered[unit.records.front()]) << "pieces come in order";
        covered[unit.records.front()] += unit.length;
        continue;
      }
      ASSERT_LE(unit.length, kLimits.batch_bytes);
      for (const std::size_t index : unit.records) {
        const WantedRecord& record = records[index];
        ASSERT_EQ(unit.file, record.file);
        ASSERT_GE(record.offset, unit.begin);
        ASSERT_LE(record.offset + record.length, unit.begin + unit.length);
        covered[index] += record.wanted;
        ASSERT_EQ(++batches[index], 1);
      }
    }
    for (std::size_t i = 0; i < records.size(); ++i) {
      ASSERT_EQ(covered[i], records[i].wanted) << "round " << round << ", record " << i;
    }
    ASSERT_TRUE(std::is_sorted(units.begin(), units.end(), [](const auto& a, const auto& b) {
      return a.file < b.file;
    })) << "so that few files are open at a time";
  }
}

}  // namespace
}  // namespace torch_ckpt::planning
