#include "checked_math.h"

#include <gtest/gtest.h>

#include <limits>

namespace torch_ckpt {
namespace {

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

TEST(CheckedMath, ARangeIsInsideUpToItsLastByte) {
  EXPECT_TRUE(inside(0, 10, 10));
  EXPECT_TRUE(inside(9, 1, 10));
  EXPECT_FALSE(inside(9, 2, 10));
  EXPECT_FALSE(inside(11, 0, 10));
}

TEST(CheckedMath, AnEmptyRangeIsInsideEvenAtTheEnd) {
  EXPECT_TRUE(inside(10, 0, 10));
  EXPECT_TRUE(inside(0, 0, 0));
}

TEST(CheckedMath, ARangeWhoseEndOverflowsIsNotInside) {
  EXPECT_FALSE(inside(8, kMax, 10));
  EXPECT_FALSE(inside(kMax, 2, kMax));
  EXPECT_TRUE(inside(kMax - 1, 1, kMax));
}

TEST(CheckedMath, SumsAndProductsThatOverflowAreNullopt) {
  EXPECT_EQ(checked_add(kMax, 0), kMax);
  EXPECT_EQ(checked_add(kMax, 1), std::nullopt);
  EXPECT_EQ(checked_mul(kMax, 1), kMax);
  EXPECT_EQ(checked_mul(std::uint64_t{1} << 32, std::uint64_t{1} << 32), std::nullopt);
  EXPECT_EQ(checked_mul(kMax, 0), 0);
}

TEST(CheckedMath, AligningRoundsUpAndKeepsMultiples) {
  EXPECT_EQ(align_down(4095, 4096), 0);
  EXPECT_EQ(align_down(4096, 4096), 4096);
  EXPECT_EQ(align_up(0, 4096), 0);
  EXPECT_EQ(align_up(1, 4096), 4096);
  EXPECT_EQ(align_up(4096, 4096), 4096);
  EXPECT_EQ(align_up(4097, 64), 4160);
}

}  // namespace
}  // namespace torch_ckpt
