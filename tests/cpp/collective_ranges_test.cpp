#include "planning/collective_ranges.h"

#include <gtest/gtest.h>

#include "support.h"

namespace torch_ckpt::planning {
namespace {

using namespace test;
using Range = CollectiveRanges::Range;
using Offers = std::vector<std::optional<os::MemoryFile::Address>>;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kShort = 2048;

os::MemoryFile::Address offer_of(std::int64_t process, const std::string& machine) {
  return {machine, process, 5, {1, 2, 3, 4}};
}

/// The offers of ranks on these machines.
Offers on(const std::vector<std::string>& machines) {
  Offers offers;
  for (const std::string& machine : machines) {
    offers.push_back(offer_of(static_cast<std::int64_t>(offers.size()), machine));
  }
  return offers;
}

/// The columns of a tensor in [begin, end), of which each rank writes a part.
std::vector<FilePart> columns(std::vector<std::size_t> ranks, std::uint64_t begin,
                              std::uint64_t end, std::uint64_t run_bytes = kShort) {
  std::vector<FilePart> parts;
  const std::uint64_t row = run_bytes * ranks.size();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    parts.push_back(
        {ranks[i], 0, begin + i * run_bytes, end - row + (i + 1) * run_bytes, run_bytes});
  }
  return parts;
}

std::vector<FilePart> operator+(std::vector<FilePart> one, const std::vector<FilePart>& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

std::vector<Range> ranges_of(const std::shared_ptr<const CollectiveRanges>& found) {
  return found == nullptr ? std::vector<Range>() : found->ranges;
}

TEST(CollectiveRanges, AreWrittenByAllRanksOfAMachine) {
  const auto found = choose_collective_ranges(columns({0, 1}, 4096, 8 * kMiB), on({"m", "m"}));
  ASSERT_EQ(found.size(), 2);
  EXPECT_EQ(ranges_of(found[0]), (std::vector<Range>{{0, 4096, 8 * kMiB}}));
  EXPECT_EQ(found[1], found[0]);
  EXPECT_EQ(found[0]->memory, offer_of(0, "m"));
}

TEST(CollectiveRanges, JoinAdjacentTensors) {
  const auto parts = columns({0, 1}, 0, kMiB / 2) + columns({1, 0}, kMiB / 2, 2 * kMiB) +
                     columns({0, 1}, 3 * kMiB, 4 * kMiB);
  const auto found = choose_collective_ranges(parts, on({"m", "m"}));
  EXPECT_EQ(ranges_of(found[0]), (std::vector<Range>{{0, 0, 2 * kMiB}, {0, 3 * kMiB, 4 * kMiB}}));
}

TEST(CollectiveRanges, LeaveOutLongRunsAndSmallTensorsAndTensorsOfOneRank) {
  const auto parts = columns({0, 1}, 0, 4 * kMiB, kLongRunBytes) +
                     columns({0, 1}, 8 * kMiB, 8 * kMiB + kMiB / 2) +
                     columns({1}, 10 * kMiB, 14 * kMiB);
  const auto found = choose_collective_ranges(parts, on({"m", "m"}));
  EXPECT_EQ(found[0], nullptr);
  EXPECT_EQ(found[1], nullptr);
}

TEST(CollectiveRanges, LeaveOutTensorsWithAnyLongRun) {
  // The second rank has most of each row.
  const std::vector<FilePart> parts = {{0, 0, 0, 4 * kMiB, kShort},
                                       {1, 0, kShort, 4 * kMiB, kLongRunBytes}};
  EXPECT_EQ(choose_collective_ranges(parts, on({"m", "m"}))[0], nullptr);
}

TEST(CollectiveRanges, LeaveOutTensorsOfSeveralMachines) {
  const auto found = choose_collective_ranges(
      columns({0, 1}, 0, 4 * kMiB) + columns({0, 2}, 4 * kMiB, 8 * kMiB), on({"m", "n", "m"}));
  EXPECT_EQ(ranges_of(found[0]), (std::vector<Range>{{0, 4 * kMiB, 8 * kMiB}}));
  EXPECT_EQ(found[1], nullptr);
}

// Rows are divided among machines, and columns among the ranks of a machine.
TEST(CollectiveRanges, BelongToTheMachineThatHasTheRows) {
  const auto found = choose_collective_ranges(
      columns({2, 3}, 4 * kMiB, 8 * kMiB) + columns({0, 1}, 0, 4 * kMiB), on({"m", "m", "n", "n"}));
  EXPECT_EQ(ranges_of(found[1]), (std::vector<Range>{{0, 0, 4 * kMiB}}));
  EXPECT_EQ(ranges_of(found[3]), (std::vector<Range>{{0, 4 * kMiB, 8 * kMiB}}));
  EXPECT_EQ(found[3]->memory, offer_of(2, "n"));
}

TEST(CollectiveRanges, LeaveOutRanksThatOfferNoMemory) {
  Offers offers = on({"m", "m", "m"});
  offers[1].reset();
  const auto found = choose_collective_ranges(
      columns({0, 1}, 0, 4 * kMiB) + columns({0, 2}, 4 * kMiB, 8 * kMiB), offers);
  EXPECT_EQ(ranges_of(found[0]), (std::vector<Range>{{0, 4 * kMiB, 8 * kMiB}}));
  EXPECT_EQ(found[1], nullptr);
}

CollectiveRanges some_ranges() {
  CollectiveRanges ranges;
  ranges.memory = offer_of(-1, "machine");
  ranges.ranges = {{0, 0, 7}, {0, 7, 9}, {3, 1, std::uint64_t{1} << 50}};
  return ranges;
}

Result<CollectiveRanges> decoded(const std::string& bytes) {
  format::ByteReader reader(std::as_bytes(std::span(bytes)));
  return CollectiveRanges::decode_from(reader);
}

std::string encoded(const CollectiveRanges& ranges) {
  std::string bytes;
  ranges.encode_to(bytes);
  return bytes;
}

TEST(CollectiveRanges, SurviveTheirEncoding) {
  const auto found = decoded(encoded(some_ranges())).value();
  EXPECT_EQ(found.memory, some_ranges().memory);
  EXPECT_EQ(found.ranges, some_ranges().ranges);
}

TEST(CollectiveRanges, ThatAreIncompleteOrOverlapAreRefused) {
  const std::string bytes = encoded(some_ranges());
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_TRUE(fails(decoded(bytes.substr(0, length)), Errc::frame_damaged));
  }
  for (const Range& wrong : {Range{0, 6, 9}, Range{0, 9, 9}, Range{0, 9, 8}}) {
    CollectiveRanges ranges = some_ranges();
    ranges.ranges[1] = wrong;
    EXPECT_TRUE(fails(decoded(encoded(ranges)), Errc::frame_damaged));
  }
}

const std::vector<std::string> kTwoHosts{"a", "b"};

TEST(InterleavedParts, AreColumnsOfRanksOnSeveralHosts) {
  EXPECT_TRUE(are_interleaved(columns({0, 1}, 0, kMiB), kTwoHosts));
}

TEST(InterleavedParts, AreNotColumnsOfRanksOnOneHost) {
  EXPECT_FALSE(are_interleaved(columns({0, 1}, 0, kMiB), std::vector<std::string>{"a", "a"}));
}

TEST(InterleavedParts, AreNotRows) {
  const std::vector<FilePart> rows{{0, 0, 0, kMiB, kMiB}, {1, 0, kMiB, 2 * kMiB, kMiB}};
  EXPECT_FALSE(are_interleaved(rows, kTwoHosts));
}

TEST(InterleavedParts, AreNotWideColumns) {
  EXPECT_FALSE(are_interleaved(columns({0, 1}, 0, kMiB, kLongRunBytes), kTwoHosts));
}

TEST(InterleavedParts, AreNotTensorsOfOneHostEach) {
  const auto parts = columns({0, 2}, 0, kMiB) + columns({1, 3}, kMiB, 2 * kMiB);
  const std::vector<std::string> hosts{"a", "b", "a", "b"};
  EXPECT_FALSE(are_interleaved(parts, hosts));
}

TEST(InterleavedParts, AreNotInDifferentFiles) {
  std::vector<FilePart> parts = columns({0, 1}, 0, kMiB);
  parts[1].file = 1;
  EXPECT_FALSE(are_interleaved(parts, kTwoHosts));
}

TEST(InterleavedParts, MayHaveShortRunsOnOneHostOnly) {
  const std::vector<FilePart> parts{{0, 0, 0, kMiB, kMiB}, {1, 0, 4096, 2 * kMiB, kShort}};
  EXPECT_TRUE(are_interleaved(parts, kTwoHosts));
}

TEST(SharedFiles, HavePartsOfSeveralHosts) {
  const std::vector<FilePart> rows{{0, 0, 0, kMiB, kMiB}, {1, 0, kMiB, 2 * kMiB, kMiB}};
  EXPECT_TRUE(are_shared(rows, kTwoHosts));
  EXPECT_FALSE(are_shared(rows, std::vector<std::string>{"a", "a"}));
}

TEST(SharedFiles, AreNotFilesOfOneHostEach) {
  const std::vector<FilePart> parts{
      {0, 0, 0, kMiB, kMiB}, {1, 1, 0, kMiB, kMiB}, {0, 0, kMiB, 2 * kMiB, kMiB}};
  EXPECT_FALSE(are_shared(parts, kTwoHosts));
}

}  // namespace
}  // namespace torch_ckpt::planning
