#include "format/crc32_copy.h"

#include <gtest/gtest.h>

#include <array>
#include <span>
#include <string>

#include "format/crc32.h"
#include "support.h"

namespace torch_ckpt::format {
namespace {

using test::bytes_of;
using test::Random;

// Longer than the bytes that a copy takes through the caches.
constexpr std::size_t kLong = std::size_t{4} << 10;

/// Returns true if a copy of `in` to `at` bytes after an alignment of 128 changes only the bytes
/// there, and continues the CRC-32 `before`.
template <class Copy>
bool is_exact(std::string_view in, std::size_t at, std::uint32_t before, Copy copy) {
  std::string memory(in.size() + at + 400, '?');
  const std::size_t to_alignment = -reinterpret_cast<std::uintptr_t>(memory.data()) % 128;
  const std::size_t begin = to_alignment + at;
  const std::uint32_t crc =
      copy(before, bytes_of(in), std::as_writable_bytes(std::span(memory)).data() + begin);
  const std::string_view all = memory;
  return crc == crc32(before, bytes_of(in)) && all.substr(begin, in.size()) == in &&
         all.substr(0, begin).find_first_not_of('?') == std::string_view::npos &&
         all.substr(begin + in.size()).find_first_not_of('?') == std::string_view::npos;
}

class Crc32Copy : public ::testing::TestWithParam<CopyCode> {
 protected:
  void SetUp() override {
    if (!is_supported(GetParam())) GTEST_SKIP() << "this processor does not support the code";
  }
  static auto copy() {
    return [](std::uint32_t crc, std::span<const std::byte> in, std::byte* out) {
      return crc32_copy(GetParam(), crc, in, out);
    };
  }
};

TEST_P(Crc32Copy, IsExactAtEveryLengthAndAlignment) {
  Random random(1);
  const std::string data = random.bytes(2000);
  for (std::size_t length = 0; length < 1100; ++length) {
    const std::size_t from = random.between(0, 64);
    const std::size_t to = random.between(0, 127);
    const auto before = static_cast<std::uint32_t>(random.between(0, 0xffffffff));
    ASSERT_TRUE(is_exact(std::string_view(data).substr(from, length), to, before, copy()))
        << length << " bytes from " << from << " to " << to;
  }
  for (std::size_t from = 0; from < 64; ++from) {
    for (std::size_t to = 0; to < 128; ++to) {
      ASSERT_TRUE(is_exact(std::string_view(data).substr(from, 777), to, 0, copy()))
          << from << " to " << to;
    }
  }
}

TEST_P(Crc32Copy, IsExactForLongCopies) {
  Random random(2);
  const std::string data = random.bytes((std::size_t{2} << 20) + 500);
  for (int round = 0; round < 30; ++round) {
    const std::size_t from = random.between(0, 200);
    const std::size_t length = random.between(0, data.size() - from);
    const std::size_t to = random.between(0, 127);
    ASSERT_TRUE(is_exact(std::string_view(data).substr(from, length), to, 0, copy()))
        << length << " bytes from " << from << " to " << to;
  }
}

TEST_P(Crc32Copy, ContinuesFromAnEarlierChecksum) {
  Random random(3);
  const std::string data = random.bytes(3000);
  std::string out(data.size(), '?');
  auto* const to = std::as_writable_bytes(std::span(out)).data();
  for (std::size_t cut = 0; cut <= data.size(); cut += 7) {
    const std::uint32_t first = copy()(0, bytes_of(data).first(cut), to);
    ASSERT_EQ(copy()(first, bytes_of(data).subspan(cut), to + cut), crc32(0, bytes_of(data)))
        << cut;
    ASSERT_EQ(out, data) << cut;
  }
}

std::string name_of(const ::testing::TestParamInfo<CopyCode>& code) {
  constexpr std::array kNames{"Portable", "Avx2", "Avx512"};
  return kNames[static_cast<std::size_t>(code.param)];
}
INSTANTIATE_TEST_SUITE_P(Codes, Crc32Copy,
                         ::testing::Values(CopyCode::portable, CopyCode::avx2, CopyCode::avx512),
                         name_of);

TEST(Crc32CopyChoice, IsExactForShortAndLongCopies) {
  Random random(4);
  const std::string data = random.bytes(2 * kLong);
  for (const std::size_t length : {std::size_t{0}, std::size_t{1}, kLong - 1, kLong, 2 * kLong}) {
    EXPECT_TRUE(is_exact(std::string_view(data).substr(0, length), 3, 7,
                         [](std::uint32_t crc, std::span<const std::byte> in, std::byte* out) {
                           return crc32_copy(crc, in, out);
                         }))
        << length;
  }
}

TEST(CopyPastCaches, IsExactAtAnyAlignmentAndLength) {
  Random random(5);
  const std::string data = random.bytes(kLong + 300);
  const auto copy = [](std::uint32_t crc, std::span<const std::byte> in, std::byte* out) {
    copy_past_caches(in, out);
    return crc32(crc, in);
  };
  for (std::size_t to = 0; to < 64; ++to) {
    for (const std::size_t length : {0, 1, 63, 64, 65}) {
      const std::size_t from = random.between(0, 200);
      for (const std::size_t bytes : {length, kLong + length}) {
        ASSERT_TRUE(is_exact(std::string_view(data).substr(from, bytes), to, 0, copy))
            << bytes << " bytes from " << from << " to " << to;
      }
    }
  }
}

}  // namespace
}  // namespace torch_ckpt::format
