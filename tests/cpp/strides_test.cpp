#include "planning/strides.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace torch_ckpt::planning {
namespace {

using Numbers = std::vector<std::int64_t>;

/// Answers of torch 2.15 about a tensor.
struct Sample {
  Numbers sizes, strides;
  bool is_contiguous;
  bool is_dense;
  bool is_repeated;
  Numbers of_clone;  // the strides of tensor.clone()
};

const std::vector<Sample> kSamples = {
    {{2, 3}, {3, 1}, true, true, false, {3, 1}},
    {{3, 2}, {1, 3}, false, true, false, {1, 3}},
    {{2, 3, 4}, {1, 2, 6}, false, true, false, {1, 2, 6}},
    {{4, 3}, {8, 2}, false, false, false, {3, 1}},
    {{3, 4}, {0, 1}, false, false, true, {4, 1}},
    {{2, 3, 4}, {12, 1, 3}, false, true, false, {12, 1, 3}},
    {{2, 1, 3}, {1, 7, 2}, false, true, false, {1, 7, 2}},
    {{3, 2, 2}, {4, 0, 1}, false, false, true, {4, 2, 1}},
    {{2, 2}, {1, 1}, false, false, false, {2, 1}},
    {{5}, {0}, false, false, true, {1}},
    {{2, 0, 3}, {9, 9, 9}, true, true, false, {9, 9, 9}},
    {{}, {}, true, true, false, {}},
    {{2, 3, 2}, {1, 0, 2}, false, false, true, {1, 2, 6}},
    {{3, 3}, {1, 2}, false, false, false, {1, 3}},
    {{3, 2, 4}, {1, 12, 3}, false, true, false, {1, 12, 3}},
};

TEST(Strides, AreJudgedAsByTorch) {
  for (const Sample& sample : kSamples) {
    SCOPED_TRACE(::testing::PrintToString(sample.sizes) + " with strides " +
                 ::testing::PrintToString(sample.strides));
    EXPECT_EQ(is_contiguous(sample.sizes, sample.strides), sample.is_contiguous);
    EXPECT_EQ(is_dense(sample.sizes, sample.strides), sample.is_dense);
    EXPECT_EQ(is_repeated(sample.sizes, sample.strides), sample.is_repeated);
  }
}

TEST(Strides, OfAGappedTensorBecomeThoseOfItsClone) {
  for (const Sample& sample : kSamples) {
    if (sample.is_dense) continue;  // a clone keeps the strides
    EXPECT_EQ(dense_strides(sample.sizes, sample.strides), sample.of_clone)
        << ::testing::PrintToString(sample.sizes) << " with strides "
        << ::testing::PrintToString(sample.strides);
  }
}

TEST(Strides, OfARowMajorTensorAreTheProductsOfTheInnerSizes) {
  EXPECT_EQ(row_major_strides(Numbers{2, 3, 4}), (Numbers{12, 4, 1}));
  EXPECT_EQ(row_major_strides(Numbers{}), Numbers{});
  // As torch.empty(2, 0, 3).stride().
  EXPECT_EQ(row_major_strides(Numbers{2, 0, 3}), (Numbers{3, 3, 1}));
}

}  // namespace
}  // namespace torch_ckpt::planning
