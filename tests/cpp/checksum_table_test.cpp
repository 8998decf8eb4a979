#include "format/checksum_table.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "format/crc32.h"
#include "support.h"

namespace torch_ckpt::format {
namespace {

using namespace test;

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = kKiB * kKiB;
constexpr std::uint64_t kGiB = kKiB * kMiB;

// The grammar of docs/format.md, byte by byte.
std::string number(std::uint64_t value, std::size_t bytes) {
  std::string out;
  for (std::size_t i = 0; i < bytes; ++i) out += static_cast<char>((value >> (8 * i)) & 0xff);
  return out;
}
std::string entry(std::uint64_t offset, std::uint32_t envelope_crc, std::uint8_t block_log2,
                  std::uint32_t blocks) {
  return number(offset, 8) + number(envelope_crc, 4) + number(block_log2, 1) + number(blocks, 3);
}
std::string sealed(const std::string& body) { return body + number(crc32(0, bytes_of(body)), 4); }

std::vector<RecordSums> some_records() {
  return {{0, 0, 64 * kKiB, {0xdeadbeef}, true},
          {100, 0x12345678, 0, {}},
          {std::uint64_t{1} << 40, 0xffffffff, kMiB, {1, 2, 3}}};
}

std::string some_table() { return encode_checksum_table(some_records()); }

TEST(BlockBytes, AreTheFewestThatMakeAtMost1024Blocks) {
  EXPECT_EQ(block_bytes_for(0), 16 * kKiB);
  EXPECT_EQ(block_bytes_for(1), 16 * kKiB);
  EXPECT_EQ(block_bytes_for(16 * kMiB), 16 * kKiB);
  EXPECT_EQ(block_bytes_for(16 * kMiB + 1), 32 * kKiB);
  EXPECT_EQ(block_bytes_for(128 * kMiB), 128 * kKiB);
  EXPECT_EQ(block_bytes_for(512 * kMiB), 512 * kKiB);
  EXPECT_EQ(block_bytes_for(512 * kMiB + 1), kMiB);
}

TEST(BlockBytes, AreAtMostOneMiBForLargePayloads) {
  EXPECT_EQ(block_bytes_for(kGiB), kMiB);
  EXPECT_EQ(block_bytes_for(kGiB + 1), kMiB);
  EXPECT_EQ(block_bytes_for(1024 * kGiB), kMiB);
}

TEST(BlockBytes, ExceedOneMiBIfTheTableCouldNotCountTheBlocks) {
  constexpr std::uint64_t kMost = (1 << 24) - 1;
  EXPECT_EQ(block_bytes_for(kMost * kMiB), kMiB);
  EXPECT_EQ(block_bytes_for(kMost * kMiB + 1), 2 * kMiB);
  const std::uint64_t block = block_bytes_for(std::numeric_limits<std::uint64_t>::max());
  EXPECT_TRUE(std::has_single_bit(block));
  EXPECT_LE(std::numeric_limits<std::uint64_t>::max() / block, kMost);
}

TEST(ChecksumTable, IsEncodedByTheGrammarOfTheDocumentation) {
  const std::string expected = "TCS1" + number(3, 4) + entry(0, 0, 0x80 | 16, 1) +
                               entry(100, 0x12345678, 0, 0) +
                               entry(std::uint64_t{1} << 40, 0xffffffff, 20, 3) +
                               number(0xdeadbeef, 4) + number(1, 4) + number(2, 4) + number(3, 4);
  EXPECT_EQ(some_table(), sealed(expected));
}

TEST(ChecksumTable, FindsEachRecord) {
  const std::string encoded = some_table();
  const auto table = ChecksumTable::decode(bytes_of(encoded));
  ASSERT_TRUE(ok(table));
  EXPECT_EQ(table->size(), 3);
  for (const RecordSums& record : some_records()) EXPECT_EQ(table->find(record.offset), record);
}

TEST(ChecksumTable, FindsEachOfManyRecords) {
  Random random(1);
  std::vector<RecordSums> records;
  std::uint64_t offset = 0;
  for (int i = 0; i < 1000; ++i) {
    RecordSums& record = records.emplace_back();
    record.offset = offset += random.between(1, std::uint64_t{1} << 50);
    record.envelope_crc = static_cast<std::uint32_t>(random.between(0, 0xffffffff));
    for (std::uint64_t n = random.any_scale(20); n > 0; --n) {
      record.block_bytes = std::uint64_t{1} << (16 + i % 5);
      record.block_crcs.push_back(static_cast<std::uint32_t>(random.between(0, 0xffffffff)));
    }
  }
  const std::string encoded = encode_checksum_table(records);
  const auto table = ChecksumTable::decode(bytes_of(encoded));
  ASSERT_TRUE(ok(table));
  for (const RecordSums& record : records) EXPECT_EQ(table->find(record.offset), record);
}

TEST(ChecksumTable, FindsNoRecordAtOtherOffsets) {
  const std::string encoded = some_table();
  const auto table = ChecksumTable::decode(bytes_of(encoded));
  ASSERT_TRUE(ok(table));
  for (const std::uint64_t offset :
       {std::uint64_t{1}, std::uint64_t{99}, std::uint64_t{101}, (std::uint64_t{1} << 40) + 1,
        std::numeric_limits<std::uint64_t>::max()}) {
    EXPECT_EQ(table->find(offset), std::nullopt) << offset;
  }
}

TEST(ChecksumTable, WithoutRecordsFindsNone) {
  const std::string encoded = encode_checksum_table({});
  const auto table = ChecksumTable::decode(bytes_of(encoded));
  ASSERT_TRUE(ok(table));
  EXPECT_EQ(table->size(), 0);
  EXPECT_EQ(table->find(0), std::nullopt);
}

TEST(ChecksumTable, NeedsSixteenBytesForARecordWithoutBlocks) {
  const std::vector<RecordSums> one(1);
  EXPECT_EQ(encode_checksum_table(one).size(), encode_checksum_table({}).size() + 16);
}

TEST(ChecksumTable, IsDamagedIfTruncatedAnywhere) {
  const std::string encoded = some_table();
  for (std::size_t length = 0; length < encoded.size(); ++length) {
    EXPECT_TRUE(
        fails(ChecksumTable::decode(bytes_of(encoded.substr(0, length))), Errc::checksum_mismatch))
        << length << " bytes";
  }
}

TEST(ChecksumTable, IsDamagedIfAnyBitIsFlipped) {
  std::string encoded = some_table();
  for (std::size_t bit = 0; bit < 8 * encoded.size(); ++bit) {
    const auto flipped = static_cast<char>(1 << (bit % 8));
    encoded[bit / 8] ^= flipped;
    EXPECT_TRUE(fails(ChecksumTable::decode(bytes_of(encoded)), Errc::checksum_mismatch))
        << "bit " << bit;
    encoded[bit / 8] ^= flipped;
  }
}

TEST(ChecksumTable, IsDamagedIfBytesFollow) {
  EXPECT_TRUE(
      fails(ChecksumTable::decode(bytes_of(some_table() + "more")), Errc::checksum_mismatch));
}

// Tables with a valid checksum, from a hostile writer or a later version.
class SealedTable : public ::testing::TestWithParam<std::pair<const char*, std::string>> {};

TEST_P(SealedTable, IsRefused) {
  const std::string encoded = sealed(GetParam().second);
  EXPECT_TRUE(fails(ChecksumTable::decode(bytes_of(encoded)), Errc::table_inconsistent));
}

INSTANTIATE_TEST_SUITE_P(
    With, SealedTable,
    ::testing::Values(
        std::pair("AnotherVersion", "TCS2" + number(0, 4)),
        std::pair("MoreRecordsThanItHas", "TCS1" + number(2, 4) + entry(0, 0, 0, 0)),
        std::pair("MoreRecordsThanAnyMachineHolds", "TCS1" + number(0xffffffff, 4)),
        std::pair("FewerRecordsThanItHas", "TCS1" + number(0, 4) + entry(0, 0, 0, 0)),
        std::pair("MoreBlocksThanItHas",
                  "TCS1" + number(1, 4) + entry(0, 0, 16, 0xffffff) + number(7, 4)),
        std::pair("MoreBlocksThanItHasInSum", "TCS1" + number(2, 4) + entry(0, 0, 16, 1) +
                                                  entry(1, 0, 16, 0xffffff) + number(7, 4)),
        std::pair("FewerBlocksThanItHas",
                  "TCS1" + number(1, 4) + entry(0, 0, 16, 1) + number(7, 4) + number(8, 4)),
        std::pair("APartOfABlock", "TCS1" + number(1, 4) + entry(0, 0, 16, 1) + number(7, 5)),
        std::pair("BlocksWithoutASize", "TCS1" + number(1, 4) + entry(0, 0, 0, 1) + number(7, 4)),
        std::pair("BlocksLargerThanAnyFile",
                  "TCS1" + number(1, 4) + entry(0, 0, 64, 1) + number(7, 4)),
        std::pair("ABlockSizeWithoutBlocks", "TCS1" + number(1, 4) + entry(0, 0, 16, 0)),
        std::pair("RecordsOutOfOrder",
                  "TCS1" + number(2, 4) + entry(5, 0, 0, 0) + entry(4, 0, 0, 0)),
        std::pair("TwoRecordsAtTheSameOffset",
                  "TCS1" + number(2, 4) + entry(5, 0, 0, 0) + entry(5, 0, 0, 0))),
    [](const auto& defect) { return defect.param.first; });

}  // namespace
}  // namespace torch_ckpt::format
