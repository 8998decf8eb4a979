#include "format/convert.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support.h"

namespace torch_ckpt::format {
namespace {

using test::Random;

constexpr std::array kNames = {"float64", "float32", "float16", "bfloat16"};
constexpr std::size_t kAllOfTwoBytes = 0x1'0000;

// Reference implementation of a 16-bit dtype. It computes with values, not with bits.
struct TwoBytes {
  const char* name;
  int mantissa_bits;
  int exponent_bits;

  int least_exponent() const { return 2 - (1 << (exponent_bits - 1)); }
  int largest_exponent() const { return 1 - least_exponent(); }

  double value(std::uint16_t bits) const {
    const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    double value = std::ldexp(mantissa, least_exponent() - mantissa_bits);
    if (exponent == (1 << exponent_bits) - 1) {
      value = mantissa == 0 ? INFINITY : NAN;
    } else if (exponent != 0) {
      value = std::ldexp(mantissa + (1 << mantissa_bits),
                         exponent - 1 + least_exponent() - mantissa_bits);
    }
    return bits >> 15 == 0 ? value : -value;
  }

  double rounded(float exact) const {
    if (exact == 0 || !std::isfinite(exact)) return exact;
    const int last_bit = std::max(std::ilogb(exact), least_exponent()) - mantissa_bits;
    const double value = std::ldexp(std::nearbyint(std::ldexp(exact, -last_bit)), last_bit);
    const bool fits = std::fabs(value) < std::ldexp(1, largest_exponent() + 1);
    return fits ? value : std::copysign(INFINITY, value);
  }
};

constexpr TwoBytes kHalf = {"float16", 10, 5};
constexpr TwoBytes kBFloat = {"bfloat16", 7, 8};

struct Way {
  const char* name;
  Conversion (*find)(const Dtype&, const Dtype&);
};
std::ostream& operator<<(std::ostream& out, const Way& way) { return out << way.name; }

Conversion conversion(const Way& way, std::string_view from, std::string_view to) {
  return way.find(*find_dtype(from), *find_dtype(to));
}

class ConvertWays : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (conversion(GetParam(), "float32", "float16") == nullptr) {
      GTEST_SKIP() << "this processor has no AVX2 or no F16C";
    }
  }

  template <class To, class From>
  std::vector<To> converted(std::string_view from, std::string_view to,
                            const std::vector<From>& in) {
    std::vector<To> out(in.size());
    conversion(GetParam(), from, to)(std::as_writable_bytes(std::span(out)).data(),
                                     std::as_bytes(std::span(in)).data(), in.size());
    return out;
  }

  void expect_rounded(const TwoBytes& to, const std::vector<float>& in);
};

INSTANTIATE_TEST_SUITE_P(AllWays, ConvertWays,
                         ::testing::Values(Way{"scalar", internal::find_scalar_conversion},
                                           Way{"vector", internal::find_vector_conversion},
                                           Way{"chosen", find_conversion}),
                         [](const auto& way) { return way.param.name; });

// Zeros of different sign differ; all NaNs are equal.
bool same(double one, double other) {
  if (std::isnan(one) || std::isnan(other)) return std::isnan(one) && std::isnan(other);
  return one == other && std::signbit(one) == std::signbit(other);
}

std::vector<std::uint16_t> all_of_two_bytes() {
  std::vector<std::uint16_t> all(kAllOfTwoBytes);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  return all;
}

void ConvertWays::expect_rounded(const TwoBytes& to, const std::vector<float>& in) {
  const auto out = converted<std::uint16_t>("float32", to.name, in);
  for (std::size_t i = 0; i < in.size(); ++i) {
    ASSERT_TRUE(same(to.value(out[i]), to.rounded(in[i])))
        << std::hexfloat << in[i] << " became the " << to.name << " " << to.value(out[i])
        << " and not " << to.rounded(in[i]);
  }
}

TEST_P(ConvertWays, ConvertsEach16BitValueExactlyAndBack) {
  const auto all = all_of_two_bytes();
  for (const TwoBytes& type : {kHalf, kBFloat}) {
    SCOPED_TRACE(type.name);
    const auto singles = converted<float>(type.name, "float32", all);
    const auto doubles = converted<double>(type.name, "float64", all);
    const auto from_singles = converted<std::uint16_t>("float32", type.name, singles);
    const auto from_doubles = converted<std::uint16_t>("float64", type.name, doubles);
    for (const std::uint16_t bits : all) {
      const double value = type.value(bits);
      ASSERT_TRUE(same(singles[bits], value)) << bits;
      ASSERT_TRUE(same(doubles[bits], value)) << bits;
      ASSERT_TRUE(same(type.value(from_singles[bits]), value)) << bits;
      ASSERT_TRUE(same(type.value(from_doubles[bits]), value)) << bits;
      if (std::isnan(value)) continue;
      ASSERT_EQ(from_singles[bits], bits);
      ASSERT_EQ(from_doubles[bits], bits);
    }
  }
}

TEST_P(ConvertWays, RoundsEach16BitValueToTheOther16BitType) {
  const auto all = all_of_two_bytes();
  for (const auto& [from, to] : {std::pair(kHalf, kBFloat), std::pair(kBFloat, kHalf)}) {
    const auto out = converted<std::uint16_t>(from.name, to.name, all);
    for (const std::uint16_t bits : all) {
      const double expected = to.rounded(static_cast<float>(from.value(bits)));
      ASSERT_TRUE(same(to.value(out[bits]), expected)) << from.name << " " << bits;
    }
  }
}

TEST_P(ConvertWays, RoundsFloat32AtAndNextToEachTie) {
  for (const TwoBytes& to : {kHalf, kBFloat}) {
    std::vector<float> in;
    const auto infinity =
        static_cast<std::uint16_t>(((1 << to.exponent_bits) - 1) << to.mantissa_bits);
    for (std::uint16_t bits = 0; bits < infinity; ++bits) {
      // Values overflow from the tie between the largest value and 2^(largest_exponent + 1) on.
      const double above = bits + 1 < infinity ? to.value(static_cast<std::uint16_t>(bits + 1))
                                               : std::ldexp(1, to.largest_exponent() + 1);
      const auto tie = static_cast<float>((to.value(bits) + above) / 2);
      for (const float value : {tie, std::nextafter(tie, 0.0F), std::nextafter(tie, INFINITY)}) {
        in.push_back(value);
        in.push_back(-value);
      }
    }
    expect_rounded(to, in);
  }
}

TEST_P(ConvertWays, RoundsExtremeFloat32Values) {
  using Limits = std::numeric_limits<float>;
  std::vector<float> in = {0.0F, 1.0F, Limits::denorm_min(), std::nextafter(Limits::min(), 0.0F),
                           Limits::min(), Limits::max(), 65504.0F, 65519.996F, 65520.0F, 65536.0F,
                           0x1.fep127F, 0x1.fefffep127F, 0x1.ffp127F, INFINITY, NAN,
                           // A NaN whose payload is lost in 16 bits.
                           std::bit_cast<float>(0x7f80'0001U)};
  const std::vector<float> positive = in;
  for (const float value : positive) in.push_back(-value);
  expect_rounded(kHalf, in);
  expect_rounded(kBFloat, in);
}

TEST_P(ConvertWays, RoundsRandomFloat32Bits) {
  Random random(1);
  std::vector<float> any;
  std::vector<float> near_halves;
  for (int i = 0; i < 200'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random.between(0, UINT32_MAX));
    any.push_back(std::bit_cast<float>(bits));
    // Few random bits are in the range of float16, so move them there.
    const float mantissa = std::bit_cast<float>((bits & 0x807f'ffffU) | 0x3f80'0000U);
    near_halves.push_back(std::ldexp(mantissa, static_cast<int>(random.between(0, 44)) - 27));
  }
  for (const TwoBytes& to : {kHalf, kBFloat}) {
    expect_rounded(to, any);
    expect_rounded(to, near_halves);
  }
}

TEST_P(ConvertWays, RoundsRandomFloat64BitsToFloat32AndThenTo16Bits) {
  Random random(2);
  std::vector<double> in = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1e300, -1e300, 1e-300, 0x1p-149};
  for (int i = 0; i < 200'000; ++i) {
    const std::uint64_t bits = random.between(0, UINT64_MAX);
    in.push_back(std::bit_cast<double>(bits));
    const double mantissa = 1 + std::ldexp(static_cast<double>(bits >> 12), -52);
    in.push_back(std::ldexp(mantissa, static_cast<int>(random.between(0, 290)) - 160));
  }
  const auto singles = converted<float>("float64", "float32", in);
  for (std::size_t i = 0; i < in.size(); ++i) {
    ASSERT_TRUE(same(singles[i], static_cast<float>(in[i]))) << std::hexfloat << in[i];
  }
  for (const TwoBytes& to : {kHalf, kBFloat}) {
    const auto out = converted<std::uint16_t>("float64", to.name, in);
    for (std::size_t i = 0; i < in.size(); ++i) {
      ASSERT_TRUE(same(to.value(out[i]), to.rounded(static_cast<float>(in[i]))))
          << std::hexfloat << in[i] << " to " << to.name;
    }
  }
}

TEST_P(ConvertWays, RoundsFloat64JustAboveAFloat16TieToTheTieFirst) {
  const double above_tie = 1 + 0x1p-11 + 0x1p-40;
  EXPECT_EQ(converted<std::uint16_t>("float64", "float16", std::vector{above_tie})[0], 0x3c00);
}

TEST_P(ConvertWays, ConvertsFloat32ToFloat64Exactly) {
  Random random(3);
  std::vector<float> in = {0.0F, -0.0F, INFINITY, -INFINITY, NAN, 0x1p-149F};
  for (int i = 0; i < 100'000; ++i) {
    in.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random.between(0, UINT32_MAX))));
  }
  const auto out = converted<double>("float32", "float64", in);
  for (std::size_t i = 0; i < in.size(); ++i) {
    ASSERT_TRUE(same(out[i], in[i])) << std::hexfloat << in[i];
  }
}

// The input ends at the end of its allocation, so that ASan detects reads past it.
TEST_P(ConvertWays, WritesExactlyItsElementsAtAnyLengthAndAlignment) {
  constexpr std::size_t kMost = 40;
  constexpr std::size_t kGuard = 40;
  Random random(4);
  for (const char* from_name : kNames) {
    const Dtype* const from = find_dtype(from_name);
    // Ones with a random mantissa, so that no element is a NaN.
    std::string elements = random.bytes(kMost * from->item_bytes);
    for (std::size_t i = 0; i < kMost; ++i) elements[(i + 1) * from->item_bytes - 1] = 0x3f;
    for (const char* name : kNames) {
      const Dtype* const to = find_dtype(name);
      if (from == to) continue;
      const Conversion convert = GetParam().find(*from, *to);
      std::string expected;
      for (std::size_t i = 0; i < kMost; ++i) {
        std::string one(to->item_bytes, '?');
        convert(std::as_writable_bytes(std::span(one)).data(),
                test::bytes_of(elements).data() + i * from->item_bytes, 1);
        expected += one;
      }
      for (std::size_t count = 0; count <= kMost; ++count) {
        const std::size_t in_bytes = count * from->item_bytes;
        const std::size_t out_bytes = count * to->item_bytes;
        for (const std::size_t in_at : {0, 1, 2, 7}) {
          std::vector<char> in(in_at + in_bytes);
          std::copy_n(elements.data(), in_bytes, in.data() + in_at);
          for (const std::size_t out_at : {0, 1, 2, 7}) {
            std::string out(kGuard + out_at + out_bytes + kGuard, '?');
            convert(std::as_writable_bytes(std::span(out)).data() + kGuard + out_at,
                    std::as_bytes(std::span(in)).data() + in_at, count);
            const std::string right = std::string(kGuard + out_at, '?') +
                                      expected.substr(0, out_bytes) + std::string(kGuard, '?');
            ASSERT_EQ(out, right) << count << " of " << from->name << " at " << in_at << " to "
                                  << to->name << " at " << out_at;
          }
        }
      }
    }
  }
}

TEST_P(ConvertWays, OfNoElementsReadsNoMemory) {
  for (const char* from : kNames) {
    for (const char* to : kNames) {
      const Conversion convert = conversion(GetParam(), from, to);
      if (convert != nullptr) convert(nullptr, nullptr, 0);
    }
  }
}

TEST_P(ConvertWays, HasAllPairsOfDifferentFloatTypes) {
  for (const char* from : kNames) {
    for (const char* to : kNames) {
      EXPECT_EQ(conversion(GetParam(), from, to) == nullptr, std::string_view(from) == to)
          << from << " to " << to;
    }
  }
}

TEST(Convert, HasNoPairsOfOtherTypes) {
  const auto has = [](std::string_view from, std::string_view to) {
    return find_conversion(*find_dtype(from), *find_dtype(to)) != nullptr;
  };
  EXPECT_FALSE(has("int64", "float32"));
  EXPECT_FALSE(has("float32", "int64"));
  EXPECT_FALSE(has("int32", "int64"));
  EXPECT_FALSE(has("int64", "int64"));
  EXPECT_FALSE(has("float32", "complex64"));
  EXPECT_FALSE(has("float8_e5m2", "float16"));
  EXPECT_FALSE(has("uint16", "bfloat16"));
}

TEST(Convert, UsesTheVectorImplementationIfItExists) {
  const Dtype& from = *find_dtype("float32");
  const Dtype& to = *find_dtype("bfloat16");
  const Conversion vector = internal::find_vector_conversion(from, to);
  const Conversion scalar = internal::find_scalar_conversion(from, to);
  EXPECT_EQ(find_conversion(from, to), vector != nullptr ? vector : scalar);
}

}  // namespace
}  // namespace torch_ckpt::format
