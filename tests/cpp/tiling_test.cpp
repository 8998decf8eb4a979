#include "planning/tiling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

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

TEST(FindGap, ReturnsTheFirstElementThatNoBoxContains) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    std::mt19937_64 random(seed);
    Sizes whole(random() % 4);
    for (auto& size : whole) size = static_cast<std::int64_t>(1 + random() % 5);
    auto boxes = random_tiles(whole.empty() ? Sizes{1} : whole, random() % 8, random);
    if (whole.empty()) boxes.assign(1 + random() % 2, Box());
    EXPECT_EQ(first_gap(whole, boxes), std::nullopt) << "seed " << seed;
    if (whole.empty()) continue;
    // Boxes that overlap, and empty ones, change nothing.
    boxes.push_back(boxes[random() % boxes.size()]);
    boxes.push_back(boxes.back());
    boxes.back().lengths[random() % whole.size()] = 0;
    EXPECT_EQ(first_gap(whole, boxes), std::nullopt) << "seed " << seed;
    boxes[random() % boxes.size()] = boxes.back();
    const auto counts = counted(whole, boxes);
    const auto missing = std::ranges::find(counts, 0);
    std::optional<Sizes> expected;
    if (missing != counts.end()) {
      auto rest = static_cast<std::int64_t>(missing - counts.begin());
      expected.emplace(whole.size());
      for (std::size_t d = whole.size(); d-- > 0; rest /= whole[d])
        (*expected)[d] = rest % whole[d];
    }
    EXPECT_EQ(first_gap(whole, boxes), expected) << "seed " << seed;
  }
}

TEST(FindGap, AnEmptyTensorHasNoneAndATensorWithoutBoxesOnlyGaps) {
  EXPECT_EQ(first_gap(Sizes{3, 0}, {}), std::nullopt);
  EXPECT_EQ(first_gap(Sizes{3, 2}, {}), (Sizes{0, 0}));
  EXPECT_EQ(first_gap(Sizes{}, {}), Sizes{});
}

TEST(FindGap, DecidesForBoxesThatDivideMoreThanSixDimensions) {
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

}  // namespace
}  // namespace torch_ckpt::planning
