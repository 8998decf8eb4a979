#include "engine/load_session.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <latch>

#include "engine/context.h"
#include "format/torch_record.h"
#include "format/zip.h"
#include "os/fault.h"
#include "reads.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using os::ScopedFaultHook;
using staging::ChunkPool;
using namespace test;

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMebi = std::size_t{1} << 20;

// Overwrites the payload's checksum in the central directory, which the loader reads.
std::string with_checksum(std::string record, std::uint32_t crc) {
  const std::size_t entry = record.rfind("archive/data/0") - format::zip::kDirectoryEntryBytes;
  for (int i = 0; i < 4; ++i) record[entry + 16 + i] = static_cast<char>(crc >> (8 * i));
  return record;
}

using LoadSessionModes = ReadsTestWith<DirectIo>;

TEST_P(LoadSessionModes, ManySmallTensorsAreRead) {
  Random random(1);
  std::vector<std::string> expected;
  for (int file = 0; file < 3; ++file) {
    std::vector<std::string> records;
    std::uint64_t offset = 0;
    for (int i = 0; i < 200; ++i) {
      const auto header = row_major("float32", {random.between(0, 300)});
      expected.push_back(random.bytes(header.storage_bytes));
      records.push_back(record_of(header, expected.back()));
      reads_.add(ReadKind::tensor, file, offset, records.back().size(), header, 0,
                 header.storage_bytes);
      offset += records.back().size();
    }
    reads_.add_file(records);
  }
  reads_.run_all(load_options(GetParam()));
  for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(reads_.result(i), expected[i]) << i;
}

TEST_P(LoadSessionModes, ALargeTensorIsReadInPieces) {
  Random random(2);
  const std::string payload = random.bytes(40 * kMebi + 4321);
  reads_.add_file({test::byte_record(payload)});
  reads_.add_whole(0, payload);
  LoadOptions given = load_options(GetParam());
  given.chunk_bytes = kMebi;
  reads_.run_all(given);
  EXPECT_TRUE(reads_.result(0) == payload);
}

TEST_P(LoadSessionModes, ATinyChunkReadsRecordsLargerThanItself) {
  Random random(3);
  std::vector<std::string> payloads;
  for (const std::size_t bytes : {100, 3000, 5000, 100'000, 0, 4096}) {
    payloads.push_back(random.bytes(bytes));
    reads_.add_file({test::byte_record(payloads.back())});
    reads_.add_whole(payloads.size() - 1, payloads.back());
  }
  LoadOptions given = load_options(GetParam());
  given.chunk_bytes = kPage;
  reads_.run_all(given);
  for (std::size_t i = 0; i < payloads.size(); ++i) EXPECT_TRUE(reads_.result(i) == payloads[i]);
}

TEST_P(LoadSessionModes, AnyPartOfATensorIsRead) {
  Random random(4);
  const std::string small = random.bytes(10'000);
  const std::string large = random.bytes(2 * kMebi);
  reads_.add_file({test::byte_record(small), test::byte_record(large)});
  const std::uint64_t small_length = test::byte_record(small).size();
  const std::uint64_t large_length = test::byte_record(large).size();
  std::vector<std::string_view> expected;
  for (int i = 0; i < 60; ++i) {
    const bool of_small = random.coin();
    const std::string_view payload = of_small ? small : large;
    const std::uint64_t begin = random.between(0, payload.size());
    const std::uint64_t bytes = random.any_scale(payload.size() - begin);
    reads_.add(ReadKind::tensor, 0, of_small ? 0 : small_length,
               of_small ? small_length : large_length, row_major("uint8", {payload.size()}), begin,
               bytes);
    expected.push_back(payload.substr(begin, bytes));
  }
  reads_.run_all(load_options(GetParam()));
  for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_TRUE(reads_.result(i) == expected[i]);
}

TEST_P(LoadSessionModes, OneTensorMayBeRequestedManyTimes) {
  Random random(5);
  const std::string small = random.bytes(1000);
  const std::string large = random.bytes(kMebi);
  reads_.add_file({test::byte_record(small)});
  reads_.add_file({test::byte_record(large)});
  for (int i = 0; i < 5; ++i) {
    reads_.add_whole(0, small);
    reads_.add_whole(1, large);
  }
  reads_.run_all(load_options(GetParam()));
  for (std::size_t i = 0; i < 10; ++i) {
    EXPECT_TRUE(reads_.result(i) == (i % 2 == 0 ? small : large));
  }
}

TEST_P(LoadSessionModes, RawBytesAreReadUnchanged) {
  Random random(6);
  const std::string contents = random.bytes(3 * kMebi);
  const format::TensorHeader none;
  reads_.add_raw_file(contents);
  reads_.add(ReadKind::raw, 0, 0, contents.size(), none, 0, contents.size());
  reads_.add(ReadKind::raw, 0, 100, 500, none, 0, 500);
  reads_.add(ReadKind::raw, 0, 100, 500, none, 20, 30);
  reads_.add(ReadKind::raw, 0, 5, 2 * kMebi, none, kMebi, 7);
  reads_.add(ReadKind::raw, 0, 5, 0, none, 0, 0);
  reads_.run_all(load_options(GetParam()));
  EXPECT_TRUE(reads_.result(0) == contents);
  EXPECT_TRUE(reads_.result(1) == contents.substr(100, 500));
  EXPECT_TRUE(reads_.result(2) == contents.substr(120, 30));
  EXPECT_TRUE(reads_.result(3) == contents.substr(5 + kMebi, 7));
}

TEST_P(LoadSessionModes, FilesOfASaveAreReadBack) {
  Random random(7);
  std::deque<std::string> payloads;
  std::vector<FileJob> jobs(4);
  for (std::size_t file = 0; file < jobs.size(); ++file) {
    for (int i = 0; i < 20; ++i) {
      payloads.push_back(random.bytes(random.any_scale(600'000)));
      jobs[file].image.add_tensor(row_major("uint8", {payloads.back().size()}),
                                  test::host_source(payloads.back()));
      const ImageItem& item = jobs[file].image.items().back();
      reads_.add(ReadKind::tensor, file, item.offset, item.bytes,
                 row_major("uint8", {payloads.back().size()}), 0, payloads.back().size());
    }
    reads_.add_raw_file("");  // for its path
    jobs[file].name = reads_.name(file);
    ASSERT_EQ(std::remove(reads_.path(file).c_str()), 0);
  }
  SaveOptions save;
  save.direct_io = GetParam();
  ASSERT_TRUE(ok(test::run_save(directory_, std::move(jobs), save)));
  reads_.run_all(load_options(GetParam()));
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    ASSERT_TRUE(reads_.result(i) == payloads[i]) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(AllModes, LoadSessionModes, test::all_direct_io(), test::direct_io_name);

using LoadSessionTest = ReadsTest;

TEST_F(LoadSessionTest, WithoutRequestsEndsAtOnce) {
  context().executor.pool();  // starts its threads before calls are counted
  CallCounter counter;
  ScopedFaultHook hook(counter);
  reads_.run_all();
  EXPECT_EQ(counter.log(), std::vector<std::string>{"open_directory " + directory_.path()});
}

TEST_F(LoadSessionTest, TheArchiveOfAnEmptyTensorIsChecked) {
  reads_.add_file({test::byte_record("")});
  reads_.add_whole(0, "");
  reads_.run_all();
}

TEST_F(LoadSessionTest, AScalarIsRead) {
  const auto header = row_major("int64", {});
  const std::string record = record_of(header, "12345678");
  reads_.add_file({record});
  reads_.add(ReadKind::tensor, 0, 0, record.size(), header, 0, 8);
  reads_.run_all();
  EXPECT_EQ(reads_.result(0), "12345678");
}

TEST_F(LoadSessionTest, AdjacentSeparateAndOverlappingRecordsAreRead) {
  const format::TensorHeader none;
  reads_.add_raw_file("0123456789");
  reads_.add(ReadKind::raw, 0, 2, 4, none, 0, 4);
  reads_.add(ReadKind::raw, 0, 4, 4, none, 0, 4);
  reads_.add(ReadKind::raw, 0, 9, 1, none, 0, 1);
  reads_.run_all();
  EXPECT_EQ(reads_.result(0), "2345");
  EXPECT_EQ(reads_.result(1), "4567");
  EXPECT_EQ(reads_.result(2), "9");
}

TEST_F(LoadSessionTest, NeighbouringRecordsAreReadTogether) {
  const std::string record = test::byte_record("hello");
  reads_.add_file(std::vector<std::string>(100, record));
  for (std::size_t i = 0; i < 100; ++i) {
    reads_.add(ReadKind::tensor, 0, i * record.size(), record.size(), row_major("uint8", {5}), 0,
               5);
  }
  CallCounter counter;
  ScopedFaultHook hook(counter);
  reads_.run_all();
  EXPECT_EQ(counter.calls("pread"), 1);
}

TEST_F(LoadSessionTest, OptionsThatLeaveNoScratchMemoryAreRejected) {
  LoadOptions too_small;
  too_small.max_scratch_bytes = kPage - 1;
  EXPECT_TRUE(fails(LoadSession::start(context(), open_directory(directory_), {}, {}, too_small),
                    Errc::invalid_argument));
  LoadOptions no_threads;
  no_threads.threads = 0;
  EXPECT_TRUE(fails(LoadSession::start(context(), open_directory(directory_), {}, {}, no_threads),
                    Errc::invalid_argument));
}

TEST_F(LoadSessionTest, StaysWithinItsScratchMemoryLimit) {
  reads_.add_small_files(20);
  context().chunks.trim(0);
  LoadOptions given;
  given.chunk_bytes = 4 * kPage;
  given.max_scratch_bytes = 10 * kPage;
  CallCounter counter;
  ScopedFaultHook hook(counter);
  reads_.run_all(given);
  EXPECT_LE(counter.calls("mmap"), 2);
  EXPECT_LE(context().chunks.idle_bytes(), given.max_scratch_bytes);
}

TEST_F(LoadSessionTest, LeavesIdleChunksInThePool) {
  reads_.add_small_files(1);
  ChunkPool& pool = context().chunks;
  pool.trim(0);
  constexpr std::size_t kChunks = 50;
  std::vector<std::unique_ptr<staging::Chunk>> chunks;
  for (std::size_t i = 0; i < kChunks; ++i) chunks.push_back(pool.take(4 * kPage).value());
  for (auto& chunk : chunks) pool.give_back(std::move(chunk));
  LoadOptions given;
  given.threads = 1;
  given.chunk_bytes = 4 * kPage;
  reads_.run_all(given);
  EXPECT_EQ(pool.idle_bytes(), kChunks * 4 * kPage);
  pool.trim(0);
}

TEST_F(LoadSessionTest, ReadsLargeBatchesWithDirectIo) {
  const std::string record = test::byte_record(std::string(3 * kPage - 100, 'x'));
  constexpr std::size_t kRecords = 40;
  const std::size_t file = reads_.add_file(std::vector<std::string>(kRecords, record));
  for (std::size_t i = 0; i < kRecords; ++i) {
    reads_.add(ReadKind::tensor, file, i * record.size(), record.size(),
               row_major("uint8", {3 * kPage - 100}), 0, 3 * kPage - 100);
  }
  LoadOptions given = load_options(DirectIo::on);
  given.threads = 1;
  given.chunk_bytes = 32 * kPage;
  const auto opened = open_directory(directory_).open_for_read(reads_.name(file));
  ASSERT_TRUE(ok(opened));
  {
    const int fd = ::open(reads_.path(file).c_str(), O_RDWR | O_CLOEXEC);
    ::fsync(fd);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }
  const std::uint64_t bytes = kRecords * record.size();
  if (opened->cached_fraction(0, bytes) > 0) GTEST_SKIP() << "the page cache keeps the file";
  reads_.run_all(given);
  EXPECT_EQ(opened->cached_fraction(0, bytes), 0);
}

TEST_F(LoadSessionTest, ReadsMoreFilesThanItMayOpenAtOnce) {
  constexpr std::size_t kFiles = 200;
  for (std::size_t i = 0; i < kFiles; ++i) {
    const std::string payload = "payload " + std::to_string(i);
    reads_.add_whole(reads_.add_file({test::byte_record(payload)}), payload);
  }
  context().executor.pool();  // excludes the descriptors of the pool from the count
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = 64;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  const auto session = reads_.run();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_FALSE(session->failure().has_value()) << session->failure()->message();
  for (std::size_t i = 0; i < kFiles; ++i) {
    ASSERT_EQ(reads_.result(i), "payload " + std::to_string(i));
  }
}

TEST_F(LoadSessionTest, ClosesItsFiles) {
  reads_.add_small_files(10);
  const int before = ::dup(0);
  ::close(before);
  const auto session = reads_.run();
  const int after = ::dup(0);
  ::close(after);
  EXPECT_EQ(before, after) << "the session still holds files";
}

// --- other layouts and other records ---------------------------------------------------------

using TransposedTensor = ReadsTestWith<std::uint64_t>;

TEST_P(TransposedTensor, IsReportedWithItsLayoutAndThenReadAsAStorage) {
  Random random(8);
  const std::uint64_t rows = GetParam();
  auto header = row_major("float32", {rows, 7});
  header.strides = {1, rows};
  const std::string payload = random.bytes(header.storage_bytes);
  const std::string record = record_of(header, payload);
  reads_.add_file({record});
  reads_.add(ReadKind::tensor, 0, 0, record.size(), header, 0, payload.size());
  const auto session = reads_.run();
  ASSERT_FALSE(session->failure().has_value());
  ASSERT_EQ(session->outcomes()[0].status, ReadStatus::other_layout);
  ASSERT_TRUE(session->outcomes()[0].header.has_value());
  EXPECT_EQ(session->outcomes()[0].header->strides, header.strides);
  EXPECT_EQ(session->outcomes()[0].header->storage_bytes, payload.size());
  EXPECT_EQ(reads_.result(0), std::string(payload.size(), '?')) << "the destination was touched";

  Reads again(directory_);
  again.add_file({record});
  again.add(ReadKind::storage, 0, 0, record.size(), header, 0, payload.size());
  again.run_all();
  EXPECT_TRUE(again.result(0) == payload);
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, TransposedTensor, ::testing::Values(10, 100'000));

using UnknownRecord = ReadsTestWith<std::size_t>;

TEST_P(UnknownRecord, IsReportedAndDoesNotFailTheLoad) {
  const std::string payload(GetParam(), 'x');
  const std::string unknown = unknown_record(payload);
  const std::string known = test::byte_record(payload);
  reads_.add_file({unknown, known});
  const auto header = row_major("uint8", {payload.size()});
  reads_.add(ReadKind::tensor, 0, 0, unknown.size(), header, 0, payload.size());
  reads_.add(ReadKind::tensor, 0, unknown.size(), known.size(), header, 0, payload.size());
  const auto session = reads_.run();
  ASSERT_FALSE(session->failure().has_value()) << session->failure()->message();
  EXPECT_EQ(session->outcomes()[0].status, ReadStatus::unknown_record);
  EXPECT_EQ(session->outcomes()[1].status, ReadStatus::done);
  EXPECT_TRUE(reads_.result(1) == payload);
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, UnknownRecord, ::testing::Values(10, 3 * kMebi));

// --- checksums -------------------------------------------------------------------------------

TEST_F(LoadSessionTest, EveryFlippedPayloadByteOfASmallTensorIsFound) {
  const std::string payload = "sixty-four bytes of payload, every one of which is to be trusted";
  std::string record = test::byte_record(payload);
  const std::size_t begin = record.find(payload);
  Random random(9);
  for (std::size_t i = 0; i < payload.size(); ++i) {
    std::string damaged = record;
    damaged[begin + i] = static_cast<char>(damaged[begin + i] ^ (1 << random.between(0, 7)));
    Reads reads(directory_);
    reads.add_file({damaged});
    reads.add_whole(0, payload);
    ASSERT_TRUE(failed(*reads.run(), Errc::checksum_mismatch, 0)) << "byte " << i;
  }
}

TEST_F(LoadSessionTest, AFlippedByteInAnyPieceOfALargeTensorIsFound) {
  const std::string payload(17 * kMebi, 'x');
  const std::string record = test::byte_record(payload);
  const std::size_t begin = record.find('x', record.find("archive/data/0"));
  for (const std::size_t at : {std::size_t{0}, 16 * kMebi - 1, 16 * kMebi, 17 * kMebi - 1}) {
    std::string damaged = record;
    damaged[begin + at] = 'y';
    Reads reads(directory_);
    reads.add_file({damaged});
    reads.add_whole(0, payload);
    ASSERT_TRUE(failed(*reads.run(), Errc::checksum_mismatch, 0)) << "byte " << at;
  }
}

TEST_F(LoadSessionTest, ADamagedTensorIsReportedWithRequestPathAndOffset) {
  const std::string record = test::byte_record("hello");
  std::string damaged = record;
  damaged[damaged.find("hello")] = 'j';
  reads_.add_file({record});
  reads_.add_file({record, record, damaged, record});
  reads_.add_whole(0, "hello");
  for (std::size_t i = 0; i < 4; ++i) {
    reads_.add(ReadKind::tensor, 1, i * record.size(), record.size(), row_major("uint8", {5}), 0,
               5);
  }
  const auto session = reads_.run();
  ASSERT_TRUE(failed(*session, Errc::checksum_mismatch, 3));
  EXPECT_EQ(session->failure()->path, reads_.path(1));
  EXPECT_EQ(session->failure()->offset, 2 * record.size());
}

TEST_F(LoadSessionTest, DamageOutsideTheRegionIsFoundInASmallRecord) {
  std::string damaged = test::byte_record("hello");
  damaged[damaged.find("hello")] = 'j';
  reads_.add_file({damaged});
  reads_.add(ReadKind::tensor, 0, 0, damaged.size(), row_major("uint8", {5}), 4, 1);
  EXPECT_TRUE(failed(*reads_.run(), Errc::checksum_mismatch, 0));
}

class RawArchive : public ReadsTestWith<std::size_t> {
 protected:
  OwnedRead& add_raw(std::uint64_t begin, std::uint64_t bytes) {
    return reads_.add(ReadKind::raw, 0, 10, damaged_.size(), {}, begin, bytes);
  }
  void SetUp() override {
    damaged_ = test::byte_record(std::string(GetParam(), 'x'));
    damaged_at_ = damaged_.find("xxxxx");
    damaged_[damaged_at_] = 'y';
    reads_.add_file({"ten bytes.", damaged_});
  }
  std::string damaged_;
  std::size_t damaged_at_ = 0;
};

TEST_P(RawArchive, IsCheckedEntryByEntryIfItIsReadEntirely) {
  add_raw(0, damaged_.size());
  const auto session = reads_.run();
  ASSERT_TRUE(failed(*session, Errc::checksum_mismatch, 0));
  EXPECT_EQ(session->failure()->path, reads_.path(0));
  EXPECT_EQ(session->failure()->offset, 10 + damaged_at_);
}

TEST_P(RawArchive, IsNotCheckedIfReadInPartUnlessItIsSmall) {
  add_raw(1, damaged_.size() - 1);
  if (damaged_.size() < kMebi) {
    EXPECT_TRUE(failed(*reads_.run(), Errc::checksum_mismatch, 0));
  } else {
    reads_.run_all();
    EXPECT_TRUE(reads_.result(0) == damaged_.substr(1));
  }
}

TEST_P(RawArchive, IsNotCheckedWithoutVerification) {
  add_raw(0, damaged_.size());
  LoadOptions given;
  given.verify = false;
  reads_.run_all(given);
  EXPECT_TRUE(reads_.result(0) == damaged_);
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, RawArchive, ::testing::Values(10, 20 * kMebi));

class Unverified : public ReadsTestWith<std::size_t> {
 protected:
  const std::string payload_ = std::string(GetParam(), 'x');
};

TEST_P(Unverified, DamagedBytesAreDelivered) {
  std::string damaged = test::byte_record(payload_);
  damaged[damaged.find("xxxxx")] = 'y';
  reads_.add_file({damaged});
  reads_.add_whole(0, payload_);
  LoadOptions given;
  given.verify = false;
  reads_.run_all(given);
  EXPECT_TRUE(reads_.result(0) == "y" + payload_.substr(1));
}

TEST_P(Unverified, AChecksumOfZeroIsTreatedAsMissing) {
  reads_.add_file({with_checksum(test::byte_record(payload_), 0)});
  reads_.add_whole(0, payload_);
  reads_.run_all();
  EXPECT_TRUE(reads_.result(0) == payload_);
}

TEST_P(Unverified, AnyOtherChecksumIsCompared) {
  reads_.add_file({with_checksum(test::byte_record(payload_), 1)});
  reads_.add_whole(0, payload_);
  EXPECT_TRUE(failed(*reads_.run(), Errc::checksum_mismatch, 0));
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, Unverified, ::testing::Values(10, 3 * kMebi));

TEST_F(LoadSessionTest, AnEmptyPayloadWithAChecksumIsDamaged) {
  reads_.add_file({with_checksum(test::byte_record(""), 7)});
  reads_.add_whole(0, "");
  EXPECT_TRUE(failed(*reads_.run(), Errc::checksum_mismatch, 0));
}

// --- metadata that disagrees with the file ---------------------------------------------------

class Disagreement : public ReadsTestWith<std::size_t> {
 protected:
  const std::uint64_t items_ = GetParam();
  const format::TensorHeader header_ = row_major("float32", {items_});
  const std::string record_ = record_of(header_, std::string(4 * items_, 'x'));
};

TEST_P(Disagreement, AFileShorterThanItsMetadataIsReportedWithTheRequest) {
  reads_.add_file({record_, record_.substr(0, record_.size() - 1)});
  reads_.add(ReadKind::tensor, 0, 0, record_.size(), header_, 0, 4 * items_);
  reads_.add(ReadKind::tensor, 0, record_.size(), record_.size(), header_, 0, 4 * items_);
  const auto session = reads_.run();
  ASSERT_TRUE(failed(*session, Errc::range_past_end, 1));
  EXPECT_EQ(session->failure()->path, reads_.path(0));
  EXPECT_EQ(session->failure()->offset, record_.size());
}

TEST_P(Disagreement, ARecordFarOutsideTheFileIsReportedWithTheRequest) {
  for (const std::uint64_t offset : {record_.size(), ~std::uint64_t{0} - 5}) {
    Reads reads(directory_);
    reads.add_file({record_});
    reads.add(ReadKind::tensor, 0, offset, record_.size(), header_, 0, 4 * items_);
    EXPECT_TRUE(failed(*reads.run(), Errc::range_past_end, 0)) << offset;
  }
}

TEST_P(Disagreement, ARecordOfAnotherDtypeIsLeftToTorch) {
  reads_.add_file({record_});
  reads_.add(ReadKind::tensor, 0, 0, record_.size(), row_major("int32", {items_}), 0, 4 * items_);
  const auto session = reads_.run();
  ASSERT_FALSE(session->failure().has_value());
  EXPECT_EQ(session->outcomes()[0].status, ReadStatus::unknown_record);
}

TEST_P(Disagreement, AnotherShapeIsAMismatch) {
  for (const auto& sizes :
       std::vector<std::vector<std::uint64_t>>{{items_ / 2, 2}, {items_, 1}, {items_ + 1}, {}}) {
    Reads reads(directory_);
    reads.add_file({record_});
    reads.add(ReadKind::tensor, 0, 0, record_.size(), row_major("float32", sizes), 0, 4);
    EXPECT_TRUE(failed(*reads.run(), Errc::tensor_mismatch, 0)) << sizes.size() << " dimensions";
  }
}

TEST_P(Disagreement, ARegionBeyondThePayloadIsAMismatch) {
  reads_.add_file({record_});
  reads_.add(ReadKind::tensor, 0, 0, record_.size(), header_, 4, 4 * items_);
  EXPECT_TRUE(failed(*reads_.run(), Errc::tensor_mismatch, 0));
}

TEST_P(Disagreement, ARangeBeyondARawRecordIsPastItsEnd) {
  reads_.add_file({record_, record_});
  reads_.add(ReadKind::raw, 0, 0, record_.size(), {}, 1, record_.size());
  EXPECT_TRUE(failed(*reads_.run(), Errc::range_past_end, 0));
}

TEST_P(Disagreement, ARangeThatEndsTooEarlyIsReportedWithItsFileOffset) {
  reads_.add_file({record_, record_});
  reads_.add(ReadKind::tensor, 0, record_.size(), record_.size() - 5, header_, 0, 4 * items_);
  const auto session = reads_.run();
  ASSERT_TRUE(failed(*session, Errc::not_a_zip, 0));
  EXPECT_EQ(session->failure()->path, reads_.path(0));
  // The offset at which the end record was expected.
  EXPECT_EQ(session->failure()->offset, 2 * record_.size() - 5 - format::zip::kEndBytes);
}

TEST_P(Disagreement, ARangeThatBeginsTooLateIsInconsistent) {
  reads_.add_file({record_});
  reads_.add(ReadKind::tensor, 0, 5, record_.size() - 5, header_, 0, 4 * items_);
  EXPECT_TRUE(failed(*reads_.run(), Errc::zip_inconsistent, 0));
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, Disagreement, ::testing::Values(10, kMebi));

TEST_F(LoadSessionTest, AMissingFileIsASystemErrorWithItsPath) {
  reads_.add_small_files(2);
  ASSERT_EQ(std::remove(reads_.path(1).c_str()), 0);
  const auto session = reads_.run();
  ASSERT_TRUE(failed(*session, Errc::system, 1));
  EXPECT_TRUE(is_system_error(*session->failure(), ENOENT, "open", reads_.path(1)));
}

// --- faults ----------------------------------------------------------------------------------

struct Fault {
  std::string operation;
  int sys_errno;
  DirectIo mode;
};

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.operation << fault.mode; }

class LoadSessionFaults : public ::testing::TestWithParam<Fault> {};

TEST_P(LoadSessionFaults, InAnySystemCallFailTheLoadWithItsError) {
  const std::string small = "hello";
  const std::string large(kMebi, 'x');
  for (std::size_t n = 1;; ++n) {
    TempDir directory;
    Reads reads(directory);
    reads.add_whole(reads.add_file({test::byte_record(small)}), small);
    reads.add_whole(reads.add_file({test::byte_record(large)}), large);
    LoadOptions given = load_options(GetParam().mode);
    given.chunk_bytes = 256 << 10;
    context().chunks.trim(0);
    NthCallFails fault(GetParam().operation, n, GetParam().sys_errno);
    std::shared_ptr<LoadSession> session;
    {
      ScopedFaultHook hook(fault);
      session = reads.run(given);
    }
    if (!fault.hit()) {
      ASSERT_FALSE(session->failure().has_value()) << session->failure()->message();
      EXPECT_GT(n, 1) << "never called";
      break;
    }
    ASSERT_TRUE(session->failure().has_value()) << "call " << n;
    ASSERT_TRUE(is_system_error(*session->failure(), GetParam().sys_errno, GetParam().operation,
                                fault.path()))
        << "call " << n;
    const std::string culprit = session->failure()->subject;
    ASSERT_EQ(culprit.empty() ? "" : reads.path(std::stoul(culprit)), fault.path()) << "call " << n;
  }
}

INSTANTIATE_TEST_SUITE_P(Operations, LoadSessionFaults,
                         ::testing::Values(Fault{"open", EMFILE, DirectIo::automatic},
                                           Fault{"fstat", EIO, DirectIo::off},
                                           Fault{"pread", EIO, DirectIo::off},
                                           Fault{"pread", EIO, DirectIo::on},
                                           Fault{"mmap", ENOMEM, DirectIo::off}),
                         [](const auto& fault) {
                           std::ostringstream name;
                           name << fault.param.operation << fault.param.mode;
                           return name.str();
                         });

TEST_F(LoadSessionTest, AFailureEndsAllTasks) {
  reads_.add_small_files(100);
  LoadOptions one_thread;
  one_thread.threads = 1;
  CallCounter counter;
  ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    counter(operation, path);
    return operation == "pread" ? EIO : 0;
  });
  EXPECT_TRUE(failed(*reads_.run(one_thread), Errc::system, 0));
  EXPECT_EQ(counter.calls("pread"), 1);
}

TEST_F(LoadSessionTest, ACancelledLoadEndsItsReads) {
  reads_.add_small_files(100);
  LoadOptions one_thread;
  one_thread.threads = 1;
  std::latch reading(1);
  std::latch cancelled(1);
  CallCounter counter;
  ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    counter(operation, path);
    if (operation == "pread") {
      reading.count_down();
      cancelled.wait();
    }
    return 0;
  });
  const auto session = reads_.start(one_thread);
  EXPECT_FALSE(session->wait_for(std::chrono::milliseconds(0)));
  reading.wait();
  session->cancel();
  cancelled.count_down();
  wait_for_end(*session);
  ASSERT_TRUE(failed(*session, Errc::cancelled, ""));
  EXPECT_EQ(session->failure()->path, "") << "no file is to blame";
  EXPECT_EQ(counter.calls("pread"), 1);
}

TEST_F(LoadSessionTest, MayOutliveTheExecutor) {
  reads_.add_small_files(10);
  auto session = reads_.start();
  context().executor.join();
  wait_for_end(*session);
  EXPECT_FALSE(session->failure().has_value());
  session.reset();
  EXPECT_EQ(reads_.result(9), "hello");
}

TEST_F(LoadSessionTest, SeveralLoadsAtOnceAreIndependent) {
  Random random(10);
  const std::string payload = random.bytes(kMebi);
  std::deque<Reads> reads;
  std::vector<std::shared_ptr<LoadSession>> sessions;
  for (int i = 0; i < 4; ++i) {
    reads.emplace_back(directory_);
    if (i == 0) test::write_file(directory_.file("f0"), test::byte_record(payload));
    reads.back().use_file("f0");
    reads.back().add_whole(0, payload);
    sessions.push_back(reads.back().start());
  }
  for (int i = 0; i < 4; ++i) {
    wait_for_end(*sessions[i]);
    EXPECT_FALSE(sessions[i]->failure().has_value());
    EXPECT_TRUE(reads[i].result(0) == payload);
  }
}

}  // namespace
}  // namespace torch_ckpt::engine
