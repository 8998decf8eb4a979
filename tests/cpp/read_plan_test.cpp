#include "planning/read_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <string>
#include <utility>

#include "support.h"

namespace torch_ckpt::planning {

// For GoogleTest's messages.
static std::ostream& operator<<(std::ostream& out, const ByteRange& range) {
  return out << "[" << range.begin << ", " << range.end << ")";
}

namespace {

using test::Random;

constexpr ReadPlanLimits kLimits{
    .batch_bytes = 1000, .small_bytes = 400, .gap_bytes = 50, .piece_bytes = 320, .cut_bytes = 64};

using Ranges = std::vector<ByteRange>;

WantedRecord wanted(std::size_t file, std::uint64_t offset, std::uint64_t length, Ranges ranges) {
  static std::deque<StoredRecord> records;  // live as long as the process
  records.push_back({"", file, offset, length});
  return {&records.back(), std::move(ranges)};
}

WantedRecord whole(std::size_t file, std::uint64_t offset, std::uint64_t length) {
  return wanted(file, offset, length, {{0, length}});
}

/// A large record with these requested ranges.
WantedRecord large(Ranges ranges) { return wanted(0, 64, 5000, std::move(ranges)); }

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

TEST(ReadPlan, UnitsAreInTheOrderOfTheFile) {
  const auto units = plan({whole(1, 0, 10), whole(0, 100, 10), whole(0, 90, 10)});
  ASSERT_EQ(units.size(), 2);
  EXPECT_EQ(units[0].records, (Indices{2, 1}));
  EXPECT_EQ(units[0].begin, 90);
  EXPECT_EQ(units[1].records, (Indices{0}));
}

TEST(ReadPlan, TheEndsOfEachLargeRecordAreReadOnceAndBeforeItsPieces) {
  std::vector<WantedRecord> records;
  for (std::uint64_t i = 0; i < 23; ++i) records.push_back(whole(i / 11, 1000 * i, 1000));
  records.push_back(whole(5, 0, 10));
  const auto pieces = plan(records);
  const auto units = with_ends_ahead(pieces, records);
  std::vector<bool> is_opened(records.size());
  std::size_t others = 0;
  for (const ReadUnit& unit : units) {
    for (const std::size_t record : unit.records) {
      if (unit.is_of_ends) {
        EXPECT_FALSE(is_opened[record]);
        EXPECT_EQ(records[record].record->file, records[unit.records.front()].record->file);
        is_opened[record] = true;
      } else {
        EXPECT_TRUE(is_opened[record] || unit.is_batch);
      }
    }
    if (!unit.is_of_ends) {
      ASSERT_LT(others, pieces.size());
      EXPECT_EQ(unit.records, pieces[others].records);
      EXPECT_EQ(unit.piece, pieces[others++].piece);
    }
  }
  EXPECT_EQ(others, pieces.size());
  // Not all ends come first, because the first pieces would wait for them.
  EXPECT_FALSE(units[3].is_of_ends);
}

TEST(ReadPlan, AReadSpansASmallGapButNotALargeOne) {
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

/// The ranges of each unit, all of which must be pieces of one record.
std::vector<Ranges> pieces_of(const std::vector<ReadUnit>& units) {
  std::vector<Ranges> pieces;
  for (const ReadUnit& unit : units) {
    EXPECT_FALSE(unit.is_batch);
    EXPECT_EQ(unit.records, units.front().records);
    EXPECT_EQ(unit.piece, pieces.size());
    EXPECT_EQ(unit.pieces, units.size());
    pieces.push_back(unit.ranges);
  }
  return pieces;
}

TEST(ReadPlan, ALargeRecordIsDividedIntoPiecesOfItsRequestedBytes) {
  EXPECT_EQ(pieces_of(plan({large({{0, 700}})})),
            (std::vector<Ranges>{{{0, 320}}, {{320, 640}}, {{640, 700}}}));
}

TEST(ReadPlan, PiecesEndAtMultiplesOfTheCutSizeOnly) {
  EXPECT_EQ(pieces_of(plan({large({{150, 777}})})),
            (std::vector<Ranges>{{{150, 448}}, {{448, 768}}, {{768, 777}}}));
}

TEST(ReadPlan, ARangeThatCannotBeDividedToFitAPieceStartsTheNext) {
  // The first range leaves one byte of the piece free.
  EXPECT_EQ(pieces_of(plan({large({{0, 319}, {350, 600}})})),
            (std::vector<Ranges>{{{0, 319}}, {{350, 600}}}));
}

TEST(ReadPlan, ShortRangesShareAPiece) {
  EXPECT_EQ(pieces_of(plan({large({{0, 50}, {200, 300}, {1000, 1120}, {2049, 2150}})})),
            (std::vector<Ranges>{{{0, 50}, {200, 300}, {1000, 1120}}, {{2049, 2150}}}));
}

TEST(ReadPlan, APieceIsFilledWithTheBeginOfTheNextRangeIfThatCanBeDivided) {
  EXPECT_EQ(pieces_of(plan({large({{0, 150}, {1000, 1500}})})),
            (std::vector<Ranges>{{{0, 150}, {1000, 1152}}, {{1152, 1472}}, {{1472, 1500}}}));
}

TEST(ReadPlan, APieceSmallerThanTheCutSizeGrowsToTheRange) {
  const ReadPlanLimits limits{.piece_bytes = 100, .cut_bytes = 1 << 20};
  const WantedRecord record = wanted(0, 0, 10 << 20, {{5, 1000}, {2000, 3000}});
  EXPECT_EQ(pieces_of(plan_reads(std::vector{record}, limits)),
            (std::vector<Ranges>{{{5, 1000}}, {{2000, 3000}}}));
  // Also if the range begins at a multiple of the cut size.
  const WantedRecord aligned = wanted(0, 0, 10 << 20, {{1 << 20, (1 << 20) + 1000}});
  EXPECT_EQ(pieces_of(plan_reads(std::vector{aligned}, limits)),
            (std::vector<Ranges>{{{1 << 20, (1 << 20) + 1000}}}));
}

TEST(ReadPlan, AMultipleOfThePieceSizeLeavesNoEmptyPiece) {
  EXPECT_EQ(pieces_of(plan({large({{0, 640}})})), (std::vector<Ranges>{{{0, 320}}, {{320, 640}}}));
}

TEST(ReadPlan, ALargeRecordWithoutRequestedBytesHasOneUnit) {
  EXPECT_EQ(pieces_of(plan({large({})})), std::vector<Ranges>{{}});
}

TEST(ReadPlan, ARangeNearTheLargestOffsetIsDividedWithoutOverflow) {
  const std::uint64_t last = ~std::uint64_t{0};
  EXPECT_EQ(pieces_of(plan({large({{0, 100}, {last - 100, last}})})),
            (std::vector<Ranges>{{{0, 100}, {last - 100, last}}}));
}

TEST(ReadPlan, AnImpossiblyLargeRecordHasALimitedNumberOfPieces) {
  const std::uint64_t last = ~std::uint64_t{0};
  const auto pieces = pieces_of(plan({wanted(0, 0, last, {{5, last}})}));
  EXPECT_LE(pieces.size(), 5000);
  EXPECT_EQ(pieces.front().front().begin, 5);
  EXPECT_EQ(pieces.back().back().end, last);
}

TEST(ReadPlan, ASmallRecordWithFewRequestedBytesIsReadLikeALargeOne) {
  const auto units =
      plan({wanted(0, 0, 400, {{0, 100}, {200, 299}}), wanted(0, 400, 400, {{0, 350}})});
  ASSERT_EQ(units.size(), 2);
  EXPECT_FALSE(units[0].is_batch);
  EXPECT_TRUE(units[1].is_batch);
}

TEST(ReadPlan, ARecordSmallerThanTheGapIsNeverDivided) {
  const auto units = plan({wanted(0, 0, 50, {{7, 8}})});
  ASSERT_EQ(units.size(), 1);
  EXPECT_TRUE(units[0].is_batch);
}

TEST(ReadPlan, ARecordThatIsRequestedTwiceIsReadOnce) {
  const auto units = plan({whole(0, 0, 100), whole(0, 0, 100)});
  ASSERT_EQ(units.size(), 1);
  EXPECT_EQ(units[0].records, (Indices{0, 1}));
  EXPECT_EQ(units[0].length, 100);
}

TEST(ReadPlan, WithoutRecordsIsEmpty) { EXPECT_TRUE(plan({}).empty()); }

TEST(ReadPlan, OffsetsNearTheLargestNumberDoNotOverflow) {
  const std::uint64_t last = ~std::uint64_t{0};
  const auto units = plan({whole(0, last - 10, 100), whole(0, last, 100), whole(0, 5, 10)});
  std::size_t records = 0;
  for (const ReadUnit& unit : units) {
    EXPECT_LE(unit.length, kLimits.batch_bytes);
    records += unit.records.size();
  }
  EXPECT_EQ(records, 3);
}

TEST(ReadPlan, EveryRangeIsReadOnceInOrderByUnitsWithinTheLimits) {
  Random random(1);
  for (int round = 0; round < 1000; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::vector<StoredRecord> stored(random.between(0, 40));
    std::vector<WantedRecord> records;
    for (StoredRecord& record : stored) {
      record.file = random.between(0, 2);
      record.offset = random.between(0, 3000);
      record.length = random.between(0, 1500);
      records.push_back({&record, {}});
      Ranges& ranges = records.back().ranges;
      for (std::uint64_t at = random.between(0, 300); at < record.length;) {
        const std::uint64_t end = std::min(record.length, at + random.between(1, 800));
        ranges.push_back({at, end});
        at = end + random.between(1, 300);
      }
    }
    const auto units = plan(records);
    std::vector<Ranges> covered(records.size());
    std::vector<std::size_t> seen(records.size(), 0);
    for (const ReadUnit& unit : units) {
      ASSERT_FALSE(unit.records.empty());
      if (!unit.is_batch) {
        const std::size_t index = unit.records.front();
        ASSERT_EQ(unit.records.size(), 1);
        ASSERT_EQ(unit.piece, seen[index]++) << "pieces come in order";
        std::uint64_t bytes = 0;
        for (const ByteRange& range : unit.ranges) {
          bytes += range.bytes();
          Ranges& all = covered[index];
          if (!all.empty() && all.back().end == range.begin) {
            ASSERT_EQ(range.begin % kLimits.cut_bytes, 0) << "cut between multiples";
            all.back().end = range.end;
          } else {
            all.push_back(range);
          }
        }
        ASSERT_LE(bytes, kLimits.piece_bytes);
        continue;
      }
      ASSERT_LE(unit.length, kLimits.batch_bytes);
      for (const std::size_t index : unit.records) {
        const StoredRecord& record = stored[index];
        ASSERT_EQ(record.file, stored[unit.records.front()].file);
        ASSERT_GE(record.offset, unit.begin);
        ASSERT_LE(record.offset + record.length, unit.begin + unit.length);
        covered[index] = records[index].ranges;
        ASSERT_EQ(++seen[index], 1);
      }
    }
    for (std::size_t i = 0; i < records.size(); ++i) {
      ASSERT_EQ(covered[i], records[i].ranges) << "record " << i;
      ASSERT_GE(seen[i], 1) << "record " << i;
    }
    for (const ReadUnit& unit : units) {
      ASSERT_TRUE(unit.is_batch || unit.pieces == seen[unit.records.front()]);
    }
    ASSERT_TRUE(std::is_sorted(units.begin(), units.end(), [&](const auto& a, const auto& b) {
      return stored[a.records.front()].file < stored[b.records.front()].file;
    })) << "so that few files are open at a time";
  }
}

}  // namespace
}  // namespace torch_ckpt::planning
