// Verification finds all damage, and continues after it.

#include "engine/verify_session.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <latch>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "format/checksum_table.h"
#include "os/fault.h"
#include "reads.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using os::ScopedFaultHook;
using namespace test;

constexpr std::size_t kKibi = std::size_t{1} << 10;
constexpr std::size_t kMebi = std::size_t{1} << 20;

/// Record, offset in the file and number of damaged bytes of a finding.
using Found = std::tuple<std::size_t, std::uint64_t, std::uint64_t>;

// Files of records, with or without checksum tables, and the findings of their verification.
class Verified {
 public:
  Verified(bool with_tables, VerifyOptions options)
      : with_tables_(with_tables), options_(options) {}

  /// Starts a file. Records that are added next belong to it.
  void begin_file() {
    files_.push_back({"f" + std::to_string(files_.size()), {}});
    contents_.emplace_back();
    sums_.emplace_back();
  }
  std::size_t add_tensor(const format::TensorHeader& header, std::string payload) {
    return add(store(header, std::move(payload), contents_.back().size()));
  }
  std::size_t add_bytes(std::string bytes) {
    return add(store_raw(std::move(bytes), contents_.back().size()));
  }
  planning::StoredRecord& record(std::size_t number) { return records_[number]; }
  /// The offset of the record's payload in the file.
  std::uint64_t payload_of(std::size_t number) const {
    return records_[number].offset + payloads_[number];
  }
  void flip(std::size_t file, std::uint64_t at) {
    contents_[file][at] = static_cast<char>(contents_[file][at] ^ 4);
  }
  void truncate(std::size_t file, std::size_t bytes) { contents_[file].resize(bytes); }
  std::string path(std::size_t file) const { return directory_.file(files_[file].name); }
  const std::string& contents(std::size_t file) const { return contents_[file]; }

  void write() {
    for (std::size_t file = 0; file < files_.size(); ++file) {
      test::write_file(path(file), contents_[file]);
      if (with_tables_) files_[file].checksum_table = format::encode_checksum_table(sums_[file]);
    }
  }
  std::shared_ptr<VerifySession> run() {
    write();
    return run_as_written();
  }
  std::shared_ptr<VerifySession> run_as_written() {
    auto session =
        VerifySession::start(context(), open_directory(directory_), files_, records_, options_);
    EXPECT_TRUE(ok(session));
    EXPECT_TRUE((*session)->wait_for(std::chrono::minutes(2)));
    EXPECT_FALSE((*session)->failure().has_value());
    return *session;
  }
  std::vector<Found> found() {
    std::vector<Found> all;
    for (const Finding& finding : run()->findings()) {
      all.emplace_back(finding.record, finding.error.offset, finding.bytes);
    }
    return all;
  }
  TempDir& directory() { return directory_; }

 private:
  std::size_t add(const Stored& stored) {
    records_.push_back(stored.described());
    records_.back().file = files_.size() - 1;
    payloads_.push_back(stored.payload_at);
    contents_.back() += stored.record;
    if (!stored.record.empty()) sums_.back().push_back(stored.sums);
    return records_.size() - 1;
  }

  TempDir directory_;
  const bool with_tables_;
  const VerifyOptions options_;
  std::vector<LoadFile> files_;
  std::vector<std::string> contents_;
  std::vector<std::vector<format::RecordSums>> sums_;
  std::vector<planning::StoredRecord> records_;
  std::vector<std::uint64_t> payloads_;
};

struct Mode {
  bool with_tables = true;
  DirectIo direct_io = DirectIo::automatic;
};

class Verify : public ::testing::TestWithParam<Mode> {
 protected:
  static VerifyOptions options() {
    VerifyOptions given;
    given.direct_io = GetParam().direct_io;
    given.threads = 3;
    given.chunk_bytes = kMebi;
    return given;
  }
  Verified verified_{GetParam().with_tables, options()};
  Random random_{19};
};

TEST_P(Verify, IntactRecordsHaveNoFindings) {
  verified_.begin_file();
  verified_.add_bytes("");
  verified_.add_tensor(row_major("uint8", {0}), "");
  verified_.add_tensor(row_major("float32", {7}), random_.bytes(28));
  verified_.add_tensor(row_major("int16", {100, 300}), random_.bytes(60'000));
  verified_.begin_file();
  verified_.add_tensor(row_major("uint8", {18 * kMebi + 5}), random_.bytes(18 * kMebi + 5));
  const auto session = verified_.run();
  EXPECT_TRUE(session->findings().empty());
  EXPECT_TRUE(session->unverifiable().empty());
  EXPECT_EQ(session->bytes_done(), session->bytes_planned());
  EXPECT_EQ(session->bytes_planned(), verified_.contents(0).size() + verified_.contents(1).size());
}

TEST_P(Verify, EveryByteOfASmallRecordsPayloadIsChecked) {
  verified_.begin_file();
  const std::size_t record = verified_.add_tensor(row_major("uint8", {10}), "0123456789");
  for (std::uint64_t at = 0; at < 10; ++at) {
    SCOPED_TRACE(at);
    verified_.flip(0, verified_.payload_of(record) + at);
    const auto found = verified_.found();
    ASSERT_EQ(found.size(), 1);
    EXPECT_EQ(std::get<0>(found[0]), record);
    verified_.flip(0, verified_.payload_of(record) + at);
  }
}

TEST_P(Verify, DamageOfEveryRecordIsFound) {
  std::vector<std::size_t> damaged;
  for (int file = 0; file < 3; ++file) {
    verified_.begin_file();
    for (const std::size_t size : {100, 5'000, 300'000, 2'000'000}) {
      damaged.push_back(verified_.add_tensor(row_major("uint8", {size}), random_.bytes(size)));
    }
  }
  for (const std::size_t record : damaged) {
    const std::uint64_t size = verified_.record(record).sizes[0];
    verified_.flip(verified_.record(record).file,
                   verified_.payload_of(record) + random_.between(0, size - 1));
  }
  std::vector<std::size_t> named;
  for (const auto& [record, offset, bytes] : verified_.found()) named.push_back(record);
  EXPECT_EQ(named, damaged);
}

TEST_P(Verify, ATruncatedFileHasFindingsOnlyForRecordsBeyondItsEnd) {
  verified_.begin_file();
  const std::size_t first = verified_.add_tensor(row_major("uint8", {100}), random_.bytes(100));
  const std::size_t last = verified_.add_tensor(row_major("uint8", {100}), random_.bytes(100));
  verified_.flip(0, verified_.payload_of(first));
  verified_.truncate(0, verified_.contents(0).size() - 1);
  const auto findings = verified_.run()->findings();
  ASSERT_EQ(findings.size(), 2);
  EXPECT_EQ(findings[0].record, first);
  EXPECT_EQ(findings[0].error.code, Errc::checksum_mismatch);
  EXPECT_EQ(findings[1].record, last);
  EXPECT_EQ(findings[1].error.code, Errc::range_past_end);
}

TEST_P(Verify, AMissingFileIsReportedForEachOfItsRecordsAndOthersAreRead) {
  verified_.begin_file();
  verified_.add_tensor(row_major("uint8", {100}), random_.bytes(100));
  verified_.add_tensor(row_major("uint8", {40 * kMebi}), random_.bytes(40 * kMebi));
  verified_.begin_file();
  const std::size_t other = verified_.add_tensor(row_major("uint8", {100}), random_.bytes(100));
  verified_.flip(1, verified_.payload_of(other));
  verified_.write();
  ASSERT_EQ(std::remove(verified_.path(0).c_str()), 0);
  const auto findings = verified_.run_as_written()->findings();
  ASSERT_EQ(findings.size(), 3);
  for (const std::size_t record : {0, 1}) {
    EXPECT_EQ(findings[record].record, record);
    EXPECT_TRUE(is_system_error(findings[record].error, ENOENT, "open", verified_.path(0)));
  }
  EXPECT_EQ(findings[2].record, other);
}

TEST_P(Verify, AnyFailedSystemCallIsReported) {
  verified_.begin_file();
  verified_.add_tensor(row_major("uint8", {100}), random_.bytes(100));
  verified_.add_tensor(row_major("uint8", {3 * kMebi}), random_.bytes(3 * kMebi));
  verified_.write();
  for (const std::string operation : {"open", "openat2", "fstat", "pread"}) {
    for (std::size_t n = 1;; ++n) {
      ASSERT_LT(n, 1'000);
      std::atomic<std::size_t> calls{0};
      std::shared_ptr<VerifySession> session;
      {
        ScopedFaultHook hook([&](std::string_view called, std::string_view) {
          if (called != operation) return 0;
          const std::size_t call = ++calls;
          // A read that fails once is repeated.
          return call == n || (call > n && operation == "pread") ? EIO : 0;
        });
        session = verified_.run_as_written();
      }
      if (calls < n) {
        EXPECT_GT(n, 1) << operation << " was never called";
        EXPECT_TRUE(session->findings().empty());
        break;
      }
      ASSERT_FALSE(session->findings().empty()) << operation << " " << n;
      for (const Finding& finding : session->findings()) {
        ASSERT_TRUE(is_system_error(finding.error, EIO, operation, verified_.path(0)));
      }
    }
  }
}

TEST_P(Verify, AnotherShapeIsReported) {
  verified_.begin_file();
  const std::size_t record = verified_.add_tensor(row_major("uint8", {2, 50}), random_.bytes(100));
  verified_.record(record).sizes = {50, 2};
  const auto findings = verified_.run()->findings();
  ASSERT_EQ(findings.size(), 1);
  EXPECT_EQ(findings[0].error.code, Errc::tensor_mismatch);
}

TEST_P(Verify, AnOffsetBeyondAnyFileSizeIsReported) {
  verified_.begin_file();
  const std::size_t record = verified_.add_tensor(row_major("uint8", {100}), random_.bytes(100));
  for (const auto& [offset, length] : {std::pair(~std::uint64_t{0}, std::uint64_t{1}),
                                       std::pair(std::uint64_t{0}, ~std::uint64_t{0}),
                                       std::pair(std::uint64_t{1} << 62, std::uint64_t{1} << 62)}) {
    verified_.record(record).offset = offset;
    verified_.record(record).length = length;
    const auto findings = verified_.run()->findings();
    ASSERT_EQ(findings.size(), 1) << offset << " " << length;
    EXPECT_EQ(findings[0].error.code, Errc::range_past_end);
  }
}

TEST_P(Verify, ALinkIsReportedAndNotFollowed) {
  verified_.begin_file();
  verified_.add_tensor(row_major("uint8", {100}), random_.bytes(100));
  verified_.write();
  std::filesystem::rename(verified_.path(0), verified_.directory().file("real"));
  std::filesystem::create_symlink("real", verified_.path(0));
  const auto findings = verified_.run_as_written()->findings();
  ASSERT_EQ(findings.size(), 1);
  EXPECT_EQ(findings[0].error.code, Errc::outside_directory);
}

INSTANTIATE_TEST_SUITE_P(Modes, Verify,
                         ::testing::Values(Mode{true, DirectIo::off}, Mode{true, DirectIo::on},
                                           Mode{false, DirectIo::off}, Mode{false, DirectIo::on}),
                         [](const ::testing::TestParamInfo<Mode>& mode) {
                           return std::string(mode.param.with_tables ? "WithTables" : "Without") +
                                  (mode.param.direct_io == DirectIo::on ? "Direct" : "Buffered");
                         });

TEST(VerifySession, ReportsDamagedBlocksAndMergesNeighbours) {
  Random random(20);
  Verified verified(true, {});
  verified.begin_file();
  const std::size_t tensor =
      verified.add_tensor(row_major("uint8", {40 * kMebi}), random.bytes(40 * kMebi));
  const std::size_t bytes = verified.add_bytes(random.bytes(kMebi));
  const std::uint64_t block = 64 * kKibi;  // 40 MiB in at most 1024
  for (const std::uint64_t number : {0, 1, 7, 256, 255, 639}) {
    verified.flip(0, verified.payload_of(tensor) + number * block + 77);
  }
  verified.flip(0, verified.record(bytes).offset + kMebi - 1);
  const std::uint64_t begin = verified.payload_of(tensor);
  const std::vector<Found> expected = {
      {tensor, begin, 2 * block},
      {tensor, begin + 7 * block, block},
      {tensor, begin + 255 * block, 2 * block},  // across two pieces
      {tensor, begin + 639 * block, block},
      {bytes, verified.record(bytes).offset + kMebi - 16 * kKibi, 16 * kKibi},
  };
  EXPECT_EQ(verified.found(), expected);
}

TEST(VerifySession, ContinuesAfterBytesThatCannotBeRead) {
  Random random(21);
  VerifyOptions options;
  options.direct_io = DirectIo::off;
  options.threads = 1;
  Verified verified(true, options);
  verified.begin_file();
  const std::size_t record =
      verified.add_tensor(row_major("uint8", {8 * kMebi}), random.bytes(8 * kMebi));
  verified.flip(0, verified.payload_of(record) + 7 * kMebi);
  verified.write();
  // The two ends of the archive, then the payload in steps of 256 KiB.
  test::NthCallFails fault("pread", 6, EIO);
  std::vector<Finding> findings;
  {
    ScopedFaultHook hook(fault);
    findings = verified.run_as_written()->findings();
  }
  ASSERT_TRUE(fault.hit());
  ASSERT_EQ(findings.size(), 2);
  EXPECT_TRUE(is_system_error(findings[0].error, EIO, "pread", verified.path(0)));
  EXPECT_EQ(findings[0].bytes, 256 * kKibi);
  EXPECT_EQ(findings[1].error.code, Errc::checksum_mismatch);
}

TEST(VerifySession, ReportsADamagedTableOnceAndChecksTheArchive) {
  TempDir directory;
  const Stored stored = store(row_major("uint8", {100}), std::string(100, 'x'));
  test::write_file(directory.file("a"), stored.record);
  auto session = VerifySession::start(context(), open_directory(directory), {{"a", "no table"}},
                                      {stored.described()}, {});
  ASSERT_TRUE(ok(session));
  ASSERT_TRUE((*session)->wait_for(std::chrono::minutes(2)));
  const auto findings = (*session)->findings();
  ASSERT_EQ(findings.size(), 1);
  EXPECT_EQ(findings[0].record, Finding::kWholeFile);
  EXPECT_EQ(findings[0].error.code, Errc::checksum_mismatch);
}

TEST(VerifySession, ReportsRecordsWithoutAChecksum) {
  Verified verified(false, {});
  verified.begin_file();
  const std::size_t bytes = verified.add_bytes("these bytes are no archive at all, for sure");
  const auto session = verified.run();
  EXPECT_TRUE(session->findings().empty());
  EXPECT_EQ(session->unverifiable(), std::vector<std::size_t>{bytes});
}

TEST(VerifySession, RejectsOptionsThatLeaveNoScratchMemory) {
  TempDir directory;
  VerifyOptions too_small;
  too_small.max_scratch_bytes = 4095;
  EXPECT_TRUE(fails(VerifySession::start(context(), open_directory(directory), {}, {}, too_small),
                    Errc::invalid_argument));
  VerifyOptions no_threads;
  no_threads.threads = 0;
  EXPECT_TRUE(fails(VerifySession::start(context(), open_directory(directory), {}, {}, no_threads),
                    Errc::invalid_argument));
}

TEST(VerifySession, FailsWhenCancelled) {
  Random random(22);
  TempDir directory;
  const std::string payload = random.bytes(4 * kMebi);
  const Stored stored = store(row_major("uint8", {4 * kMebi}), payload);
  test::write_file(directory.file("a"), stored.record);
  // The session waits in its first read until it has been cancelled.
  std::latch cancelled(1);
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "pread") cancelled.wait();
    return 0;
  });
  auto session = VerifySession::start(context(), open_directory(directory), {{"a", {}}},
                                      {stored.described()}, {});
  ASSERT_TRUE(ok(session));
  (*session)->cancel();
  cancelled.count_down();
  ASSERT_TRUE((*session)->wait_for(std::chrono::minutes(2)));
  ASSERT_TRUE((*session)->failure().has_value());
  EXPECT_EQ((*session)->failure()->code, Errc::cancelled);
}

}  // namespace
}  // namespace torch_ckpt::engine
