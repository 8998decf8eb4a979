#include "format/part_sums.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "format/crc32.h"
#include "format/partial_crc.h"
#include "support.h"

namespace torch_ckpt::format {
namespace {

using namespace test;

TEST(PartialCrc, SharesOfABlockJoinToItsChecksum) {
  Random random(1);
  for (int round = 0; round < 500; ++round) {
    const std::string block = random.bytes(random.between(1, 3000));
    std::vector<PartialCrc> ranks(random.between(1, 4));
    for (std::size_t at = 0; at < block.size();) {
      const std::size_t bytes = std::min<std::size_t>(block.size() - at, random.between(1, 400));
      const std::uint32_t crc = crc32(0, bytes_of(std::string_view(block).substr(at, bytes)));
      ranks[random.between(0, ranks.size() - 1)].add(at, bytes, crc);
      at += bytes;
    }
    std::uint32_t shares = 0;
    for (PartialCrc& rank : ranks) shares ^= rank.share(block.size());
    ASSERT_EQ(crc32_of_shares(shares, block.size()), crc32(0, bytes_of(block)));
  }
}

TEST(PartialCrc, OfARankWithoutBytesIsZero) { EXPECT_EQ(PartialCrc().share(1000), 0); }

const std::vector<PartSums> kParts = {{4096, 70000, 40000, 1, {7, 8, 9}}, {80000, 16, 0, 0, {}}};

TEST(PartSums, SurviveTheirEncoding) {
  EXPECT_EQ(decode_part_sums(bytes_of(encode_part_sums(kParts))).value(), kParts);
  EXPECT_EQ(decode_part_sums(bytes_of(encode_part_sums({}))).value(), std::vector<PartSums>());
}

TEST(PartSums, WithAnyDamagedByteAreRefused) {
  const std::string encoded = encode_part_sums(kParts);
  for (std::size_t at = 0; at < encoded.size(); ++at) {
    std::string damaged = encoded;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    EXPECT_TRUE(fails(decode_part_sums(bytes_of(damaged)), Errc::frame_damaged)) << at;
    EXPECT_TRUE(fails(decode_part_sums(bytes_of(encoded.substr(0, at))), Errc::frame_damaged));
  }
}

TEST(PartSums, JoinToTheBlocksOfEachTensorInTheOrderOfTheFile) {
  const std::uint64_t block = block_bytes_for(40000);
  const std::string data = std::string(40000, 'x');
  std::vector<PartSums> parts = {
      {500, 40000, 1, 0, {}}, {500, 40000, 1, 1, {}}, {100, 8, 8, 0, {}}};
  const auto share = [&](std::uint64_t begin, std::uint64_t bytes, std::uint64_t number) {
    PartialCrc crc;
    crc.add(begin - number * block, bytes, crc32(0, bytes_of(data).subspan(begin, bytes)));
    return crc.share(std::min(block, 40000 - number * block));
  };
  // The first rank ends within the second block.
  parts[0].shares = {share(0, block, 0), share(block, 100, 1)};
  parts[1].shares = {share(block + 100, block - 100, 1), share(2 * block, 40000 - 2 * block, 2)};
  PartialCrc small;
  small.add(0, 8, crc32(0, bytes_of("12345678")));
  parts[2].shares = {small.share(8)};
  const auto records = join_part_sums(parts).value();
  ASSERT_EQ(records.size(), 2);
  EXPECT_EQ(records[0].offset, 100);
  EXPECT_EQ(records[0].block_crcs, std::vector<std::uint32_t>{crc32(0, bytes_of("12345678"))});
  EXPECT_EQ(records[1].offset, 500);
  EXPECT_TRUE(records[1].raw);
  EXPECT_EQ(records[1].block_bytes, block);
  ASSERT_EQ(records[1].block_crcs.size(), 3);
  for (std::uint64_t i = 0; i < 3; ++i) {
    const auto bytes =
        bytes_of(data).subspan(i * block, std::min<std::uint64_t>(block, 40000 - i * block));
    EXPECT_EQ(records[1].block_crcs[i], crc32(0, bytes)) << i;
  }
}

TEST(PartSums, ThatDoNotFitTheirTensorAreRefused) {
  EXPECT_TRUE(
      fails(join_part_sums(std::vector<PartSums>{{0, 8, 8, 0, {1, 2}}}), Errc::frame_damaged));
  EXPECT_TRUE(fails(join_part_sums(std::vector<PartSums>{{0, 8, 8, 1, {1}}}), Errc::frame_damaged));
  EXPECT_TRUE(fails(join_part_sums(std::vector<PartSums>{{0, 8, 8, 0, {1}}, {0, 9, 9, 0, {1}}}),
                    Errc::frame_damaged));
}

TEST(PartSums, OfEmptyTensorsJoinToNoRecord) {
  EXPECT_TRUE(join_part_sums(std::vector<PartSums>{{0, 0, 0, 0, {}}}).value().empty());
}

}  // namespace
}  // namespace torch_ckpt::format
