#include "format/record_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>

#include "checked_math.h"
#include "engine/record_reader.h"
#include "format/crc32.h"
#include "format/torch_record.h"
#include "format/zip.h"
#include "stock_records.h"
#include "support.h"

namespace torch_ckpt::format {
namespace {

using namespace test;

Result<RecordIndex> index(std::string_view record) {
  engine::RecordInMemory bytes(bytes_of(record));
  return index_record(bytes);
}

// A record whose payload is a hole that must not be read.
class HollowRecord final : public RecordBytes {
 public:
  HollowRecord(const TensorHeader& header, std::uint32_t crc)
      : payload_bytes_(header.storage_bytes) {
    const RecordTemplate record(encode_tensor_pickle(header), payload_bytes_);
    head_ = record.head();
    tail_ = record.encode_tail(crc);
  }
  std::uint64_t size() const override { return head_.size() + payload_bytes_ + tail_.size(); }
  std::uint64_t payload_offset() const { return head_.size(); }
  Result<std::span<const std::byte>> at(std::uint64_t offset, std::uint64_t length) override {
    EXPECT_TRUE(inside(offset, length, size()));
    const std::uint64_t tail_at = head_.size() + payload_bytes_;
    if (inside(offset, length, head_.size())) return bytes_of(head_).subspan(offset, length);
    EXPECT_GE(offset, tail_at) << "the payload was read";
    return bytes_of(tail_).subspan(offset - tail_at, length);
  }

 private:
  std::uint64_t payload_bytes_;
  std::string head_;
  std::string tail_;
};

// An entry of an archive that torch would not write: in any order, with any flaw.
struct ZipEntry {
  std::string name;
  std::string data;
  std::uint16_t method = 0;
  std::string extra = {};  // of the entry in the directory
};

void put(std::string& out, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i, value >>= 8) out += static_cast<char>(value & 0xff);
}

std::string zip_of(const std::vector<ZipEntry>& entries, std::size_t comment_bytes = 0) {
  std::string out;
  std::string directory;
  for (const ZipEntry& entry : entries) {
    const std::uint32_t crc = crc32(0, bytes_of(entry.data));
    put(directory, zip::kDirectoryEntry, 4);
    put(directory, 0, 6);
    put(directory, entry.method, 2);
    put(directory, 0, 4);
    put(directory, crc, 4);
    put(directory, entry.data.size(), 4);
    put(directory, entry.data.size(), 4);
    put(directory, entry.name.size(), 2);
    put(directory, entry.extra.size(), 2);
    put(directory, comment_bytes, 2);
    put(directory, 0, 8);
    put(directory, out.size(), 4);
    directory += entry.name + entry.extra + std::string(comment_bytes, '#');
    put(out, zip::kLocalHeader, 4);
    put(out, 0, 4);
    put(out, entry.method, 2);
    put(out, 0, 4);
    put(out, crc, 4);
    put(out, entry.data.size(), 4);
    put(out, entry.data.size(), 4);
    put(out, entry.name.size(), 2);
    put(out, 0, 2);
    out += entry.name + entry.data;
  }
  const std::size_t at = out.size();
  out += directory;
  put(out, zip::kEnd, 4);
  put(out, 0, 4);
  put(out, entries.size(), 2);
  put(out, entries.size(), 2);
  put(out, directory.size(), 4);
  put(out, at, 4);
  put(out, 0, 2);
  return out;
}

const std::string& row_pickle() {
  static const std::string pickle = encode_tensor_pickle(row_major("uint8", {5}));
  return pickle;
}

/// The entries that torch.load needs.
std::vector<ZipEntry> minimal_entries() {
  return {{"x/data.pkl", row_pickle()}, {"x/data/0", "hello"}, {"x/version", "3\n"}};
}

std::vector<ZipEntry> with(std::vector<ZipEntry> entries, ZipEntry entry) {
  entries.push_back(std::move(entry));
  return entries;
}

/// Overwrites the number at `at`.
std::string patched(std::string record, std::size_t at, std::uint64_t value, std::size_t bytes) {
  std::string number;
  put(number, value, bytes);
  return record.replace(at, bytes, number);
}

std::string small_record() { return record_of(row_major("uint8", {5}), "hello"); }

// Checks everything that a load session relies on.
void expect_sound(const RecordIndex& found, std::uint64_t record_bytes) {
  EXPECT_TRUE(inside(found.payload_offset, found.payload_bytes, record_bytes));
  ASSERT_NE(found.header.dtype, nullptr);
  EXPECT_EQ(found.header.sizes.size(), found.header.strides.size());
  EXPECT_EQ(found.header.storage_bytes, found.payload_bytes);
  unsigned __int128 last = found.header.storage_offset;
  bool empty = false;
  for (std::size_t d = 0; d < found.header.sizes.size(); ++d) {
    if (found.header.sizes[d] == 0) {
      empty = true;
      break;
    }
    last += static_cast<unsigned __int128>(found.header.sizes[d] - 1) * found.header.strides[d];
  }
  EXPECT_TRUE(empty || (last + 1) * found.header.dtype->item_bytes <= found.payload_bytes)
      << "an element lies outside the storage";
}

TEST(RecordIndex, FindsThePayloadOfARecord) {
  const std::string record = small_record();
  const auto found = index(record);
  ASSERT_TRUE(ok(found));
  EXPECT_EQ(record.substr(found->payload_offset, found->payload_bytes), "hello");
  EXPECT_EQ(found->payload_crc, crc32(0, bytes_of("hello")));
  EXPECT_EQ(found->header.sizes, std::vector<std::uint64_t>{5});
}

TEST(RecordIndex, FindsAnEmptyPayload) {
  const auto found = index(record_of(row_major("float32", {0, 3}), ""));
  ASSERT_TRUE(ok(found));
  EXPECT_EQ(found->payload_bytes, 0);
}

class StockRecordIndex : public ::testing::TestWithParam<test::StockRecord> {};

TEST_P(StockRecordIndex, FindsThePayloadWithoutReadingIt) {
  HollowRecord record(GetParam().header(), GetParam().payload_crc);
  const auto found = index_record(record);
  ASSERT_TRUE(ok(found));
  EXPECT_EQ(found->payload_offset, GetParam().head_bytes);
  EXPECT_EQ(found->payload_bytes, GetParam().payload_bytes);
  EXPECT_EQ(found->payload_crc, GetParam().payload_crc);
  EXPECT_EQ(found->header.sizes, GetParam().sizes);
}

INSTANTIATE_TEST_SUITE_P(Records, StockRecordIndex, ::testing::ValuesIn(test::stock_records()),
                         [](const auto& record) { return record.param.name; });

class HollowRecordIndex : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(HollowRecordIndex, FindsThePayloadNearFourGibibytes) {
  HollowRecord record(row_major("uint8", {GetParam()}), 0x12345678);
  const auto found = index_record(record);
  ASSERT_TRUE(ok(found));
  EXPECT_EQ(found->payload_offset, record.payload_offset());
  EXPECT_EQ(found->payload_bytes, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Sizes, HollowRecordIndex,
                         ::testing::Values(0xfffffc00, 0xfffffffe, 0xffffffff, 0x100000000,
                                           std::uint64_t{5} << 30, std::uint64_t{1} << 50));

TEST(RecordIndex, AcceptsArchivesWithoutZip64OrOptionalEntries) {
  const std::string record = zip_of(minimal_entries());
  const auto found = index(record);
  ASSERT_TRUE(ok(found));
  EXPECT_EQ(record.substr(found->payload_offset, 5), "hello");
}

TEST(RecordIndex, AcceptsEntriesInAnyOrderAndOtherEntries) {
  const std::string record = zip_of({{"m/version", "3\n"},
                                     {"m/.extra", "anything"},
                                     {"m/data/0", "hello"},
                                     {"m/byteorder", "little"},
                                     {"m/data.pkl", row_pickle()}});
  const auto found = index(record);
  ASSERT_TRUE(ok(found));
  EXPECT_EQ(record.substr(found->payload_offset, 5), "hello");
}

TEST(RecordIndex, SkipsTheCommentsOfEntries) {
  EXPECT_TRUE(ok(index(zip_of(minimal_entries(), 300))));
}

TEST(RecordIndex, OfTooFewBytesIsNotAZip) {
  EXPECT_TRUE(fails(index(""), Errc::not_a_zip));
  EXPECT_TRUE(fails(index("PK\3\4"), Errc::not_a_zip));
}

TEST(RecordIndex, WithoutAnEndRecordIsNotAZip) {
  EXPECT_TRUE(fails(index(std::string(2000, 'x')), Errc::not_a_zip));
  EXPECT_TRUE(fails(index(small_record() + "trailing"), Errc::not_a_zip));
}

TEST(RecordIndex, RejectsCompressedEntries) {
  auto entries = minimal_entries();
  entries[1].method = 8;
  EXPECT_TRUE(fails(index(zip_of(entries)), Errc::zip_compressed));
}

TEST(RecordIndex, RejectsAnArchiveWithoutPickleOrVersion) {
  EXPECT_TRUE(
      fails(index(zip_of({{"x/data/0", "hello"}, {"x/version", "3\n"}})), Errc::record_missing));
  EXPECT_TRUE(fails(index(zip_of({{"x/data.pkl", row_pickle()}, {"x/data/0", "hello"}})),
                    Errc::record_missing));
}

TEST(RecordIndex, LeavesArchivesOfOtherThanOneTensorToTorch) {
  EXPECT_TRUE(fails(index(zip_of({{"x/data.pkl", row_pickle()}, {"x/version", "3\n"}})),
                    Errc::pickle_unknown));
  EXPECT_TRUE(
      fails(index(zip_of(with(minimal_entries(), {"x/data/1", "second"}))), Errc::pickle_unknown));
}

TEST(RecordIndex, LeavesBigEndianArchivesToTorch) {
  for (const std::string_view order : {"big", "littl", "little\n", ""}) {
    EXPECT_TRUE(fails(index(zip_of(with(minimal_entries(), {"x/byteorder", std::string(order)}))),
                      Errc::pickle_unknown))
        << order;
  }
}

TEST(RecordIndex, LeavesAHugePickleToTorch) {
  auto entries = minimal_entries();
  entries[0].data = std::string(17 << 10, 'x');
  EXPECT_TRUE(fails(index(zip_of(entries)), Errc::pickle_unknown));
}

TEST(RecordIndex, LeavesArchivesWithManyEntriesToTorch) {
  auto entries = minimal_entries();
  for (int i = 0; i < 40; ++i) entries.push_back({"x/extra" + std::to_string(i), "1"});
  EXPECT_TRUE(fails(index(zip_of(entries)), Errc::pickle_unknown));
}

TEST(RecordIndex, RejectsEntriesInTwoFoldersOrNone) {
  EXPECT_TRUE(
      fails(index(zip_of(with(minimal_entries(), {"y/other", "1"}))), Errc::zip_inconsistent));
  EXPECT_TRUE(
      fails(index(zip_of(with(minimal_entries(), {"other", "1"}))), Errc::zip_inconsistent));
}

TEST(RecordIndex, RejectsTwoEntriesWithTheSameName) {
  for (const char* name : {"x/data/0", "x/data.pkl", "x/other"}) {
    const auto once = with(minimal_entries(), {"x/other", "1"});
    EXPECT_TRUE(fails(index(zip_of(with(once, {name, "again"}))), Errc::zip_inconsistent)) << name;
  }
}

TEST(RecordIndex, RejectsAPickleWithAnotherStorageSizeThanThePayload) {
  auto entries = minimal_entries();
  entries[1].data = "hell";
  EXPECT_TRUE(fails(index(zip_of(entries)), Errc::zip_inconsistent));
}

TEST(RecordIndex, RejectsElementsOutsideTheStorage) {
  TensorHeader header = row_major("uint8", {5});
  header.storage_offset = 1;
  EXPECT_TRUE(fails(index(record_of(header, "hello")), Errc::zip_inconsistent));
  header = row_major("uint8", {5});
  header.strides = {2};
  EXPECT_TRUE(fails(index(record_of(header, "hello")), Errc::zip_inconsistent));
  header = row_major("uint8", {2, 5});
  header.strides = {~std::uint64_t{0}, 1};
  header.storage_bytes = 5;
  EXPECT_TRUE(fails(index(record_of(header, "hello")), Errc::zip_inconsistent));
  // Neither step overflows, but their sum does.
  header = row_major("uint8", {2, 2});
  header.strides = {std::uint64_t{1} << 63, std::uint64_t{1} << 63};
  header.storage_bytes = 5;
  EXPECT_TRUE(fails(index(record_of(header, "hello")), Errc::zip_inconsistent));
}

// A record whose nth read fails.
class FailingRecord final : public RecordBytes {
 public:
  FailingRecord(std::string_view bytes, int nth) : record_(bytes_of(bytes)), left_(nth) {}
  std::uint64_t size() const override { return record_.size(); }
  Result<std::span<const std::byte>> at(std::uint64_t offset, std::uint64_t length) override {
    if (--left_ == 0) return system_error(EIO, "pread", "file", offset);
    return record_.at(offset, length);
  }

 private:
  engine::RecordInMemory record_;
  int left_;
};

TEST(RecordIndex, ReportsTheErrorOfAnyRead) {
  const std::string record = small_record();
  int failed = 0;
  while (true) {
    FailingRecord failing(record, failed + 1);
    const auto found = index_record(failing);
    if (found) break;
    EXPECT_EQ(found.error().sys_errno, EIO) << found.error().message();
    ASSERT_LT(++failed, 100);
  }
  // The reads of the end, of the zip64 locator and end, of the directory, and of the pickle.
  EXPECT_GE(failed, 5);
}

TEST(RecordIndex, AcceptsAnExpandedTensor) {
  TensorHeader header = row_major("uint8", {1000, 5});
  header.strides = {0, 1};
  header.storage_bytes = 5;
  EXPECT_TRUE(ok(index(record_of(header, "hello"))));
}

TEST(RecordIndex, RejectsADirectoryOutsideTheRecord) {
  const std::string record = small_record();
  const std::size_t end64 =
      record.size() - zip::kEndBytes - zip::kEnd64LocatorBytes - zip::kEnd64Bytes;
  EXPECT_TRUE(fails(index(patched(record, end64 + 48, record.size(), 8)), Errc::zip_inconsistent));
  EXPECT_TRUE(
      fails(index(patched(record, end64 + 48, ~std::uint64_t{0}, 8)), Errc::zip_inconsistent));
}

TEST(RecordIndex, LeavesADirectoryTooLargeForOneTensorToTorch) {
  const std::string record = small_record();
  const std::size_t end64 =
      record.size() - zip::kEndBytes - zip::kEnd64LocatorBytes - zip::kEnd64Bytes;
  EXPECT_TRUE(
      fails(index(patched(record, end64 + 40, std::uint64_t{1} << 60, 8)), Errc::pickle_unknown));
}

TEST(RecordIndex, RejectsALocatorThatPointsToNoEndRecord) {
  const std::string record = small_record();
  const std::size_t locator = record.size() - zip::kEndBytes - zip::kEnd64LocatorBytes;
  EXPECT_TRUE(fails(index(patched(record, locator + 8, ~std::uint64_t{0} - 20, 8)),
                    Errc::zip_inconsistent));
  EXPECT_TRUE(fails(index(patched(record, locator + 8, 0, 8)), Errc::zip_inconsistent));
}

TEST(RecordIndex, RejectsAnEntryOutsideTheRecord) {
  const std::string record = zip_of(minimal_entries());
  const std::size_t payload_entry = record.rfind("x/data/0") - zip::kDirectoryEntryBytes;
  EXPECT_TRUE(fails(index(patched(record, payload_entry + 42, record.size() - 10, 4)),
                    Errc::zip_inconsistent));
  const std::string longer = patched(patched(record, payload_entry + 20, 0x7fffffff, 4),
                                     payload_entry + 24, 0x7fffffff, 4);
  EXPECT_TRUE(fails(index(longer), Errc::zip_inconsistent));
}

TEST(RecordIndex, DoesNotReadAMissingZip64FieldAsTheLargestNumber) {
  const std::string record = zip_of(minimal_entries());
  const std::size_t payload_entry = record.rfind("x/data/0") - zip::kDirectoryEntryBytes;
  const std::string without = patched(patched(record, payload_entry + 20, 0xffffffff, 4),
                                      payload_entry + 24, 0xffffffff, 4);
  EXPECT_TRUE(fails(index(without), Errc::zip_inconsistent));
}

TEST(RecordIndex, ReadsZip64FieldsAfterOtherExtraFields) {
  auto entries = minimal_entries();
  std::string& extra = entries[1].extra;
  put(extra, 0x4246, 2);
  put(extra, 3, 2);
  extra += "ZZZ";
  put(extra, zip::kExtraZip64, 2);
  put(extra, 16, 2);
  put(extra, 5, 8);
  put(extra, 5, 8);
  const std::string record = zip_of(entries);
  const std::size_t entry = record.rfind("x/data/0") - zip::kDirectoryEntryBytes;
  EXPECT_TRUE(
      ok(index(patched(patched(record, entry + 20, 0xffffffff, 4), entry + 24, 0xffffffff, 4))));
}

TEST(RecordIndex, RejectsATruncatedZip64Field) {
  auto entries = minimal_entries();
  put(entries[1].extra, zip::kExtraZip64, 2);
  put(entries[1].extra, 4, 2);
  put(entries[1].extra, 5, 4);
  const std::string record = zip_of(entries);
  const std::size_t entry = record.rfind("x/data/0") - zip::kDirectoryEntryBytes;
  const auto found =
      index(patched(patched(record, entry + 20, 0xffffffff, 4), entry + 24, 0xffffffff, 4));
  ASSERT_TRUE(fails(found, Errc::zip_inconsistent));
  EXPECT_EQ(found.error().detail, "a zip64 field is truncated");
}

TEST(RecordIndex, RejectsARecordTruncatedAnywhere) {
  for (const std::string& record : {small_record(), zip_of(minimal_entries())}) {
    for (std::size_t length = 0; length < record.size(); ++length) {
      ASSERT_FALSE(index(std::string_view(record).substr(0, length)).has_value())
          << "cut to " << length;
    }
  }
}

TEST(RecordIndex, OfARecordWithAnyByteChangedStaysInsideTheRecord) {
  const std::string records[] = {small_record(), zip_of(minimal_entries(), 3),
                                 record_of(row_major("uint16", {2, 1, 3}), std::string(12, 'x')),
                                 record_of(row_major("float32", {0}), "")};
  for (const std::string& record : records) {
    for (std::size_t at = 0; at < record.size(); ++at) {
      std::string damaged = record;
      for (const int change : {1, 2, 4, 8, 16, 32, 64, 128, 255}) {
        damaged[at] = static_cast<char>(record[at] ^ change);
        if (const auto found = index(damaged)) expect_sound(*found, damaged.size());
        if (HasFailure()) FAIL() << "byte " << at << " changed by " << change;
      }
    }
  }
}

TEST(RecordIndex, DetectsADamagedPickleByItsChecksum) {
  std::string record = small_record();
  record[record.find("cpu")] = 'C';
  EXPECT_TRUE(fails(index(record), Errc::checksum_mismatch));
}

TEST(RecordIndex, OfAnyPickleWithAValidChecksumStaysInsideTheRecord) {
  for (std::size_t at = 0; at < row_pickle().size(); ++at) {
    for (int change = 1; change < 256; ++change) {
      auto entries = minimal_entries();
      entries[0].data[at] = static_cast<char>(entries[0].data[at] ^ change);
      const std::string record = zip_of(entries);
      if (const auto found = index(record)) expect_sound(*found, record.size());
      ASSERT_FALSE(HasFailure()) << "byte " << at << " changed by " << change;
    }
  }
}

TEST(RecordIndex, OfRandomNumbersInAllFieldsStaysInsideTheRecord) {
  Random random(1);
  const std::string record = small_record();
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = record;
    for (std::uint64_t changes = random.between(1, 4); changes > 0; --changes) {
      const std::size_t width = std::size_t{1} << random.between(0, 3);
      const std::size_t at = random.between(0, record.size() - width);
      damaged = patched(damaged, at, random.any_scale(~std::uint64_t{0}), width);
    }
    if (const auto found = index(damaged)) expect_sound(*found, damaged.size());
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

// --- check_archive ---------------------------------------------------------------------------

Result<> check(std::string_view record) {
  engine::RecordInMemory bytes(bytes_of(record));
  return check_archive(bytes);
}

std::string object_archive() {
  return zip_of({{"o/data.pkl", "an object's pickle"},
                 {"o/data/0", "its first tensor"},
                 {"o/data/1", "its second tensor"},
                 {"o/version", "3\n"}});
}

// --- large directories ---------------------------------------------------------------------------

// A sparse archive: zeros, except for some bytes at its end. Counts the largest read.
class SparseRecord final : public RecordBytes {
 public:
  SparseRecord(std::uint64_t size, std::string_view tail)
      : size_(size), tail_(bytes_of(tail).begin(), bytes_of(tail).end()) {}
  std::uint64_t size() const override { return size_; }
  std::uint64_t largest_read() const { return largest_; }
  Result<std::span<const std::byte>> at(std::uint64_t offset, std::uint64_t length) override {
    EXPECT_TRUE(inside(offset, length, size_));
    largest_ = std::max(largest_, length);
    if (length > kLargest) return format_error(Errc::internal, "a read of too many bytes");
    read_.assign(length, std::byte{0});
    const std::uint64_t tail_at = size_ - tail_.size();
    for (std::uint64_t i = offset < tail_at ? tail_at - offset : 0; i < length; ++i) {
      read_[i] = tail_[offset + i - tail_at];
    }
    return read_;
  }

 private:
  static constexpr std::uint64_t kLargest = std::uint64_t{1} << 20;

  std::uint64_t size_;
  std::vector<std::byte> tail_;
  std::vector<std::byte> read_;
  std::uint64_t largest_ = 0;
};

/// The end of an archive whose central directory claims to fill the entire record.
std::string forged_end(std::uint64_t size, std::uint64_t entries) {
  const std::uint64_t directory =
      size - zip::kEnd64Bytes - zip::kEnd64LocatorBytes - zip::kEndBytes;
  std::string out;
  put(out, zip::kEnd64, 4);
  put(out, zip::kEnd64Bytes - 12, 8);
  put(out, 0, 2 + 2 + 4 + 4);
  put(out, entries, 8);
  put(out, entries, 8);
  put(out, directory, 8);
  put(out, 0, 8);
  put(out, zip::kEnd64Locator, 4);
  put(out, 0, 4);
  put(out, directory, 8);
  put(out, 1, 4);
  put(out, zip::kEnd, 4);
  put(out, 0, 4);
  put(out, 0xffff, 2);
  put(out, 0xffff, 2);
  put(out, 0xffffffff, 4);
  put(out, 0xffffffff, 4);
  put(out, 0, 2);
  return out;
}

TEST(CheckEntries, ReadsLittleOfADirectoryThatClaimsToBeHuge) {
  constexpr std::uint64_t kSize = std::uint64_t{64} << 30;
  for (const std::uint64_t entries : {std::uint64_t{1}, kSize / 46, kSize}) {
    SparseRecord record(kSize, forged_end(kSize, entries));
    EXPECT_TRUE(fails(check_entries(record), Errc::zip_inconsistent));
    EXPECT_LE(record.largest_read(), 1 << 20);
    EXPECT_TRUE(ok(check_archive(record)));
    EXPECT_LE(record.largest_read(), 1 << 20);
  }
}

TEST(CheckEntries, ChecksEachEntryOfADirectoryOfSeveralMebibytes) {
  std::vector<ZipEntry> entries;
  for (int i = 0; i < 3000; ++i) {
    entries.push_back({"archive/" + std::to_string(i) + std::string(i % 1000, 'n'), "data"});
  }
  const std::string record = zip_of(entries, 500);
  ASSERT_GT(record.size(), 3 << 20);
  engine::RecordInMemory intact(bytes_of(record));
  const auto checked = check_entries(intact);
  ASSERT_TRUE(ok(checked));
  EXPECT_TRUE(checked->is_archive);
  EXPECT_EQ(checked->without_crc, 0);
  for (const char* const name : {"archive/0", "archive/1500", "archive/2999"}) {
    std::string damaged = record;
    damaged[damaged.find("data", damaged.find(name))] ^= 1;
    engine::RecordInMemory bytes(bytes_of(damaged));
    const auto found = check_entries(bytes);
    ASSERT_TRUE(fails(found, Errc::checksum_mismatch)) << name;
  }
}

TEST(CheckArchive, AcceptsAnIntactArchive) {
  EXPECT_TRUE(ok(check(object_archive())));
  EXPECT_TRUE(ok(check(small_record())));
}

TEST(CheckArchive, ReportsTheOffsetOfADamagedEntry) {
  const std::string archive = object_archive();
  for (const std::string_view data : {"an object's", "its first", "its second", "3\n"}) {
    std::string damaged = archive;
    const std::size_t begin = archive.find(data);
    damaged[begin + 1] ^= 1;
    const auto checked = check(damaged);
    ASSERT_TRUE(fails(checked, Errc::checksum_mismatch)) << data;
    EXPECT_EQ(checked.error().offset, begin);
  }
}

TEST(CheckArchive, AcceptsBytesThatAreNoArchive) {
  EXPECT_TRUE(ok(check("")));
  EXPECT_TRUE(ok(check("hello")));
  EXPECT_TRUE(ok(check(object_archive() + "trailing")));
}

TEST(CheckArchive, AcceptsCompressedEntries) {
  EXPECT_TRUE(ok(check(zip_of({{"o/data", "damaged?", 8}}))));
}

TEST(CheckArchive, AcceptsAZeroChecksumAsNotComputed) {
  std::string archive = zip_of({{"o/data", "hello"}});
  const std::size_t entry = archive.rfind("o/data") - zip::kDirectoryEntryBytes;
  EXPECT_TRUE(ok(check(patched(archive, entry + 16, 0, 4))));
  EXPECT_TRUE(fails(check(patched(archive, entry + 16, 1, 4)), Errc::checksum_mismatch));
}

TEST(CheckArchive, ChecksManyEntries) {
  std::vector<ZipEntry> entries;
  for (int i = 0; i < 1000; ++i) entries.push_back({"o/data/" + std::to_string(i), "hello"});
  std::string archive = zip_of(entries);
  EXPECT_TRUE(ok(check(archive)));
  archive[archive.find("hello", archive.find("o/data/999"))] = 'j';
  EXPECT_TRUE(fails(check(archive), Errc::checksum_mismatch));
}

TEST(CheckArchive, FailsOnlyWithAMismatchIfAnyByteIsChanged) {
  const std::string archive = object_archive();
  for (std::size_t at = 0; at < archive.size(); ++at) {
    std::string damaged = archive;
    for (const int change : {1, 2, 4, 8, 16, 32, 64, 128, 255}) {
      damaged[at] = static_cast<char>(archive[at] ^ change);
      const auto checked = check(damaged);
      ASSERT_TRUE(checked.has_value() || fails(checked, Errc::checksum_mismatch));
    }
  }
}

// Counts the bytes that are read.
class CountedRecord final : public RecordBytes {
 public:
  explicit CountedRecord(std::string_view bytes) : record_(bytes_of(bytes)) {}
  std::uint64_t size() const override { return record_.size(); }
  Result<std::span<const std::byte>> at(std::uint64_t offset, std::uint64_t length) override {
    bytes_read_ += length;
    return record_.at(offset, length);
  }
  std::uint64_t bytes_read() const { return bytes_read_; }

 private:
  engine::RecordInMemory record_;
  std::uint64_t bytes_read_ = 0;
};

TEST(CheckArchive, ReadsNoMoreThanTheArchivesSizeIfEntriesOverlap) {
  // A zip bomb: all entries of the directory are the same large entry.
  const std::string data(100'000, 'x');
  std::string archive = zip_of({{"o/data", data}});
  const std::size_t at = archive.rfind("o/data") - zip::kDirectoryEntryBytes;
  const std::string entry = archive.substr(at, zip::kDirectoryEntryBytes + 6);
  archive.resize(at);
  constexpr std::size_t kEntries = 1000;
  for (std::size_t i = 0; i < kEntries; ++i) archive += entry;
  put(archive, zip::kEnd, 4);
  put(archive, 0, 4);
  put(archive, kEntries, 2);
  put(archive, kEntries, 2);
  put(archive, kEntries * entry.size(), 4);
  put(archive, at, 4);
  put(archive, 0, 2);
  CountedRecord record(archive);
  EXPECT_TRUE(ok(check_archive(record)));
  EXPECT_LT(record.bytes_read(), 3 * archive.size());
}

}  // namespace
}  // namespace torch_ckpt::format
