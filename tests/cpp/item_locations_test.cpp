#include "format/item_locations.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "support.h"

namespace torch_ckpt::format {
namespace {

using namespace test;

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

void expect_round_trip(const std::vector<ItemLocation>& locations) {
  const ItemLocations encoded(locations);
  EXPECT_EQ(encoded.size(), locations.size());
  EXPECT_EQ(encoded.decoded(), locations);
  const auto decoded = ItemLocations::decode(encoded.encoded());
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(*decoded, encoded);
}

TEST(ItemLocations, AreDecodedAsTheyWereEncoded) {
  Random random(8);
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<ItemLocation> locations;
    std::uint64_t end = 0;
    for (std::uint64_t items = random.between(0, 20); items > 0; --items) {
      const std::uint64_t offset = end + (random.coin() ? 0 : random.between(0, 4096));
      const std::uint64_t length = random.between(0, std::uint64_t{1} << random.between(0, 50));
      locations.push_back({random.between(0, 1'000'000), offset, length});
      end = offset + length;
    }
    expect_round_trip(locations);
  }
}

TEST(ItemLocations, MayBeAnyNumbersInAnyOrder) {
  expect_round_trip({{kMax, kMax, kMax}, {0, 0, 0}, {kMax / 2, 7, kMax}, {1, kMax - 1, 1}});
}

TEST(ItemLocations, TakeFewBytesForItemsBackToBack) {
  std::vector<ItemLocation> locations;
  for (std::uint64_t item = 0; item < 1000; ++item) {
    locations.push_back({2 * item, 17'536 * item, 17'536});
  }
  EXPECT_EQ(ItemLocations(locations).encoded().size(), 5 * locations.size());
}

TEST(ItemLocations, AreRefusedIfTruncatedWithinALocation) {
  const std::vector<ItemLocation> locations{{5, 300, 70'000}, {900, 80'000, 1}};
  const ItemLocations complete(locations);
  const std::size_t first = ItemLocations(std::span(locations).first(1)).encoded().size();
  for (std::size_t bytes = 0; bytes < complete.encoded().size(); ++bytes) {
    const auto decoded = ItemLocations::decode(complete.encoded().substr(0, bytes));
    EXPECT_EQ(decoded.has_value(), bytes == 0 || bytes == first) << bytes;
  }
}

TEST(ItemLocations, AreRefusedWithANumberOfMoreThanTenBytes) {
  EXPECT_TRUE(ItemLocations::decode(std::string(9, '\x80') + std::string(3, '\0')).has_value());
  EXPECT_FALSE(ItemLocations::decode(std::string(10, '\x80') + std::string(3, '\0')).has_value());
}

}  // namespace
}  // namespace torch_ckpt::format
