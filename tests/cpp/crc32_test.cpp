#include "format/crc32.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include "support.h"

namespace torch_ckpt::format {
namespace {

using test::bytes_of;
using test::Random;

std::uint32_t reference(std::string_view data) {
  return static_cast<std::uint32_t>(
      ::crc32(0, reinterpret_cast<const Bytef*>(data.data()), static_cast<uInt>(data.size())));
}

TEST(Crc32, HasTheCheckValueOfTheStandard) {
  EXPECT_EQ(crc32(0, bytes_of("123456789")), 0xcbf43926);
}

TEST(Crc32, IsUnchangedByNoBytes) {
  EXPECT_EQ(crc32(0, {}), 0);
  EXPECT_EQ(crc32(0x12345678, {}), 0x12345678);
}

TEST(Crc32, EqualsZlibsAtEveryLengthAndAlignment) {
  Random random(1);
  const std::string data = random.bytes(5000);
  for (std::size_t begin = 0; begin < 20; ++begin) {
    for (std::size_t length = 0; length < 300; ++length) {
      const auto part = std::string_view(data).substr(begin, length);
      ASSERT_EQ(crc32(0, bytes_of(part)), reference(part)) << begin << "+" << length;
    }
  }
  EXPECT_EQ(crc32(0, bytes_of(data)), reference(data));
}

TEST(Crc32, ContinuesFromAnEarlierChecksum) {
  Random random(2);
  const std::string data = random.bytes(1000);
  for (std::size_t cut = 0; cut <= data.size(); ++cut) {
    const auto all = std::string_view(data);
    ASSERT_EQ(crc32(crc32(0, bytes_of(all.substr(0, cut))), bytes_of(all.substr(cut))),
              reference(data))
        << cut;
  }
}

TEST(Crc32, JoinsTheChecksumsOfTwoParts) {
  Random random(3);
  const std::string data = random.bytes(1000);
  for (std::size_t cut = 0; cut <= data.size(); ++cut) {
    const auto first = std::string_view(data).substr(0, cut);
    const auto second = std::string_view(data).substr(cut);
    ASSERT_EQ(crc32_join(reference(first), reference(second), second.size()), reference(data))
        << cut;
  }
}

TEST(Crc32, JoinsPartsAboveFourGibibytes) {
  // Doubles a string of zeros. The expected values are from stock torch (stock_records.cpp).
  std::vector<std::uint32_t> zeros{reference(std::string_view("\0", 1))};
  for (int bits = 0; bits < 32; ++bits) {
    zeros.push_back(crc32_join(zeros.back(), zeros.back(), std::uint64_t{1} << bits));
  }
  EXPECT_EQ(zeros[31], 0x4dbdf21c);
  EXPECT_EQ(crc32_join(zeros[30], zeros[32], std::uint64_t{1} << 32), 0x193838c3);
}

}  // namespace
}  // namespace torch_ckpt::format
