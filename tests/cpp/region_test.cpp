#include "planning/region.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "support.h"

namespace torch_ckpt::planning {
namespace {

using Dims = std::vector<std::uint64_t>;
constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

struct Expected {
  std::uint64_t begin;
  std::uint64_t count;
};

void expect_run(const Dims& sizes, const Dims& offsets, const Dims& lengths, Expected expected) {
  const auto run = contiguous_run(sizes, offsets, lengths);
  ASSERT_TRUE(run.has_value());
  EXPECT_EQ(run->begin, expected.begin);
  EXPECT_EQ(run->count, expected.count);
}

// The row-major numbers of the box's elements, in order.
Dims elements(const Dims& sizes, const Dims& offsets, const Dims& lengths) {
  Dims found;
  std::uint64_t total = 1;
  for (const std::uint64_t size : sizes) total *= size;
  for (std::uint64_t number = 0; number < total; ++number) {
    std::uint64_t rest = number;
    bool in_box = true;
    for (std::size_t d = sizes.size(); d-- > 0;) {
      const std::uint64_t at = rest % sizes[d];
      rest /= sizes[d];
      in_box = in_box && at >= offsets[d] && at - offsets[d] < lengths[d];
    }
    if (in_box) found.push_back(number);
  }
  return found;
}

TEST(Region, AWholeTensorIsOneRun) { expect_run({3, 4}, {0, 0}, {3, 4}, {0, 12}); }

TEST(Region, AScalarIsARunOfOne) { expect_run({}, {}, {}, {0, 1}); }

TEST(Region, RowsOfAMatrixAreOneRun) { expect_run({5, 4}, {2, 0}, {2, 4}, {8, 8}); }

TEST(Region, PartOfOneRowIsOneRun) { expect_run({5, 4}, {3, 1}, {1, 2}, {13, 2}); }

TEST(Region, ColumnsOfAMatrixAreNotOneRun) {
  EXPECT_FALSE(contiguous_run(Dims{5, 4}, Dims{0, 1}, Dims{5, 2}).has_value());
}

TEST(Region, OuterDimensionsOfLengthOneMayBeNarrowedToo) {
  expect_run({4, 5, 6}, {2, 1, 0}, {1, 3, 6}, {66, 18});
}

TEST(Region, AnEmptyBoxIsAnEmptyRun) { expect_run({5, 4}, {5, 0}, {0, 4}, {0, 0}); }

TEST(Region, ABoxThatReachesOutsideIsNoRun) {
  EXPECT_FALSE(contiguous_run(Dims{5}, Dims{3}, Dims{3}).has_value());
  EXPECT_FALSE(contiguous_run(Dims{5}, Dims{kMax}, Dims{2}).has_value());
  EXPECT_FALSE(contiguous_run(Dims{5}, Dims{2}, Dims{kMax}).has_value());
}

TEST(Region, DimensionsThatDoNotMatchAreOutside) {
  EXPECT_FALSE(box_inside(Dims{5, 5}, Dims{0}, Dims{1, 1}));
  EXPECT_FALSE(box_inside(Dims{5, 5}, Dims{0, 0}, Dims{1}));
  EXPECT_TRUE(box_inside(Dims{5, 5}, Dims{0, 5}, Dims{5, 0}));
}

TEST(Region, ATensorTooLargeToCountIsNoRun) {
  EXPECT_FALSE(contiguous_run(Dims{kMax, kMax}, Dims{0, 0}, Dims{kMax, kMax}).has_value());
}

TEST(Region, ARunIsExactlyTheElementsOfTheBox) {
  test::Random random(1);
  SCOPED_TRACE(random.seed_text());
  int runs = 0;
  for (int round = 0; round < 3000; ++round) {
    Dims sizes(random.between(0, 4));
    Dims offsets;
    Dims lengths;
    for (std::uint64_t& size : sizes) {
      size = random.between(1, 4);
      offsets.push_back(random.between(0, size - 1));
      lengths.push_back(random.between(1, size - offsets.back()));
    }
    const Dims expected = elements(sizes, offsets, lengths);
    const bool is_one_run = expected.back() - expected.front() + 1 == expected.size();
    const auto run = contiguous_run(sizes, offsets, lengths);
    ASSERT_EQ(run.has_value(), is_one_run) << "round " << round;
    if (!run) continue;
    ++runs;
    ASSERT_EQ(run->begin, expected.front()) << "round " << round;
    ASSERT_EQ(run->count, expected.size()) << "round " << round;
  }
  EXPECT_GT(runs, 500);
}

}  // namespace
}  // namespace torch_ckpt::planning
