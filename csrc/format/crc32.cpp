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

// What is found out once is found out when the library is loaded, and not by the first who asks: a
// child that is forked amid that would wait for ever.
#if defined(__x86_64__)
const bool kHasAvx = __builtin_cpu_supports("avx") != 0;

__attribute__((target("avx"))) void zero_upper() { _mm256_zeroupper(); }

// ISA-L's AVX-512 code leaves the upper halves of vector registers in use, and then all SSE code of
// the thread is slower: a caller's Python by a third, from its first checksum on.
void leave_vector_code() {
  if (kHasAvx) zero_upper();
}
#else
void leave_vector_code() {}
#endif

// Blocks have few sizes, all of them powers of two, and come by the hundred thousand: what depends
// on the size alone takes ten times as long as the rest.
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
  // Carry-less multiplication, chosen for the processor at run time; the function takes a pointer
  // to non-const by an oversight of its header and does not write.
  const std::uint32_t continued = ::crc32_gzip_refl(
      crc, reinterpret_cast<unsigned char*>(const_cast<std::byte*>(data.data())), data.size());
  leave_vector_code();
  return continued;
}

std::uint32_t crc32_of_sample(std::span<const std::byte> data, const Sample& sample) {
  if (data.size() <= sample.most_bytes) return crc32(0, data);
  const std::uint64_t items = data.size() / sample.item_bytes;
  const std::uint64_t length = sample.most_bytes / sample.stripes / sample.item_bytes;
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
