#include "engine/payload_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "format/crc32.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using namespace test;

constexpr std::uint64_t kBlock = 1024;

format::RecordSums sums_of(std::string_view payload) {
  format::RecordSums sums;
  sums.block_bytes = kBlock;
  for (std::size_t at = 0; at < payload.size(); at += kBlock) {
    sums.block_crcs.push_back(format::crc32(0, bytes_of(payload.substr(at, kBlock))));
  }
  return sums;
}

/// Passes [begin, end) of the payload in parts of random sizes.
Result<> take_in_pieces(PayloadCheck& check, Random& random, std::string_view payload,
                        std::uint64_t begin, std::uint64_t end) {
  while (begin < end) {
    const std::uint64_t bytes = std::min(end - begin, random.between(1, 3000));
    if (auto taken = check.update(begin, bytes_of(payload.substr(begin, bytes))); !taken) {
      return taken;
    }
    begin += bytes;
  }
  return {};
}

class BlockCheck : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  Random random_{GetParam()};
  const std::string payload_ = random_.bytes(GetParam());
  const format::RecordSums sums_ = sums_of(payload_);
};

TEST_P(BlockCheck, AcceptsIntactBytesInAnyParts) {
  for (int round = 0; round < 50; ++round) {
    PayloadCheck check = PayloadCheck::by_blocks(sums_, payload_.size());
    ASSERT_TRUE(ok(take_in_pieces(check, random_, payload_, 0, payload_.size())));
  }
}

TEST_P(BlockCheck, ReportsADamagedBlockWithItsOffset) {
  for (int round = 0; round < 50; ++round) {
    const std::uint64_t at = random_.between(0, payload_.size() - 1);
    std::string damaged = payload_;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << random_.between(0, 7)));
    PayloadCheck check = PayloadCheck::by_blocks(sums_, payload_.size());
    const auto taken = take_in_pieces(check, random_, damaged, 0, damaged.size());
    ASSERT_TRUE(fails(taken, Errc::checksum_mismatch)) << "byte " << at;
    ASSERT_EQ(taken.error().offset, at / kBlock * kBlock) << "byte " << at;
  }
}

TEST_P(BlockCheck, MayBeginAtAnyBlock) {
  const std::uint64_t blocks = sums_.block_crcs.size();
  for (int round = 0; round < 50; ++round) {
    PayloadCheck check = PayloadCheck::by_blocks(sums_, payload_.size());
    for (std::uint64_t first = random_.between(0, 2); first < blocks;) {
      const std::uint64_t last = random_.between(first + 1, blocks);
      const std::uint64_t end = std::min<std::uint64_t>(last * kBlock, payload_.size());
      ASSERT_TRUE(ok(take_in_pieces(check, random_, payload_, first * kBlock, end)));
      first = last + random_.between(0, 2);
    }
  }
}

TEST_P(BlockCheck, IgnoresADamagedBlockThatIsNotRead) {
  std::string damaged = payload_;
  damaged[0] = static_cast<char>(damaged[0] ^ 1);
  PayloadCheck check = PayloadCheck::by_blocks(sums_, payload_.size());
  const std::uint64_t second = std::min<std::uint64_t>(kBlock, damaged.size());
  EXPECT_TRUE(ok(take_in_pieces(check, random_, damaged, second, damaged.size())));
}

INSTANTIATE_TEST_SUITE_P(Bytes, BlockCheck,
                         ::testing::Values(1, kBlock - 1, kBlock, kBlock + 1, 5 * kBlock - 7,
                                           8 * kBlock));

TEST(PayloadCheck, ByBlocksAcceptsNoBytes) {
  const format::RecordSums none = sums_of("");
  PayloadCheck check = PayloadCheck::by_blocks(none, 0);
  EXPECT_TRUE(ok(check.update(0, {})));
}

TEST(PayloadCheck, ReportsTheExpectedAndTheActualChecksum) {
  const std::string payload = "hello";
  format::RecordSums sums = sums_of(payload);
  sums.block_crcs[0] = 0x0000abcd;
  PayloadCheck check = PayloadCheck::by_blocks(sums, payload.size());
  const auto taken = check.update(0, bytes_of(payload));
  ASSERT_TRUE(fails(taken, Errc::checksum_mismatch));
  EXPECT_NE(taken.error().detail.str().find("metadata has 0x0000abcd"), std::string::npos)
      << taken.error().detail;
  EXPECT_NE(taken.error().detail.str().find("CRC-32 is 0x3610a686"), std::string::npos)
      << taken.error().detail;
}

TEST(PayloadCheck, OfOneSumCoversAllBytes) {
  Random random(7);
  const std::string payload = random.bytes(20'000);
  PayloadCheck check = PayloadCheck::one_sum();
  ASSERT_TRUE(ok(take_in_pieces(check, random, payload, 0, payload.size())));
  EXPECT_EQ(check.sum().first, format::crc32(0, bytes_of(payload)));
  EXPECT_EQ(check.sum().second, payload.size());
}

TEST(PayloadCheck, SumsOfPiecesCanBeJoined) {
  Random random(8);
  const std::string payload = random.bytes(20'000);
  std::uint32_t joined = 0;
  for (std::uint64_t begin = 0; begin < payload.size(); begin += 7000) {
    const std::uint64_t end = std::min<std::uint64_t>(payload.size(), begin + 7000);
    PayloadCheck check = PayloadCheck::one_sum();
    ASSERT_TRUE(ok(take_in_pieces(check, random, payload, begin, end)));
    joined = format::crc32_join(joined, check.sum().first, check.sum().second);
  }
  EXPECT_EQ(joined, format::crc32(0, bytes_of(payload)));
}

TEST(PayloadCheck, ByDefaultChecksNothing) {
  PayloadCheck check;
  EXPECT_TRUE(ok(check.update(5, bytes_of("hello"))));
}

}  // namespace
}  // namespace torch_ckpt::engine
