#include "planning/region.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "support.h"

namespace torch_ckpt::planning {

// For GoogleTest's messages.
static std::ostream& operator<<(std::ostream& out, const ByteRange& range) {
  return out << "[" << range.begin << ", " << range.end << ")";
}

namespace {

using test::Random;

using Dims = std::vector<std::uint64_t>;
using Steps = std::vector<std::int64_t>;
using Ranges = std::vector<ByteRange>;
constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
constexpr ByteRange kAll{0, kMax};

Steps row_major(const Dims& lengths) {
  Steps strides(lengths.size());
  std::int64_t stride = 1;
  for (std::size_t d = lengths.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= static_cast<std::int64_t>(std::max<std::uint64_t>(lengths[d], 1));
  }
  return strides;
}

// A box of items of four bytes, row-major in the payload and in the target.
std::optional<Region> box(const Dims& sizes, const Dims& offsets, const Dims& lengths) {
  return Region::of_box(sizes, {}, offsets, lengths, row_major(lengths), 4, 4);
}

/// The position of one element in the payload and in the target, in bytes.
struct Element {
  std::uint64_t stored = 0;
  std::int64_t target = 0;

  auto operator<=>(const Element&) const = default;
};
using Elements = std::vector<Element>;

std::ostream& operator<<(std::ostream& out, const Element& element) {
  return out << element.stored << "->" << element.target;
}

/// The elements of a region, one by one and in its order.
Elements elements_of(const Region& region, const ByteRange& window = kAll) {
  Elements found;
  region.for_each_run(window, [&](const Region::Run& run) {
    for (std::uint64_t i = 0; i < run.count; ++i) {
      found.push_back({run.stored + i * run.stored_stride,
                       run.target + static_cast<std::int64_t>(i) * run.target_stride});
    }
  });
  return found;
}

/// A box whose elements are listed one by one.
struct Case {
  Dims sizes;
  Dims stored_strides;  // empty: row-major
  Dims offsets;
  Dims lengths;
  Steps target_strides;
  std::size_t item = 1;
  std::size_t target_item = 1;

  std::optional<Region> region() const {
    return Region::of_box(sizes, stored_strides, offsets, lengths, target_strides, item,
                          target_item);
  }

  /// The elements by counting, in ascending order.
  Elements elements() const {
    Elements all;
    Dims strides = stored_strides;
    if (strides.empty()) {
      const Steps dense = row_major(sizes);
      strides.assign(dense.begin(), dense.end());
    }
    const std::uint64_t total =
        std::accumulate(lengths.begin(), lengths.end(), std::uint64_t{1}, std::multiplies<>());
    for (std::uint64_t number = 0; number < total; ++number) {
      std::uint64_t rest = number;
      Element element;
      for (std::size_t d = 0; d < sizes.size(); ++d) {
        const std::uint64_t at = rest % lengths[d];
        rest /= lengths[d];
        element.stored += (offsets[d] + at) * strides[d] * item;
        element.target += static_cast<std::int64_t>(at) * target_strides[d] *
                          static_cast<std::int64_t>(target_item);
      }
      all.push_back(element);
    }
    std::sort(all.begin(), all.end());
    return all;
  }
};

Ranges ranges_of(const Elements& elements, std::size_t item) {
  Ranges ranges;
  for (const Element& element : elements) {
    ranges.push_back({element.stored, element.stored + item});
  }
  return ranges;
}

/// Strides for dimensions in any order, with or without gaps.
template <class Strides>
Strides any_strides(Random& random, const Dims& extents, bool padded) {
  std::vector<std::size_t> order(extents.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (random.coin()) {
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[random.between(0, i - 1)]);
    }
  }
  Strides strides(extents.size());
  std::uint64_t stride = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    if (padded) stride += random.between(0, 3);
    strides[order[i]] = stride;
    stride *= std::max<std::uint64_t>(extents[order[i]], 1);
  }
  return strides;
}

Case any_case(Random& random, bool dense_stored) {
  Case c;
  c.sizes.resize(random.between(0, 5));
  for (std::uint64_t& size : c.sizes) {
    size = random.between(1, 5);
    const bool whole = random.coin();
    c.offsets.push_back(whole ? 0 : random.between(0, size - 1));
    c.lengths.push_back(whole ? size : random.between(1, size - c.offsets.back()));
  }
  if (random.coin()) c.stored_strides = any_strides<Dims>(random, c.sizes, !dense_stored);
  c.target_strides = any_strides<Steps>(random, c.lengths, random.coin());
  c.item = std::size_t{1} << random.between(0, 4);
  c.target_item = random.coin() ? c.item : std::size_t{1} << random.between(0, 4);
  return c;
}

// --- what a box is -------------------------------------------------------------------------------

TEST(Region, BytesAreOneRun) {
  const Region region = Region::of_bytes(100, 7);
  EXPECT_EQ(region.bytes(), 7);
  EXPECT_EQ(region.covering(), (ByteRange{100, 107}));
  EXPECT_TRUE(region.is_one_run());
  const Elements found = elements_of(region);
  ASSERT_EQ(found.size(), 7);
  EXPECT_EQ(found[3], (Element{103, 3}));
}

TEST(Region, AScalarIsOneElement) {
  const Region region = box({}, {}, {}).value();
  EXPECT_EQ(region.elements(), 1);
  EXPECT_EQ(region.covering(), (ByteRange{0, 4}));
  EXPECT_TRUE(region.is_one_run());
  EXPECT_EQ(elements_of(region), (Elements{{0, 0}}));
}

TEST(Region, RowsOfAMatrixAreOneRun) {
  const Region region = box({5, 4}, {2, 0}, {2, 4}).value();
  EXPECT_TRUE(region.is_one_run());
  EXPECT_EQ(region.covering(), (ByteRange{32, 64}));
}

TEST(Region, PartOfOneRowIsOneRun) {
  const Region region = box({5, 4}, {3, 1}, {1, 2}).value();
  EXPECT_TRUE(region.is_one_run());
  EXPECT_EQ(region.covering(), (ByteRange{52, 60}));
}

TEST(Region, ColumnsOfAMatrixAreARunForEachRow) {
  const Region region = box({5, 4}, {0, 1}, {5, 2}).value();
  EXPECT_FALSE(region.is_one_run());
  EXPECT_EQ(region.bytes(), 40);
  EXPECT_EQ(region.covering(), (ByteRange{4, 76}));
  std::vector<std::uint64_t> begins;
  region.for_each_run(kAll, [&](const Region::Run& run) {
    begins.push_back(run.stored);
    EXPECT_EQ(run.count, 2);
    EXPECT_EQ(run.stored_stride, 4);
    EXPECT_EQ(run.target_stride, 4);
  });
  EXPECT_EQ(begins, (Dims{4, 20, 36, 52, 68}));
}

TEST(Region, AColumnIsOneRunOfStridedElements) {
  const Region region = box({5, 4}, {0, 1}, {5, 1}).value();
  EXPECT_FALSE(region.is_one_run());
  int runs = 0;
  region.for_each_run(kAll, [&](const Region::Run& run) {
    ++runs;
    EXPECT_EQ(run.count, 5);
    EXPECT_EQ(run.stored_stride, 16);
    EXPECT_EQ(run.target_stride, 4);
  });
  EXPECT_EQ(runs, 1);
}

TEST(Region, OuterDimensionsOfLengthOneMayBeNarrowedToo) {
  const Region region = box({4, 5, 6}, {2, 1, 0}, {1, 3, 6}).value();
  EXPECT_TRUE(region.is_one_run());
  EXPECT_EQ(region.covering(), (ByteRange{264, 336}));
}

TEST(Region, IsNotOneRunIfTheTargetsItemsHaveAnotherSize) {
  const Region region = Region::of_box(Dims{4}, {}, Dims{0}, Dims{4}, Steps{1}, 4, 2).value();
  EXPECT_FALSE(region.is_one_run());
  EXPECT_EQ(elements_of(region), (Elements{{0, 0}, {4, 2}, {8, 4}, {12, 6}}));
}

TEST(Region, IsOneRunIfPayloadAndTargetAreBothTransposed) {
  // Payload and target are both column by column.
  const auto region =
      Region::of_box(Dims{3, 5}, Dims{1, 3}, Dims{0, 0}, Dims{3, 5}, Steps{1, 3}, 2, 2);
  ASSERT_TRUE(region.has_value());
  EXPECT_TRUE(region->is_one_run());
}

TEST(Region, IsNotOneRunIfTheTargetHasGapsBetweenRows) {
  const Region region =
      Region::of_box(Dims{3, 5}, {}, Dims{0, 0}, Dims{3, 5}, Steps{6, 1}, 2, 2).value();
  EXPECT_FALSE(region.is_one_run());
}

TEST(Region, IsNotOneRunIfTheTargetRunsBackwards) {
  const Region region = Region::of_box(Dims{3}, {}, Dims{0}, Dims{3}, Steps{-1}, 2, 2).value();
  EXPECT_FALSE(region.is_one_run());
  EXPECT_EQ(elements_of(region), (Elements{{0, 0}, {2, -2}, {4, -4}}));
}

class EmptyBox : public ::testing::TestWithParam<Case> {};

TEST_P(EmptyBox, HasNoBytesAndNoRuns) {
  const Region region = GetParam().region().value();
  EXPECT_EQ(region.bytes(), 0);
  EXPECT_EQ(region.covering().bytes(), 0);
  EXPECT_TRUE(region.ranges(100, 100).empty());
  EXPECT_TRUE(elements_of(region).empty());
  EXPECT_TRUE(region.is_one_run());
}

INSTANTIATE_TEST_SUITE_P(Cases, EmptyBox,
                         ::testing::Values(Case{{5, 4}, {}, {5, 0}, {0, 4}, {4, 1}, 4, 4},
                                           Case{{5, 4}, {}, {0, 2}, {5, 0}, {1, 1}, 4, 2},
                                           Case{{5, 0}, {}, {0, 0}, {5, 0}, {1, 1}, 4, 4},
                                           Case{{5, 4}, {0, 0}, {1, 1}, {0, 0}, {1, 1}, 4, 4},
                                           Case{{0}, {}, {0}, {0}, {1}, 1, 1}));

TEST(Region, OfNoBytesHasNoRuns) {
  const Region region = Region::of_bytes(10, 0);
  EXPECT_TRUE(elements_of(region).empty());
  EXPECT_TRUE(region.ranges(0, 1).empty());
  EXPECT_EQ(region.covering().bytes(), 0);
}

TEST(Region, IsEmptyByDefault) {
  EXPECT_EQ(Region().bytes(), 0);
  EXPECT_TRUE(elements_of(Region()).empty());
  EXPECT_TRUE(Region().ranges(0, 1).empty());
  EXPECT_EQ(Region().covering().bytes(), 0);
}

// --- what is refused -----------------------------------------------------------------------------

TEST(Region, RejectsABoxOutsideTheTensor) {
  EXPECT_FALSE(box({5}, {3}, {3}).has_value());
  EXPECT_FALSE(box({5}, {kMax}, {2}).has_value());
  EXPECT_FALSE(box({5}, {2}, {kMax}).has_value());
}

TEST(Region, RejectsDimensionsThatDoNotMatch) {
  EXPECT_FALSE(box_inside(Dims{5, 5}, Dims{0}, Dims{1, 1}));
  EXPECT_FALSE(box_inside(Dims{5, 5}, Dims{0, 0}, Dims{1}));
  EXPECT_TRUE(box_inside(Dims{5, 5}, Dims{0, 5}, Dims{5, 0}));
  EXPECT_FALSE(Region::of_box(Dims{5}, {}, Dims{0}, Dims{5}, Steps{}, 4, 4).has_value());
  EXPECT_FALSE(Region::of_box(Dims{5}, {}, Dims{0}, Dims{5}, Steps{1, 1}, 4, 4).has_value());
}

TEST(Region, RejectsATensorWhoseSizeOverflows) {
  EXPECT_FALSE(box({kMax, kMax}, {0, 0}, {kMax, kMax}).has_value());
  EXPECT_FALSE(box({kMax / 4 + 1}, {0}, {1}).has_value());
  EXPECT_FALSE(box({kMax / 8, 3}, {0, 0}, {1, 1}).has_value());
}

TEST(Region, RejectsStoredStridesThatOverflow) {
  const Dims none{0};
  const Steps one{1};
  // In turn a stride, an offset, an extent, and the sum of begin and extent do not fit into 64
  // bits.
  EXPECT_FALSE(Region::of_box(Dims{2}, Dims{kMax / 2}, none, Dims{2}, one, 4, 4).has_value());
  EXPECT_FALSE(Region::of_box(Dims{9}, Dims{kMax / 16}, Dims{8}, Dims{1}, one, 4, 4).has_value());
  EXPECT_FALSE(Region::of_box(Dims{9}, Dims{kMax / 16}, none, Dims{9}, one, 4, 4).has_value());
  EXPECT_FALSE(Region::of_box(Dims{9}, Dims{kMax / 31}, Dims{7}, Dims{2}, one, 4, 4).has_value());
}

TEST(Region, RejectsStoredElementsThatOverlap) {
  const Steps target{4, 1};
  for (const Dims& strides : {Dims{0, 1}, Dims{3, 1}, Dims{1, 1}, Dims{4, 0}, Dims{0, 0}}) {
    EXPECT_FALSE(
        Region::of_box(Dims{2, 4}, strides, Dims{0, 0}, Dims{2, 4}, target, 4, 4).has_value())
        << strides[0] << ", " << strides[1];
  }
}

TEST(Region, AllowsOverlapOutsideTheBox) {
  // Two of four columns, with a row stride of three.
  const auto region =
      Region::of_box(Dims{2, 4}, Dims{3, 1}, Dims{0, 0}, Dims{2, 2}, Steps{2, 1}, 4, 4);
  ASSERT_TRUE(region.has_value());
  EXPECT_EQ(elements_of(*region), (Elements{{0, 0}, {4, 4}, {12, 8}, {16, 12}}));
}

// --- against counting one by one -----------------------------------------------------------------

TEST(Region, ContainsExactlyTheElementsOfTheBoxInAscendingOrder) {
  Random random(1);
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const Case c = any_case(random, random.coin());
    const Region region = c.region().value();
    const Elements expected = c.elements();
    ASSERT_EQ(elements_of(region), expected);
    ASSERT_EQ(region.elements(), expected.size());
    ASSERT_EQ(region.bytes(), expected.size() * c.item);
    ASSERT_EQ(region.covering(),
              (ByteRange{expected.front().stored, expected.back().stored + c.item}));
    ASSERT_EQ(region.item_bytes(), c.item);
    ASSERT_EQ(region.target_item_bytes(), c.target_item);
  }
}

TEST(Region, IsOneRunIfAndOnlyIfPayloadAndTargetAreContiguous) {
  Random random(2);
  int runs = 0;
  for (int round = 0; round < 5000; ++round) {
    const Case c = any_case(random, true);
    const Region region = c.region().value();
    const Elements elements = c.elements();
    bool in_step = c.item == c.target_item;
    for (std::size_t i = 0; i < elements.size() && in_step; ++i) {
      in_step = elements[i].target == static_cast<std::int64_t>(i * c.item) &&
                elements[i].stored == elements[0].stored + i * c.item;
    }
    ASSERT_EQ(region.is_one_run(), in_step) << "round " << round;
    runs += in_step ? 1 : 0;
  }
  EXPECT_GT(runs, 300);
}

TEST(Region, AnyWindowContainsItsElements) {
  Random random(3);
  for (int round = 0; round < 2000; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const Case c = any_case(random, random.coin());
    const Region region = c.region().value();
    const Elements all = c.elements();
    const std::uint64_t last = all.back().stored / c.item + 3;
    for (int i = 0; i < 5; ++i) {
      const std::uint64_t begin = random.between(0, last);
      const std::uint64_t end = random.between(begin, last);
      Elements expected;
      for (const Element& element : all) {
        const std::uint64_t at = element.stored / c.item;
        if (at >= begin && at < end) expected.push_back(element);
      }
      ASSERT_EQ(elements_of(region, {begin * c.item, end * c.item}), expected)
          << "window " << begin << " to " << end << " of items";
    }
  }
}

TEST(Region, ConsecutiveWindowsContainEachElementOnce) {
  Random random(4);
  for (int round = 0; round < 1000; ++round) {
    const Case c = any_case(random, random.coin());
    const Region region = c.region().value();
    Elements found;
    for (std::uint64_t at = 0; at < region.covering().end;) {
      const std::uint64_t end = at + random.between(1, 20) * c.item;
      const Elements part = elements_of(region, {at, end});
      found.insert(found.end(), part.begin(), part.end());
      at = end;
    }
    ASSERT_EQ(found, c.elements()) << "round " << round;
  }
}

// --- ranges --------------------------------------------------------------------------------------

TEST(Region, RangesAreRowsOfColumnsIfGapsAreLarge) {
  const Region region = box({3, 4}, {0, 1}, {3, 2}).value();
  EXPECT_EQ(region.ranges(7, 100), (Ranges{{4, 12}, {20, 28}, {36, 44}}));
}

TEST(Region, RangesSpanGapsOfTheGivenSize) {
  const Region region = box({3, 4}, {0, 1}, {3, 2}).value();
  EXPECT_EQ(region.ranges(8, 100), (Ranges{{4, 44}}));
}

TEST(Region, MoreRangesThanAllowedBecomeFewerLargerOnes) {
  // Four planes of three rows, of which two columns are requested.
  const Region region = box({4, 5, 4}, {0, 1, 1}, {4, 3, 2}).value();
  EXPECT_EQ(region.ranges(0, 12).size(), 12);
  EXPECT_EQ(region.ranges(0, 11), (Ranges{{20, 60}, {100, 140}, {180, 220}, {260, 300}}));
  EXPECT_EQ(region.ranges(0, 4).size(), 4);
  EXPECT_EQ(region.ranges(0, 3), (Ranges{{20, 300}}));
  EXPECT_EQ(region.ranges(0, 1), (Ranges{{20, 300}}));
}

TEST(Region, RangesAreTheElementsMergedOverGaps) {
  Random random(5);
  for (int round = 0; round < 3000; ++round) {
    const Case c = any_case(random, true);
    const Region region = c.region().value();
    const std::uint64_t gap = random.any_scale(2000);
    ASSERT_EQ(region.ranges(gap, 1 << 20), coalesce(ranges_of(c.elements(), c.item), gap))
        << "round " << round << ", gap " << gap;
  }
}

TEST(Region, RangesOfAnyStridesAreTheMergedElements) {
  Random random(6);
  for (int round = 0; round < 3000; ++round) {
    const Case c = any_case(random, false);
    const Region region = c.region().value();
    const std::uint64_t gap = random.any_scale(2000);
    // Without gaps, each range contains only requested bytes, and neighbours do not touch.
    const Ranges exact = region.ranges(0, 1 << 20);
    for (std::size_t i = 1; i < exact.size(); ++i) ASSERT_GE(exact[i].begin, exact[i - 1].end);
    ASSERT_EQ(coalesce(exact, 0), coalesce(ranges_of(c.elements(), c.item), 0)) << round;
    ASSERT_EQ(coalesce(region.ranges(gap, 1 << 20), gap),
              coalesce(ranges_of(c.elements(), c.item), gap))
        << "round " << round << ", gap " << gap;
  }
}

TEST(Region, FewerRangesStillContainAllElements) {
  Random random(7);
  for (int round = 0; round < 2000; ++round) {
    const Case c = any_case(random, random.coin());
    const Region region = c.region().value();
    const std::size_t most = random.between(1, 20);
    const Ranges ranges = region.ranges(random.any_scale(50), most);
    ASSERT_LE(ranges.size(), most) << "round " << round;
    ASSERT_EQ(ranges.front().begin, region.covering().begin);
    ASSERT_EQ(ranges.back().end, region.covering().end);
    for (const Element& element : c.elements()) {
      ASSERT_TRUE(std::any_of(ranges.begin(), ranges.end(),
                              [&](const ByteRange& range) {
                                return element.stored >= range.begin &&
                                       element.stored + c.item <= range.end;
                              }))
          << "round " << round << ", byte " << element.stored;
    }
  }
}

TEST(Coalesce, MergesRangesThatTouchOverlapOrLieWithinTheGap) {
  EXPECT_EQ(coalesce({{30, 40}, {0, 10}, {10, 12}, {5, 8}, {14, 20}}, 2),
            (Ranges{{0, 20}, {30, 40}}));
}

TEST(Coalesce, KeepsLargerGaps) { EXPECT_EQ(coalesce({{0, 1}, {4, 5}}, 2).size(), 2); }

TEST(Coalesce, DropsEmptyRanges) {
  EXPECT_EQ(coalesce({{3, 3}, {7, 8}, {100, 100}}, 0), (Ranges{{7, 8}}));
  EXPECT_TRUE(coalesce({}, 10).empty());
}

TEST(Coalesce, ARangeWithinAnotherDoesNotShortenIt) {
  EXPECT_EQ(coalesce({{0, 100}, {10, 20}, {120, 130}}, 0), (Ranges{{0, 100}, {120, 130}}));
}

TEST(Coalesce, DoesNotOverflowWithTheLargestGap) {
  EXPECT_EQ(coalesce({{0, 1}, {kMax - 1, kMax}}, kMax), (Ranges{{0, kMax}}));
}

}  // namespace
}  // namespace torch_ckpt::planning
