#include "format/crc32.h"

#include <isa-l/crc.h>
#include <zlib.h>

#include <array>
#include <bit>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torch_ckpt::format {

namespace {

// Initialize these when the library is loaded, not on first use: a child forked while another
// thread is initializing a function-local static would wait for it forever.
#if defined(__x86_64__)
const bool kHasAvx = __builtin_cpu_supports("avx") != 0;

__attribute__((target("avx"))) void zero_upper() { _mm256_zeroupper(); }

// ISA-L's AVX-512 code leaves the upper halves of vector registers dirty. That slows down all later
// SSE code on the thread, such as the caller's Python code (by a third).
void clear_vector_registers() {
  if (kHasAvx) zero_upper();
}
#else
void clear_vector_registers() {}
#endif

// Operators for crc32_combine_op(), by the logarithm of the block size. Precomputed, because
// generating an operator takes ten times as long as applying it, and a checkpoint has hundreds of
// thousands of blocks.
constexpr int kSizes = 32;
const std::array<uLong, kSizes> kOperators = [] {
  std::array<uLong, kSizes> operators{};
  for (int log2 = 0; log2 < kSizes; ++log2) {
    operators[log2] = ::crc32_combine_gen(static_cast<z_off_t>(std::uint64_t{1} << log2));
  }
  return operators;
}();

}  // namespace

std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> data) {
  // ISA-L picks an implementation for the processor at run time. The cast is safe: ISA-L only
  // reads the data, although its header lacks the const.
  const std::uint32_t continued = ::crc32_gzip_refl(
      crc, reinterpret_cast<unsigned char*>(const_cast<std::byte*>(data.data())), data.size());
  clear_vector_registers();
  return continued;
}

std::uint32_t crc32_of_sample(std::span<const std::byte> data, const Sample& sample) {
  if (data.size() <= sample.max_bytes) return crc32(0, data);
  const std::uint64_t items = data.size() / sample.item_bytes;
  const std::uint64_t length = sample.max_bytes / sample.stripes / sample.item_bytes;
  const std::uint64_t last = items - length;
  std::uint32_t crc = 0;
  for (std::uint64_t stripe = 0; stripe < sample.stripes; ++stripe) {
    const std::uint64_t begin = last * stripe / (sample.stripes - 1);
    crc = crc32(crc, data.subspan(begin * sample.item_bytes, length * sample.item_bytes));
  }
  return crc;
}

std::uint32_t crc32_join(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) {
  if (std::has_single_bit(second_bytes) && std::countr_zero(second_bytes) < kSizes) {
    return static_cast<std::uint32_t>(
        ::crc32_combine_op(first, second, kOperators[std::countr_zero(second_bytes)]));
  }
  return static_cast<std::uint32_t>(
      ::crc32_combine(first, second, static_cast<z_off_t>(second_bytes)));
}

}  // namespace torch_ckpt::format
