/// Every conversion converts to float32 first, as in torch. So float64 to a 16-bit dtype rounds
/// twice; every other conversion rounds at most once.
#include "format/convert.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
// Set the target per function, not for the whole file: the library must run on any x86-64.
#define TORCH_CKPT_AVX2 __attribute__((target("avx2,f16c")))
#endif

namespace torch_ckpt::format {
namespace {

constexpr std::uint32_t kSign = 0x8000'0000;
constexpr std::uint32_t kInfinity = 0x7f80'0000;

// --- one element at a time -------------------------------------------------------------------

struct Float64 {
  static constexpr std::string_view kName = "float64";
  using Item = double;
  static float load(double value) { return static_cast<float>(value); }
  static double store(float value) { return value; }
};

struct Float32 {
  static constexpr std::string_view kName = "float32";
  using Item = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};

struct Float16 {
  static constexpr std::string_view kName = "float16";
  using Item = std::uint16_t;
  static constexpr std::uint32_t kBias = 127 - 15;    // difference of the exponent biases
  static constexpr std::uint32_t kDropped = 23 - 10;  // mantissa bits that float16 lacks
  static constexpr std::uint32_t kLeastNormal = (kBias + 1) << 23;
  static constexpr std::uint32_t kTooLarge = (kBias + 31) << 23;
  // The last mantissa bit of 0.5F has the same value as the last bit of a denormal float16, so
  // adding 0.5F rounds to a denormal float16.
  static constexpr float kDenormals = 0.5F;

  static float load(std::uint16_t value) {
    const std::uint32_t sign = (value & 0x8000U) << 16;
    const std::uint32_t rest = value & 0x7fffU;
    std::uint32_t bits = (rest << kDropped) + (kBias << 23);
    if (rest >= 0x7c00) {
      bits = kInfinity | rest << kDropped;
    } else if (rest < 0x0400) {
      const auto shifted = std::bit_cast<float>(std::bit_cast<std::uint32_t>(kDenormals) | rest);
      bits = std::bit_cast<std::uint32_t>(shifted - kDenormals);
    }
    return std::bit_cast<float>(sign | bits);
  }

  static std::uint16_t store(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits & kSign) >> 16;
    const std::uint32_t rest = bits & ~kSign;
    std::uint32_t half = 0;
    if (rest > kInfinity) {
      half = 0x7e00;
    } else if (rest >= kTooLarge) {
      half = 0x7c00;
    } else if (rest < kLeastNormal) {
      const float rounded = std::bit_cast<float>(rest) + kDenormals;
      half = std::bit_cast<std::uint32_t>(rounded) - std::bit_cast<std::uint32_t>(kDenormals);
    } else {
      const std::uint32_t odd = rest >> kDropped & 1;
      half = (rest - (kBias << 23) + ((1U << (kDropped - 1)) - 1) + odd) >> kDropped;
    }
    return static_cast<std::uint16_t>(sign | half);
  }
};

struct BFloat16 {
  static constexpr std::string_view kName = "bfloat16";
  using Item = std::uint16_t;
  static float load(std::uint16_t value) {
    return std::bit_cast<float>(std::uint32_t{value} << 16);
  }
  static std::uint16_t store(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & ~kSign) > kInfinity) return 0x7fc0;
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

struct Scalar {
  template <class From, class To>
  static void convert(std::byte* out, const std::byte* in, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      typename From::Item item;
      std::memcpy(&item, in + i * sizeof(item), sizeof(item));
      const typename To::Item made = To::store(From::load(item));
      std::memcpy(out + i * sizeof(made), &made, sizeof(made));
    }
  }
};

// --- eight elements at a time ----------------------------------------------------------------

#if defined(__x86_64__)
template <class Type>
struct Eight;

template <>
struct Eight<Float64> {
  TORCH_CKPT_AVX2 static __m256 load(const std::byte* in) {
    const auto* const from = reinterpret_cast<const double*>(in);
    return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd(from + 4)),
                           _mm256_cvtpd_ps(_mm256_loadu_pd(from)));
  }
  TORCH_CKPT_AVX2 static void store(std::byte* out, __m256 values) {
    auto* const to = reinterpret_cast<double*>(out);
    _mm256_storeu_pd(to, _mm256_cvtps_pd(_mm256_castps256_ps128(values)));
    _mm256_storeu_pd(to + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1)));
  }
};

template <>
struct Eight<Float32> {
  TORCH_CKPT_AVX2 static __m256 load(const std::byte* in) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(in));
  }
  TORCH_CKPT_AVX2 static void store(std::byte* out, __m256 values) {
    _mm256_storeu_ps(reinterpret_cast<float*>(out), values);
  }
};

template <>
struct Eight<Float16> {
  TORCH_CKPT_AVX2 static __m256 load(const std::byte* in) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
  }
  TORCH_CKPT_AVX2 static void store(std::byte* out, __m256 values) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  }
};

template <>
struct Eight<BFloat16> {
  TORCH_CKPT_AVX2 static __m256 load(const std::byte* in) {
    const __m128i items = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(items), 16));
  }
  TORCH_CKPT_AVX2 static void store(std::byte* out, __m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i wide = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(out),
        _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
  }
};

struct Vector {
  template <class From, class To>
  TORCH_CKPT_AVX2 static void convert(std::byte* out, const std::byte* in, std::size_t count) {
    for (; count >= 8; count -= 8) {
      Eight<To>::store(out, Eight<From>::load(in));
      in += 8 * sizeof(typename From::Item);
      out += 8 * sizeof(typename To::Item);
    }
    Scalar::convert<From, To>(out, in, count);
  }
};
#endif

// --- table of the twelve conversions ---------------------------------------------------------

template <class Way, class From, class To>
constexpr Conversion kConversion = &Way::template convert<From, To>;
template <class Way, class Same>
constexpr Conversion kConversion<Way, Same, Same> = nullptr;

template <class Way, class... Types>
struct Table {
  using ByTarget = std::array<Conversion, sizeof...(Types)>;
  static constexpr std::array kNames = {Types::kName...};
  template <class From>
  static constexpr ByTarget kByTarget = {kConversion<Way, From, Types>...};
  static constexpr std::array kBySource = {kByTarget<Types>...};

  static Conversion find(const Dtype& from, const Dtype& to) {
    const auto* const source = std::ranges::find(kNames, from.name);
    const auto* const target = std::ranges::find(kNames, to.name);
    if (source == kNames.end() || target == kNames.end()) return nullptr;
    return kBySource[source - kNames.begin()][target - kNames.begin()];
  }
};

template <class Way>
using Pairs = Table<Way, Float64, Float32, Float16, BFloat16>;

#if defined(__x86_64__)
bool have_vectors() {
  // Use __builtin_cpu_supports where possible, because it also checks that the operating system
  // saves the wide registers. clang's version does not support "f16c".
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

const bool kHaveVectors = have_vectors();
#endif

}  // namespace

namespace internal {

Conversion find_scalar_conversion(const Dtype& from, const Dtype& to) {
  return Pairs<Scalar>::find(from, to);
}

Conversion find_vector_conversion([[maybe_unused]] const Dtype& from,
                                  [[maybe_unused]] const Dtype& to) {
#if defined(__x86_64__)
  if (kHaveVectors) return Pairs<Vector>::find(from, to);
#endif
  return nullptr;
}

}  // namespace internal

Conversion find_conversion(const Dtype& from, const Dtype& to) {
  const Conversion vector = internal::find_vector_conversion(from, to);
  return vector != nullptr ? vector : internal::find_scalar_conversion(from, to);
}

}  // namespace torch_ckpt::format
