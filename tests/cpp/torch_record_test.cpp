#include "format/torch_record.h"

#include <gtest/gtest.h>

#include "format/crc32.h"
#include "format/zip.h"
#include "stock_records.h"
#include "support.h"

namespace torch_ckpt::format {
namespace {

using namespace test;

// A little-endian number of `count` bytes.
std::uint64_t number(std::string_view bytes, std::size_t at, std::size_t count) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < count; ++i) {
    value |= std::uint64_t{static_cast<unsigned char>(bytes.at(at + i))} << (8 * i);
  }
  return value;
}

/// Offset in the tail of the central directory's entry for `name`.
std::size_t directory_entry(std::string_view tail, std::string_view name) {
  const auto at = tail.rfind(name);
  EXPECT_NE(at, std::string_view::npos);
  EXPECT_EQ(number(tail, at - zip::kDirectoryEntryBytes, 4), zip::kDirectoryEntry);
  return at - zip::kDirectoryEntryBytes;
}

/// Offset of the local header for `name`.
std::size_t local_header(std::string_view bytes, std::string_view name) {
  const auto at = bytes.find(name);
  EXPECT_NE(at, std::string_view::npos);
  EXPECT_EQ(number(bytes, at - zip::kLocalHeaderBytes, 4), zip::kLocalHeader);
  return at - zip::kLocalHeaderBytes;
}

struct Parts {
  RecordLayout layout;
  std::string head;
  std::string tail;
};

Parts parts_of(std::uint64_t payload_bytes, std::uint32_t crc = 0xdeadbeef) {
  const std::string pickle = encode_tensor_pickle(row_major("uint8", {payload_bytes}));
  const RecordTemplate record(pickle, payload_bytes);
  return {record.layout(), record.head(), record.encode_tail(crc)};
}

TEST(TorchRecord, OfAScalarEqualsStockTorchsByteForByte) {
  const RecordTemplate record(encode_tensor_pickle(row_major("int64", {})), 8);
  EXPECT_EQ(record.head(), test::stock_scalar_head());
  const std::string_view payload("\3\0\0\0\0\0\0\0", 8);
  EXPECT_EQ(record.encode_tail(crc32(0, bytes_of(payload))), test::stock_scalar_tail());
}

class StockRecordBytes : public ::testing::TestWithParam<StockRecord> {};

TEST_P(StockRecordBytes, EqualThoseOfStockTorch) {
  const StockRecord& stock = GetParam();
  const RecordTemplate record(stock.pickle, stock.payload_bytes);
  EXPECT_EQ(record.head().size(), stock.head_bytes);
  EXPECT_EQ(record.head_crc(), stock.head_crc);
  EXPECT_EQ(crc32(0, bytes_of(record.head())), stock.head_crc);
  const std::string tail = record.encode_tail(stock.payload_crc);
  EXPECT_EQ(tail.size(), stock.tail_bytes);
  EXPECT_EQ(crc32(0, bytes_of(tail)), stock.tail_crc);
}

TEST_P(StockRecordBytes, HaveTheLayoutThatWasComputedBefore) {
  const StockRecord& stock = GetParam();
  const RecordLayout layout = RecordTemplate(stock.pickle, stock.payload_bytes).layout();
  EXPECT_EQ(layout.head_bytes, stock.head_bytes);
  EXPECT_EQ(layout.payload_bytes, stock.payload_bytes);
  EXPECT_EQ(layout.tail_bytes, stock.tail_bytes);
}

INSTANTIATE_TEST_SUITE_P(Records, StockRecordBytes, ::testing::ValuesIn(stock_records()),
                         [](const auto& record) { return record.param.name; });

TEST(TorchRecord, HasTheSizesOfItsLayout) {
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    const Parts parts = parts_of(random.any_scale(std::uint64_t{1} << 45));
    ASSERT_EQ(parts.head.size(), parts.layout.head_bytes);
    ASSERT_EQ(parts.tail.size(), parts.layout.tail_bytes);
  }
}

TEST(TorchRecord, AlignsThePayloadTo64BytesForAnyPickle) {
  for (std::size_t length = 1; length < 400; ++length) {
    const std::string pickle(length, 'x');
    ASSERT_EQ(RecordTemplate(pickle, 1000).layout().head_bytes % 64, 0) << length;
    ASSERT_EQ(RecordTemplate(pickle, std::uint64_t{5} << 30).layout().head_bytes % 64, 0) << length;
  }
}

TEST(TorchRecord, WithAnEmptyPayloadHasNoDescriptorAndNoChecksum) {
  const Parts parts = parts_of(0);
  EXPECT_EQ(number(parts.tail, 0, 4), zip::kLocalHeader);
  const std::size_t entry = directory_entry(parts.tail, "archive/data/0");
  EXPECT_EQ(number(parts.tail, entry + 8, 2), zip::kFlagUtf8);
  EXPECT_EQ(number(parts.tail, entry + 16, 4), 0);
}

TEST(TorchRecord, BelowFourGibibytesHas32BitSizes) {
  const std::uint64_t bytes = 0xfffffffe;
  const Parts parts = parts_of(bytes);
  EXPECT_EQ(number(parts.tail, 0, 4), zip::kDescriptor);
  EXPECT_EQ(number(parts.tail, 8, 4), bytes);
  EXPECT_EQ(number(parts.tail, 12, 4), bytes);
  EXPECT_EQ(number(parts.tail, 16, 4), zip::kLocalHeader);
  const std::size_t entry = directory_entry(parts.tail, "archive/data/0");
  EXPECT_EQ(number(parts.tail, entry + 20, 4), bytes);
  EXPECT_EQ(number(parts.tail, entry + 24, 4), bytes);
  EXPECT_EQ(number(parts.tail, entry + 30, 2), 0) << "no extra field";
}

TEST(TorchRecord, WithAHeaderAboveFourGibibytesHasItsOffsetInZip64) {
  const std::uint64_t bytes = 0xfffffffe;
  const Parts parts = parts_of(bytes);
  const std::uint64_t offset = parts.layout.head_bytes + bytes + 16;
  const std::size_t header = local_header(parts.tail, "archive/version");
  const std::size_t extra = header + zip::kLocalHeaderBytes + std::string("archive/version").size();
  EXPECT_EQ(number(parts.tail, extra, 2), zip::kExtraZip64);
  EXPECT_EQ(number(parts.tail, extra + 2, 2), 8);
  EXPECT_EQ(number(parts.tail, extra + 4, 8), offset);
  const std::size_t entry = directory_entry(parts.tail, "archive/version");
  EXPECT_EQ(number(parts.tail, entry + 42, 4), zip::kMax32);
  const std::size_t entry_extra =
      entry + zip::kDirectoryEntryBytes + std::string("archive/version").size();
  EXPECT_EQ(number(parts.tail, entry_extra, 2), zip::kExtraZip64);
  EXPECT_EQ(number(parts.tail, entry_extra + 4, 8), offset);
}

class Zip64Record : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(Zip64Record, HasItsSizesInTheExtraField) {
  const std::uint64_t bytes = GetParam();
  const Parts parts = parts_of(bytes);
  const std::string name = "archive/data/0";

  const std::size_t header = local_header(parts.head, name);
  EXPECT_EQ(number(parts.head, header + 14, 4), 0) << "crc: see the descriptor";
  EXPECT_EQ(number(parts.head, header + 18, 4), 0) << "sizes: see the extra field";
  EXPECT_EQ(number(parts.head, header + 22, 4), 0);
  const std::size_t extra = header + zip::kLocalHeaderBytes + name.size();
  EXPECT_EQ(number(parts.head, extra, 2), zip::kExtraZip64);
  EXPECT_EQ(number(parts.head, extra + 2, 2), 16);
  EXPECT_EQ(number(parts.head, extra + 4, 8), bytes);
  EXPECT_EQ(number(parts.head, extra + 12, 8), 0);

  const std::size_t entry = directory_entry(parts.tail, name);
  EXPECT_EQ(number(parts.tail, entry + 20, 4), zip::kMax32);
  EXPECT_EQ(number(parts.tail, entry + 24, 4), zip::kMax32);
  EXPECT_EQ(number(parts.tail, entry + 30, 2), 20);
  const std::size_t entry_extra = entry + zip::kDirectoryEntryBytes + name.size();
  EXPECT_EQ(number(parts.tail, entry_extra, 2), zip::kExtraZip64);
  EXPECT_EQ(number(parts.tail, entry_extra + 2, 2), 16);
  EXPECT_EQ(number(parts.tail, entry_extra + 4, 8), bytes);
  EXPECT_EQ(number(parts.tail, entry_extra + 12, 8), bytes);
}

TEST_P(Zip64Record, HasADescriptorWith64BitSizes) {
  const Parts parts = parts_of(GetParam(), 0xdeadbeef);
  EXPECT_EQ(number(parts.tail, 0, 4), zip::kDescriptor);
  EXPECT_EQ(number(parts.tail, 4, 4), 0xdeadbeef);
  EXPECT_EQ(number(parts.tail, 8, 8), GetParam());
  EXPECT_EQ(number(parts.tail, 16, 8), GetParam());
  EXPECT_EQ(number(parts.tail, 24, 4), zip::kLocalHeader);
}

TEST_P(Zip64Record, HasTheDirectorysOffsetInTheZip64EndRecord) {
  const Parts parts = parts_of(GetParam());
  const std::size_t end = parts.tail.size() - zip::kEndBytes;
  const std::size_t locator = end - zip::kEnd64LocatorBytes;
  const std::size_t end64 = locator - zip::kEnd64Bytes;
  const std::uint64_t before_tail = parts.layout.head_bytes + GetParam();
  EXPECT_EQ(number(parts.tail, end, 4), zip::kEnd);
  EXPECT_EQ(number(parts.tail, end + 16, 4), zip::kMax32);
  EXPECT_EQ(number(parts.tail, locator, 4), zip::kEnd64Locator);
  EXPECT_EQ(number(parts.tail, locator + 8, 8), before_tail + end64);
  EXPECT_EQ(number(parts.tail, end64, 4), zip::kEnd64);
  EXPECT_EQ(number(parts.tail, end64 + 32, 8), 7) << "entries";
  EXPECT_EQ(number(parts.tail, end64 + 48, 8),
            before_tail + directory_entry(parts.tail, "archive/data.pkl"));
}

INSTANTIATE_TEST_SUITE_P(Sizes, Zip64Record,
                         ::testing::Values(0xffffffff, 0x100000000, std::uint64_t{5} << 30,
                                           std::uint64_t{1} << 44));

TEST(TorchRecord, IncludesThePayloadsChecksumInTheSerializationId) {
  const Parts one = parts_of(100, 1);
  const Parts two = parts_of(100, 2);
  const std::string hash = "15728199511854643026";
  const auto at = one.tail.find(hash);
  ASSERT_NE(at, std::string::npos);
  EXPECT_NE(one.tail.substr(at, 40), two.tail.substr(at, 40));
  EXPECT_EQ(one.tail.size(), two.tail.size());
}

}  // namespace
}  // namespace torch_ckpt::format
