#include "planning/box_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "support.h"

namespace torch_ckpt::planning {
namespace {

using namespace test;
using Sizes = std::vector<std::uint64_t>;

/// A box in a tensor, and the positions of its bytes in the tensor, found element by element.
struct Sample {
  Sizes sizes, offsets, lengths;
  std::uint64_t item_bytes = 1;

  std::vector<std::uint64_t> positions() const {
    std::vector<std::uint64_t> found;
    std::function<void(std::size_t, std::uint64_t)> walk = [&](std::size_t d, std::uint64_t at) {
      if (d == sizes.size()) {
        for (std::uint64_t b = 0; b < item_bytes; ++b) found.push_back(at * item_bytes + b);
        return;
      }
      for (std::uint64_t i = 0; i < lengths[d]; ++i) walk(d + 1, at * sizes[d] + offsets[d] + i);
    };
    walk(0, 0);
    return found;
  }
};

Sample random_box(Random& random) {
  Sample sample;
  sample.item_bytes = std::uint64_t{1} << random.between(0, 4);
  for (std::uint64_t d = random.between(0, 4); d > 0; --d) {
    sample.sizes.push_back(random.between(1, 6));
    sample.offsets.push_back(random.between(0, sample.sizes.back()));
    sample.lengths.push_back(random.between(0, sample.sizes.back() - sample.offsets.back()));
    if (random.coin()) {
      sample.offsets.back() = 0;
      sample.lengths.back() = sample.sizes.back();
    }
  }
  return sample;
}

std::vector<std::uint64_t> positions_of(const BoxRuns& runs, std::uint64_t from, std::uint64_t to) {
  std::vector<std::uint64_t> found;
  std::uint64_t next = from;
  runs.for_each(from, to, [&](std::uint64_t position, std::uint64_t packed, std::uint64_t bytes) {
    EXPECT_EQ(packed, next);
    EXPECT_GT(bytes, 0);
    EXPECT_LE(bytes, runs.run_bytes());
    next += bytes;
    for (std::uint64_t b = 0; b < bytes; ++b) found.push_back(position + b);
  });
  EXPECT_EQ(next, to);
  return found;
}

TEST(BoxRuns, HaveThePositionsOfTheElements) {
  Random random(1);
  for (int round = 0; round < 3000; ++round) {
    const Sample sample = random_box(random);
    const auto runs =
        BoxRuns::of(sample.sizes, sample.offsets, sample.lengths, sample.item_bytes).value();
    const auto expected = sample.positions();
    ASSERT_EQ(runs.bytes(), expected.size());
    ASSERT_EQ(runs.tensor_bytes(), std::accumulate(sample.sizes.begin(), sample.sizes.end(),
                                                   sample.item_bytes, std::multiplies<>()));
    ASSERT_EQ(positions_of(runs, 0, runs.bytes()), expected);
    if (expected.empty()) continue;
    EXPECT_EQ(runs.begin(), expected.front());
    EXPECT_EQ(runs.end(), expected.back() + 1);
    const std::uint64_t from = random.between(0, expected.size());
    const std::uint64_t to = random.between(from, expected.size());
    ASSERT_EQ(positions_of(runs, from, to),
              std::vector(expected.begin() + from, expected.begin() + to));
  }
}

TEST(BoxRuns, CountTheBytesBeforeAPosition) {
  Random random(2);
  for (int round = 0; round < 1000; ++round) {
    const Sample sample = random_box(random);
    const auto runs =
        BoxRuns::of(sample.sizes, sample.offsets, sample.lengths, sample.item_bytes).value();
    const auto positions = sample.positions();
    for (std::uint64_t position = 0; position <= runs.tensor_bytes() + 1; ++position) {
      const auto before = std::ranges::lower_bound(positions, position) - positions.begin();
      ASSERT_EQ(runs.bytes_before(position), before);
    }
  }
}

TEST(BoxRuns, OfEntireRowsAreOneRun) {
  const auto runs = BoxRuns::of(Sizes{8, 3, 5}, Sizes{2, 0, 0}, Sizes{4, 3, 5}, 2).value();
  EXPECT_EQ(runs.run_bytes(), 4 * 3 * 5 * 2);
  EXPECT_EQ(runs.begin(), 2 * 3 * 5 * 2);
}

TEST(BoxRuns, OfABoxOutsideTheTensorDoNotExist) {
  EXPECT_FALSE(BoxRuns::of(Sizes{4}, Sizes{2}, Sizes{3}, 1));
  EXPECT_FALSE(BoxRuns::of(Sizes{4}, Sizes{5}, Sizes{0}, 1));
  EXPECT_FALSE(BoxRuns::of(Sizes{4, 4}, Sizes{0}, Sizes{4}, 1));
}

TEST(BoxRuns, OfATensorWhoseSizeOverflowsDoNotExist) {
  const std::uint64_t large = std::uint64_t{1} << 40;
  EXPECT_FALSE(BoxRuns::of(Sizes{large, large}, Sizes{0, 0}, Sizes{1, 1}, 8));
}

}  // namespace
}  // namespace torch_ckpt::planning
