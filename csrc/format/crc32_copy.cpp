// The copies with VPCLMULQDQ fold the bytes that they copy, as in V. Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009):
//
//   1. Each 128-bit lane of an accumulator holds a polynomial that is congruent, modulo the CRC's
//      polynomial P, to all bytes that were folded into this lane.
//   2. To advance a lane by D bits, its two halves are multiplied by x^(D+32) mod P and
//      x^(D-32) mod P. The next 16 bytes of the lane are added (xor) to the products.
//   3. At the end, the lanes are folded into one. The CRC-32 of its 16 bytes, from a register of
//      zeros, is the register after all bytes.
//
// All numbers are bit-reflected: the least significant bit is the highest power of x.

#include "format/crc32_copy.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "format/crc32.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torch_ckpt::format {
namespace {

// Bytes to copy before checksumming them, few enough to stay in the second-level cache.
constexpr std::size_t kPortableBytes = std::size_t{256} << 10;
// Shorter copies, such as the values of small tensors, go through the caches.
constexpr std::size_t kShortBytes = std::size_t{4} << 10;

// Copies first, and checksums the copy, because another thread may change `in` meanwhile.
std::uint32_t copy_portable(std::uint32_t crc, std::span<const std::byte> in, std::byte* out) {
  while (!in.empty()) {
    const std::size_t bytes = std::min(in.size(), kPortableBytes);
    std::memcpy(out, in.data(), bytes);
    crc = crc32(crc, {out, bytes});
    out += bytes;
    in = in.subspan(bytes);
  }
  return crc;
}

#if defined(__x86_64__)

/// Returns x^power mod P in the form in which a carry-less product of reflected numbers needs it:
/// shifted left by one bit.
constexpr long long power_of_x(unsigned power) {
  constexpr std::uint32_t kPolynomial = 0xedb88320;
  std::uint32_t value = 0x80000000;  // x^0
  for (; power > 0; --power) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
  return static_cast<long long>(std::uint64_t{value} << 1);
}

/// The factors for the low and the high half of a lane, to advance it by kBits.
template <unsigned kBits>
struct Advance {
  static constexpr long long kLow = power_of_x(kBits + 32);
  static constexpr long long kHigh = power_of_x(kBits - 32);
};

__attribute__((target("pclmul,sse2"))) __m128i advance_lane(__m128i lane, __m128i next) {
  const __m128i factors = _mm_set_epi64x(Advance<128>::kHigh, Advance<128>::kLow);
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(lane, factors, 0x00),
                                     _mm_clmulepi64_si128(lane, factors, 0x11)),
                       next);
}

/// Returns the CRC-32 of all bytes so far. The caller has added the CRC-32 of earlier bytes to the
/// first lane.
__attribute__((target("pclmul,sse2"))) std::uint32_t crc_of_lanes(
    std::span<const std::byte> lanes) {
  const auto load = [&](std::size_t at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(lanes.data() + at));
  };
  __m128i folded = load(0);
  for (std::size_t at = sizeof(folded); at < lanes.size(); at += sizeof(folded)) {
    folded = advance_lane(folded, load(at));
  }
  std::array<std::byte, sizeof(folded)> bytes;
  std::memcpy(bytes.data(), &folded, sizeof(folded));
  constexpr std::uint32_t kZeroRegister = 0xffffffff;
  return crc32(kZeroRegister, bytes);
}

// In both classes, copy_steps() copies a positive multiple of kStepBytes to an address that is
// aligned to 64 bytes. A template cannot replace them, because it cannot choose its target.

struct Avx2 {
  static constexpr std::size_t kVectors = 4;
  static constexpr std::size_t kStepBytes = kVectors * sizeof(__m256i);

  __attribute__((target("avx2,vpclmulqdq"))) static std::uint32_t copy_steps(std::uint32_t crc,
                                                                             const std::byte* in,
                                                                             std::byte* out,
                                                                             std::size_t bytes) {
    using Step = Advance<8 * kStepBytes>;
    const __m256i factors = _mm256_set_epi64x(Step::kHigh, Step::kLow, Step::kHigh, Step::kLow);
    const std::byte* const end = in + bytes;
    __m256i sums[kVectors];
    for (std::size_t i = 0; i < kVectors; ++i) {
      sums[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in) + i);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(out) + i, sums[i]);
    }
    sums[0] = _mm256_xor_si256(sums[0],
                               _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(~crc))));
    for (in += kStepBytes, out += kStepBytes; in < end; in += kStepBytes, out += kStepBytes) {
      for (std::size_t i = 0; i < kVectors; ++i) {
        const __m256i next = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in) + i);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(out) + i, next);
        sums[i] =
            _mm256_xor_si256(_mm256_xor_si256(_mm256_clmulepi64_epi128(sums[i], factors, 0x00),
                                              _mm256_clmulepi64_epi128(sums[i], factors, 0x11)),
                             next);
      }
    }
    return crc_of_lanes({reinterpret_cast<const std::byte*>(sums), sizeof(sums)});
  }
};

struct Avx512 {
  static constexpr std::size_t kVectors = 4;
  static constexpr std::size_t kStepBytes = kVectors * sizeof(__m512i);

  __attribute__((target("avx512f,vpclmulqdq"))) static std::uint32_t copy_steps(std::uint32_t crc,
                                                                                const std::byte* in,
                                                                                std::byte* out,
                                                                                std::size_t bytes) {
    using Step = Advance<8 * kStepBytes>;
    constexpr int kXorOfThree = 0x96;
    const __m512i factors = _mm512_set4_epi64(Step::kHigh, Step::kLow, Step::kHigh, Step::kLow);
    const std::byte* const end = in + bytes;
    __m512i sums[kVectors];
    for (std::size_t i = 0; i < kVectors; ++i) {
      sums[i] = _mm512_loadu_si512(in + i * sizeof(__m512i));
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out) + i, sums[i]);
    }
    sums[0] = _mm512_xor_si512(sums[0],
                               _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc))));
    for (in += kStepBytes, out += kStepBytes; in < end; in += kStepBytes, out += kStepBytes) {
      for (std::size_t i = 0; i < kVectors; ++i) {
        const __m512i next = _mm512_loadu_si512(in + i * sizeof(__m512i));
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out) + i, next);
        sums[i] = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sums[i], factors, 0x00),
                                            _mm512_clmulepi64_epi128(sums[i], factors, 0x11), next,
                                            kXorOfThree);
      }
    }
    return crc_of_lanes({reinterpret_cast<const std::byte*>(sums), sizeof(sums)});
  }
};

template <class Code>
std::uint32_t copy_folding(std::uint32_t crc, std::span<const std::byte> in, std::byte* out) {
  constexpr std::size_t kAlignment = 64;
  const std::size_t head =
      std::min<std::size_t>(-reinterpret_cast<std::uintptr_t>(out) % kAlignment, in.size());
  const std::size_t steps = (in.size() - head) / Code::kStepBytes * Code::kStepBytes;
  if (steps == 0) return copy_portable(crc, in, out);
  crc = copy_portable(crc, in.first(head), out);
  crc = Code::copy_steps(crc, in.data() + head, out + head, steps);
  // Streaming stores are not ordered with the later store that publishes the data to another
  // thread.
  _mm_sfence();
  return copy_portable(crc, in.subspan(head + steps), out + head + steps);
}

// Initialized when the library is loaded (see format/crc32.cpp).
const bool kHasVpclmulqdq = __builtin_cpu_supports("vpclmulqdq") != 0;
const bool kHasAvx2 = kHasVpclmulqdq && __builtin_cpu_supports("avx2") != 0;
const bool kHasAvx512 = kHasVpclmulqdq && __builtin_cpu_supports("avx512f") != 0;
#endif

const CopyCode kBestCode = is_supported(CopyCode::avx512) ? CopyCode::avx512
                           : is_supported(CopyCode::avx2) ? CopyCode::avx2
                                                          : CopyCode::portable;

}  // namespace

#if defined(__x86_64__)
// glibc's memcpy does this too, but only for copies larger than a fraction of the last-level cache.
// On large processors that is far more than a chunk.
void copy_past_caches(std::span<const std::byte> in, std::byte* out) {
  constexpr std::size_t kLine = 64;
  if (in.size() < kShortBytes) {
    if (!in.empty()) std::memcpy(out, in.data(), in.size());
    return;
  }
  const std::size_t head =
      std::min<std::size_t>(-reinterpret_cast<std::uintptr_t>(out) % sizeof(__m128i), in.size());
  std::memcpy(out, in.data(), head);
  std::size_t at = head;
  for (; at + kLine <= in.size(); at += kLine) {
    for (std::size_t part = 0; part < kLine; part += sizeof(__m128i)) {
      const auto* const from = reinterpret_cast<const __m128i*>(in.data() + at + part);
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + at + part), _mm_loadu_si128(from));
    }
  }
  std::memcpy(out + at, in.data() + at, in.size() - at);
  // Streaming stores are not ordered with the later store that publishes the data to another
  // thread.
  _mm_sfence();
}

bool is_supported(CopyCode code) {
  return code == CopyCode::portable || (code == CopyCode::avx2 ? kHasAvx2 : kHasAvx512);
}

std::uint32_t crc32_copy(CopyCode code, std::uint32_t crc, std::span<const std::byte> in,
                         std::byte* out) {
  if (code == CopyCode::avx512) return copy_folding<Avx512>(crc, in, out);
  if (code == CopyCode::avx2) return copy_folding<Avx2>(crc, in, out);
  return copy_portable(crc, in, out);
}
#else
void copy_past_caches(std::span<const std::byte> in, std::byte* out) {
  if (!in.empty()) std::memcpy(out, in.data(), in.size());
}

bool is_supported(CopyCode code) { return code == CopyCode::portable; }

std::uint32_t crc32_copy(CopyCode /*code*/, std::uint32_t crc, std::span<const std::byte> in,
                         std::byte* out) {
  return copy_portable(crc, in, out);
}
#endif

std::uint32_t crc32_copy(std::uint32_t crc, std::span<const std::byte> in, std::byte* out) {
  return crc32_copy(in.size() < kShortBytes ? CopyCode::portable : kBestCode, crc, in, out);
}

}  // namespace torch_ckpt::format
