#include "planning/tiling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "index/metadata_draft.h"
#include "index/metadata_encoder.h"
#include "support.h"

namespace torch_ckpt::planning {
namespace {

using Sizes = std::vector<std::int64_t>;

/// Repeatedly divides a box across a random dimension.
std::vector<Box> random_tiles(const Sizes& whole, std::size_t cuts, std::mt19937_64& random) {
  std::vector<Box> boxes = {{Sizes(whole.size()), whole}};
  for (std::size_t i = 0; i < cuts; ++i) {
    const std::size_t chosen = random() % boxes.size();
    const std::size_t d = random() % whole.size();
    Box box = boxes[chosen];
    if (box.lengths[d] < 2) continue;
    const auto at =
        static_cast<std::int64_t>(1 + random() % static_cast<std::uint64_t>(box.lengths[d] - 1));
    boxes[chosen].lengths[d] = at;
    box.offsets[d] += at;
    box.lengths[d] -= at;
    boxes.push_back(box);
  }
  std::ranges::shuffle(boxes, random);
  return boxes;
}

/// The number of boxes that contain each element.
std::vector<int> counted(const Sizes& whole, const std::vector<Box>& boxes) {
  const auto elements =
      std::accumulate(whole.begin(), whole.end(), std::int64_t{1}, std::multiplies<>());
  std::vector<int> counts(static_cast<std::size_t>(elements));
  for (std::int64_t element = 0; element < elements; ++element) {
    for (const Box& box : boxes) {
      std::int64_t rest = element;
      bool is_inside = true;
      for (std::size_t d = whole.size(); d-- > 0;) {
        const std::int64_t place = rest % whole[d];
        rest /= whole[d];
        is_inside = is_inside && place >= box.offsets[d] && place < box.offsets[d] + box.lengths[d];
      }
      if (is_inside) ++counts[static_cast<std::size_t>(element)];
    }
  }
  return counts;
}

bool is_filled_once(const Sizes& whole, const std::vector<Box>& boxes) {
  return std::ranges::all_of(counted(whole, boxes), [](int count) { return count == 1; });
}

TEST(Tiling, AcceptsBoxesThatCoverEachElementOnce) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    Sizes whole(1 + random() % 4);
    for (auto& size : whole) size = static_cast<std::int64_t>(1 + random() % 6);
    const auto boxes = random_tiles(whole, random() % 12, random);
    EXPECT_TRUE(tile(whole, boxes)) << "seed " << seed;
  }
}

TEST(Tiling, RejectsBoxesWithGapsOrOverlaps) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    std::mt19937_64 random(seed);
    Sizes whole(1 + random() % 3);
    for (auto& size : whole) size = static_cast<std::int64_t>(2 + random() % 5);
    auto boxes = random_tiles(whole, 1 + random() % 8, random);
    Box& box = boxes[random() % boxes.size()];
    const std::size_t d = random() % whole.size();
    switch (random() % 3) {
      case 0:
        if (box.offsets[d] > 0) --box.offsets[d];
        break;
      case 1:
        if (box.lengths[d] > 1) --box.lengths[d];
        break;
      default:
        boxes.push_back(box);
    }
    EXPECT_EQ(tile(whole, boxes), is_filled_once(whole, boxes)) << "seed " << seed;
  }
}

TEST(Tiling, AcceptsOneBoxOnlyIfItIsTheTensor) {
  const std::vector<Box> whole = {{{0, 0}, {3, 4}}};
  EXPECT_TRUE(tile(Sizes{3, 4}, whole));
  const std::vector<Box> part = {{{0, 0}, {3, 3}}};
  EXPECT_FALSE(tile(Sizes{3, 4}, part));
}

TEST(Tiling, AcceptsOneBoxOfATensorWithoutDimensions) {
  const std::vector<Box> one(1);
  EXPECT_TRUE(tile(Sizes{}, one));
  const std::vector<Box> two(2);
  EXPECT_FALSE(tile(Sizes{}, two));
}

TEST(Tiling, RejectsBoxesThatDivideMoreThanSixDimensions) {
  std::vector<Box> boxes;
  for (std::int64_t corner = 0; corner < 128; ++corner) {
    Box& box = boxes.emplace_back();
    for (std::int64_t d = 0; d < 7; ++d) {
      box.offsets.push_back((corner >> d) & 1);
      box.lengths.push_back(1);
    }
  }
  EXPECT_FALSE(tile(Sizes(7, 2), boxes));
}

// --- coverage ------------------------------------------------------------------------------------

using State = Coverage::State;

Coverage coverage_of(const Sizes& whole, std::vector<Box> boxes) {
  const std::size_t count = boxes.size();
  auto coverage = check_coverage(whole, std::move(boxes), test::never_interrupted);
  EXPECT_TRUE(test::ok(coverage));
  EXPECT_LE(coverage->steps, max_coverage_steps(count));
  return *std::move(coverage);
}

/// The first element that no box covers, without a limit on the time.
std::optional<Sizes> first_gap(const Sizes& whole, const std::vector<Box>& boxes) {
  Coverage coverage = coverage_of(whole, boxes);
  EXPECT_EQ(coverage.state, coverage.first_gap ? State::incomplete : State::complete);
  return std::move(coverage.first_gap);
}

std::optional<Sizes> expected_gap(const Sizes& whole, const std::vector<Box>& boxes) {
  const auto counts = counted(whole, boxes);
  const auto missing = std::ranges::find(counts, 0);
  if (missing == counts.end()) return std::nullopt;
  auto rest = static_cast<std::int64_t>(missing - counts.begin());
  Sizes gap(whole.size());
  for (std::size_t d = whole.size(); d-- > 0; rest /= whole[d]) gap[d] = rest % whole[d];
  return gap;
}

TEST(Coverage, NamesTheFirstElementThatNoBoxContains) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    std::mt19937_64 random(seed);
    Sizes whole(random() % 6);
    for (auto& size : whole) size = static_cast<std::int64_t>(1 + random() % 5);
    auto boxes = random_tiles(whole.empty() ? Sizes{1} : whole, random() % 16, random);
    if (whole.empty()) boxes.assign(1 + random() % 2, Box());
    EXPECT_EQ(first_gap(whole, boxes), std::nullopt) << "seed " << seed;
    if (whole.empty()) continue;
    // Boxes that overlap, and empty ones, change nothing.
    boxes.push_back(boxes[random() % boxes.size()]);
    boxes.push_back(boxes.back());
    boxes.back().lengths[random() % whole.size()] = 0;
    EXPECT_EQ(first_gap(whole, boxes), std::nullopt) << "seed " << seed;
    boxes[random() % boxes.size()] = boxes.back();
    EXPECT_EQ(first_gap(whole, boxes), expected_gap(whole, boxes)) << "seed " << seed;
  }
}

TEST(Coverage, NamesTheFirstElementThatRandomOverlappingBoxesLeaveUncovered) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    std::mt19937_64 random(seed);
    Sizes whole(1 + random() % 4);
    for (auto& size : whole) size = static_cast<std::int64_t>(1 + random() % 6);
    std::vector<Box> boxes(random() % 24);
    for (Box& box : boxes) {
      for (const std::int64_t size : whole) {
        const auto number = [&](std::int64_t limit) {
          return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
        };
        // Most boxes are large, so that some seeds cover the tensor.
        const std::int64_t offset = random() % 3 == 0 ? number(size) : 0;
        const std::int64_t rest = size - offset;
        box.offsets.push_back(offset);
        box.lengths.push_back(random() % 3 == 0 ? number(rest + 1) : rest);
      }
    }
    EXPECT_EQ(first_gap(whole, boxes), expected_gap(whole, boxes)) << "seed " << seed;
  }
}

TEST(Coverage, OfAnEmptyTensorIsCompleteAndWithoutBoxesHasOnlyGaps) {
  EXPECT_EQ(first_gap(Sizes{3, 0}, {}), std::nullopt);
  EXPECT_EQ(first_gap(Sizes{3, 2}, {}), (Sizes{0, 0}));
  EXPECT_EQ(first_gap(Sizes{}, {}), Sizes{});
}

TEST(Coverage, IsDecidedForBoxesThatDivideMoreThanSixDimensions) {
  std::vector<Box> boxes;
  for (std::int64_t corner = 0; corner < 256; ++corner) {
    Box& box = boxes.emplace_back();
    for (std::int64_t d = 0; d < 8; ++d) {
      box.offsets.push_back((corner >> d) & 1);
      box.lengths.push_back(1);
    }
  }
  EXPECT_EQ(first_gap(Sizes(8, 2), boxes), std::nullopt);
  boxes.pop_back();
  EXPECT_EQ(first_gap(Sizes(8, 2), boxes), Sizes(8, 1));
}

/// Two boxes for each row of a square: the left one is as long as the row's number.
std::vector<Box> staircase(std::int64_t rows) {
  std::vector<Box> boxes;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (row > 0) boxes.push_back({{row, 0}, {1, row}});
    boxes.push_back({{row, row}, {1, rows - row}});
  }
  return boxes;
}

TEST(Coverage, OfAStaircaseTakesTwoStepsPerBox) {
  for (const std::int64_t rows : {100, 10'000}) {
    const Sizes whole = {rows, rows};
    auto boxes = staircase(rows);
    EXPECT_EQ(first_gap(whole, boxes), std::nullopt);
    --boxes.back().lengths[1];
    const Coverage missing_last = coverage_of(whole, boxes);
    EXPECT_EQ(missing_last.first_gap, (Sizes{rows - 1, rows - 1}));
    EXPECT_LE(missing_last.steps, 2 * boxes.size());
    // The same boxes with rows and columns exchanged.
    for (Box& box : boxes) {
      std::ranges::reverse(box.offsets);
      std::ranges::reverse(box.lengths);
    }
    const Coverage turned = coverage_of(whole, boxes);
    EXPECT_EQ(turned.first_gap, (Sizes{rows - 1, rows - 1}));
    EXPECT_LE(turned.steps, 2 * boxes.size());
  }
}

TEST(Coverage, OfRowsThatLostOneBoxTakesOneStepPerBox) {
  constexpr std::int64_t kRows = 20'000;
  std::vector<Box> boxes;
  for (std::int64_t row = 0; row < kRows; ++row) {
    if (row != kRows - 2) boxes.push_back({{row, 0}, {1, 8}});
  }
  const Coverage coverage = coverage_of({kRows, 8}, boxes);
  EXPECT_EQ(coverage.first_gap, (Sizes{kRows - 2, 0}));
  EXPECT_LE(coverage.steps, boxes.size());
}

TEST(Coverage, OfAGridInThreeDimensionsNamesTheLostBox) {
  constexpr std::int64_t kSide = 24;
  std::vector<Box> boxes;
  for (std::int64_t n = 0; n < kSide * kSide * kSide - 1; ++n) {
    boxes.push_back({{n / kSide / kSide, n / kSide % kSide, n % kSide}, {1, 1, 1}});
  }
  EXPECT_EQ(first_gap(Sizes(3, kSide), boxes), Sizes(3, kSide - 1));
}

/// Boxes in three dimensions, of which each divides all others' slabs: no two begin or end at the
/// same place of the first dimension. Together with `last` they cover the tensor.
std::vector<Box> interleaved(std::int64_t count) {
  std::vector<Box> boxes;
  for (std::int64_t n = 0; n < count; ++n) {
    boxes.push_back({{0, n, 0}, {count + n, 1, 1}});
    boxes.push_back({{0, n, 1}, {count + n, 1, 1}});
    boxes.push_back({{count + n, n, 0}, {count - n, 1, 2}});
  }
  return boxes;
}

TEST(Coverage, EndsAtTheLimitWithoutTheFirstElement) {
  constexpr std::int64_t kCount = 4000;
  const Sizes whole = {2 * kCount, kCount, 2};
  auto boxes = interleaved(kCount);
  EXPECT_EQ(coverage_of(whole, boxes).state, State::complete);
  boxes.back().lengths[0] -= 1;
  Coverage coverage = coverage_of(whole, boxes);
  EXPECT_EQ(coverage.state, State::incomplete);
  EXPECT_EQ(coverage.first_gap, std::nullopt);
  EXPECT_EQ(describe(coverage, boxes.size()), "its 12000 shards do not cover the tensor");
  // A second copy of most elements: their number no longer shows that some are missing.
  boxes.push_back({{0, 0, 0}, {kCount, kCount, 2}});
  coverage = coverage_of(whole, boxes);
  EXPECT_EQ(coverage.state, State::undecided);
  EXPECT_EQ(describe(coverage, boxes.size()),
            "its 12001 shards overlap in too many ways to check that they cover the tensor");
}

TEST(Coverage, DescribesTheFirstElementRelativeToTheTensor) {
  const Coverage coverage = coverage_of({3, 2}, {{{0, 0}, {2, 2}}});
  EXPECT_EQ(describe(coverage, 1), "no shard covers the element at [2, 0]");
  EXPECT_EQ(describe(coverage, 1, Sizes{10, 5}), "no shard covers the element at [12, 5]");
  EXPECT_EQ(describe(coverage, 0), "the tensor has no shards");
}

TEST(Coverage, EndsWithTheErrorOfTheInterrupt) {
  constexpr std::int64_t kRows = 40'000;
  auto boxes = staircase(kRows);
  --boxes.back().lengths[1];
  int calls = 0;
  const auto interrupted = check_coverage(Sizes{kRows, kRows}, boxes, [&]() -> Result<> {
    return ++calls == 2 ? format_error(Errc::system, "interrupted") : Result<>();
  });
  EXPECT_EQ(calls, 2);
  ASSERT_FALSE(interrupted);
  EXPECT_TRUE(interrupted.error().detail == "interrupted");
}

TEST(Coverage, OfManySmallEntriesCanBeInterrupted) {
  index::MetadataDraft draft;
  for (std::uint32_t i = 0; i < 2 * kEntriesPerCheck; ++i) {
    draft.add_object(std::to_string(i), {});
    draft.add_shard({}, {});
  }
  std::string encoded;
  const auto metadata = index::MetadataEncoder(draft).encode({});
  for (const std::string_view piece : metadata.pieces()) encoded += piece;
  const auto index = index::CheckpointIndex::decode(test::bytes_of(encoded), "here");
  ASSERT_TRUE(test::ok(index));
  std::uint32_t checked = 0;
  std::uint32_t calls = 0;
  const auto check = [&]() -> Result<> {
    return ++calls == 2 ? format_error(Errc::system, "interrupted") : Result<>();
  };
  while (checked < index->entries().size() && check_coverage(*index, checked, check)) ++checked;
  EXPECT_EQ(checked, kEntriesPerCheck);
}

}  // namespace
}  // namespace torch_ckpt::planning
