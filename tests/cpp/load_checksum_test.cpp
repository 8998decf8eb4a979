// Loads records whose blocks have checksums in the metadata.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "engine/load_session.h"
#include "format/checksum_table.h"
#include "format/torch_record.h"
#include "reads.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using planning::Region;
using namespace test;

constexpr std::size_t kKibi = std::size_t{1} << 10;
constexpr std::size_t kMebi = std::size_t{1} << 20;

std::string table_of(const std::vector<Stored>& records) {
  std::vector<format::RecordSums> sums;
  for (const Stored& record : records) sums.push_back(record.sums);
  return format::encode_checksum_table(sums);
}

std::string flipped(std::string text, std::size_t at) {
  text[at] = static_cast<char>(text[at] ^ 0x10);
  return text;
}

OwnedRead part_of(const Stored& stored, std::uint64_t begin, std::uint64_t bytes) {
  OwnedRead request = stored.request(stored.sums.raw ? ReadKind::raw : ReadKind::tensor);
  request.region = Region::of_bytes(begin, bytes);
  return request;
}

// One file: ten bytes, followed by the record. The bytes that are read may be damaged.
class Checked {
 public:
  Checked(const Stored& stored, DirectIo mode) : stored_(stored), options_(load_options(mode)) {}

  /// Flips byte `at` of the record.
  Checked& damage(std::size_t at) {
    contents_ = flipped(std::move(contents_), 10 + at);
    return *this;
  }
  std::shared_ptr<LoadSession> read(std::uint64_t begin, std::uint64_t bytes) {
    reads_.add_raw_file(contents_);
    reads_.set_table(0, table_of({stored_}));
    reads_.add_to_host(part_of(stored_, begin, bytes), bytes);
    return reads_.run(options_);
  }
  std::shared_ptr<LoadSession> read_all() { return read(0, stored_.payload.size()); }
  std::string_view result() const { return reads_.result(0); }

 private:
  const Stored& stored_;
  const LoadOptions options_;
  std::string contents_ = "ten bytes." + stored_.record;
  TempDir directory_;
  Reads reads_{directory_};
};

// Small records, which are read entirely, and large ones; raw records, too.
struct Kind {
  std::string name;
  bool raw;
  std::size_t bytes;
  std::size_t block_bytes;
};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

class BlockChecksums : public ::testing::TestWithParam<std::tuple<Kind, DirectIo>> {
 protected:
  const Kind kind_ = std::get<0>(GetParam());
  const DirectIo mode_ = std::get<1>(GetParam());
  Random random_{kind_.bytes};
  const Stored stored_ = kind_.raw ? store_raw(random_.bytes(kind_.bytes), 10, kind_.block_bytes)
                                   : store(row_major("uint8", {kind_.bytes}),
                                           random_.bytes(kind_.bytes), 10, kind_.block_bytes);
  const std::size_t blocks_ = stored_.sums.block_crcs.size();
  std::size_t begin_of(std::size_t block) const { return block * kind_.block_bytes; }
  std::size_t end_of(std::size_t block) const { return std::min(begin_of(block + 1), kind_.bytes); }
  std::size_t any_byte_of(std::size_t block) {
    return random_.between(begin_of(block), end_of(block) - 1);
  }
  /// True if `session` failed with an error that names the block's offset in the file.
  ::testing::AssertionResult names(const LoadSession& session, std::size_t block) const {
    if (auto result = failed(session, Errc::checksum_mismatch, 0); !result) return result;
    const std::uint64_t expected = 10 + stored_.payload_at + begin_of(block);
    const std::uint64_t offset = session.failure()->offset;
    if (offset == expected) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "at " << offset << " and not at " << expected;
  }
};

TEST_P(BlockChecksums, AnIntactTensorIsReadEntirelyAndInPart) {
  for (int round = 0; round < 10; ++round) {
    const std::size_t begin = round == 0 ? 0 : random_.between(0, kind_.bytes);
    const std::size_t bytes = round == 0 ? kind_.bytes : random_.any_scale(kind_.bytes - begin);
    Checked checked(stored_, mode_);
    const auto session = checked.read(begin, bytes);
    ASSERT_FALSE(session->failure().has_value()) << session->failure()->message();
    ASSERT_TRUE(checked.result() == stored_.payload.substr(begin, bytes));
    ASSERT_EQ(session->bytes_done(), bytes);
  }
}

TEST_P(BlockChecksums, EveryDamagedBlockIsFoundIfAllAreRead) {
  for (std::size_t block = 0; block < blocks_; ++block) {
    const std::size_t at = stored_.payload_at + any_byte_of(block);
    ASSERT_TRUE(names(*Checked(stored_, mode_).damage(at).read_all(), block)) << "byte " << at;
  }
}

TEST_P(BlockChecksums, ADamagedBlockIsFoundIfAnyByteOfItIsRead) {
  for (std::size_t block = 0; block < blocks_; ++block) {
    const std::size_t at = stored_.payload_at + any_byte_of(block);
    const std::size_t wanted = any_byte_of(block);
    ASSERT_TRUE(names(*Checked(stored_, mode_).damage(at).read(wanted, 1), block))
        << "byte " << at << ", of which byte " << wanted << " of the payload was wanted";
  }
}

TEST_P(BlockChecksums, TheFirstAndLastBytesOfBlocksAreChecked) {
  const std::size_t block = blocks_ / 2;
  for (const std::size_t at : {begin_of(block), end_of(block) - 1, kind_.bytes - 1}) {
    ASSERT_TRUE(names(*Checked(stored_, mode_).damage(stored_.payload_at + at).read_all(),
                      at / kind_.block_bytes))
        << "byte " << at;
  }
}

const Kind kSmall{"Small", false, 1000, 256};
const Kind kOneByte{"OneByte", false, 1, 64 * kKibi};
const Kind kSmallRaw{"SmallRaw", true, 1000, 256};
const Kind kLarge{"Large", false, 1 * kMebi + 123, 64 * kKibi};
const Kind kLargeRaw{"LargeRaw", true, 1 * kMebi + 123, 64 * kKibi};

INSTANTIATE_TEST_SUITE_P(Records, BlockChecksums,
                         ::testing::Combine(::testing::Values(kSmall, kOneByte, kSmallRaw, kLarge,
                                                              kLargeRaw),
                                            ::testing::Values(DirectIo::on, DirectIo::off)),
                         [](const auto& c) {
                           std::ostringstream name;
                           name << std::get<0>(c.param).name << std::get<1>(c.param);
                           return name.str();
                         });

// --- the envelope and the table ------------------------------------------------------------------

/// A large record of `bytes` random bytes.
Stored large(std::size_t bytes, std::size_t block_bytes = 0) {
  return store(row_major("uint8", {bytes}), Random(bytes).bytes(bytes), 10, block_bytes);
}

TEST(LoadChecksums, DamageOutsideTheReadRangeIsNotReported) {
  const Stored stored = large(2 * kMebi);
  Checked checked(stored, DirectIo::off);
  const auto session = checked.damage(stored.payload_at + kMebi).read(5, 100);
  ASSERT_FALSE(session->failure().has_value()) << session->failure()->message();
  EXPECT_TRUE(checked.result() == stored.payload.substr(5, 100));
}

TEST(LoadChecksums, DistantPartsAreAllChecked) {
  const Stored stored = large(2 * kMebi);
  for (const std::size_t at : {std::size_t{0}, kMebi, 2 * kMebi - 1}) {
    TempDir directory;
    Reads reads(directory);
    reads.add_raw_file("ten bytes." + flipped(stored.record, stored.payload_at + at));
    reads.set_table(0, table_of({stored}));
    for (const std::uint64_t begin : {std::uint64_t{100}, kMebi + 100, 2 * kMebi - 100}) {
      reads.add_to_host(part_of(stored, begin, 10), 10);
    }
    ASSERT_TRUE(failed(*reads.run(), Errc::checksum_mismatch, 0)) << "byte " << at;
  }
}

TEST(LoadChecksums, BlocksLargerThanAPieceAreCheckedEntirely) {
  for (const std::size_t block_bytes : {2 * kMebi, 32 * kMebi}) {
    const Stored stored = large(40 * kMebi + 5, block_bytes);
    Checked intact(stored, DirectIo::off);
    const auto session = intact.read(3, 40 * kMebi);
    ASSERT_FALSE(session->failure().has_value()) << session->failure()->message();
    EXPECT_TRUE(failed(*Checked(stored, DirectIo::off)
                            .damage(stored.payload_at + 32 * kMebi)
                            .read(34 * kMebi - 1, 1),
                       Errc::checksum_mismatch, 0));
  }
}

TEST(LoadChecksums, BlocksAreCheckedEvenIfTheArchiveHasNoChecksum) {
  Stored stored = large(1000);
  const format::RecordTemplate record(format::encode_tensor_pickle(stored.header), 1000);
  stored = [&] {
    Stored without = stored;
    without.record = record.head() + stored.payload + record.encode_tail(0);
    std::string envelope = without.record;
    envelope.erase(stored.payload_at, 1000);
    without.sums.envelope_crc = store_raw(envelope).sums.block_crcs[0];
    return without;
  }();
  EXPECT_FALSE(Checked(stored, DirectIo::off).read_all()->failure().has_value());
  EXPECT_TRUE(failed(*Checked(stored, DirectIo::off).damage(stored.payload_at).read_all(),
                     Errc::checksum_mismatch, 0));
}

class Envelope : public ::testing::TestWithParam<std::size_t> {};

TEST_P(Envelope, AnyFlippedByteIsFound) {
  const Stored stored = large(GetParam());
  const std::size_t tail_at = stored.payload_at + GetParam();
  // For large records a file is written for each flipped byte.
  const std::size_t step = GetParam() > kMebi / 2 ? 101 : 1;
  int found_by_table = 0;
  for (std::size_t at = 0; at < stored.record.size(); at += step) {
    if (at >= stored.payload_at && at < tail_at) at = tail_at;
    const auto session = Checked(stored, DirectIo::off).damage(at).read(0, 1);
    const auto failure = session->failure();
    ASSERT_TRUE(failure.has_value()) << "byte " << at << " of " << stored.record.size();
    ASSERT_EQ(failure->subject, "0");
    found_by_table += failure->code == Errc::checksum_mismatch ? 1 : 0;
  }
  EXPECT_GT(found_by_table, 10);
}

TEST_P(Envelope, AnArchiveOfAnotherTensorOfTheSameShapeIsFound) {
  const Stored stored = large(GetParam());
  Stored other = stored;
  other.sums.envelope_crc ^= 1;
  EXPECT_TRUE(failed(*Checked(other, DirectIo::off).read_all(), Errc::checksum_mismatch, 0));
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, Envelope, ::testing::Values(0, 100, kMebi));

class LoadTables : public ReadsTestWith<std::size_t> {
 protected:
  void SetUp() override {
    reads_.add_raw_file("ten bytes." + stored_.record);
    reads_.add_to_host(part_of(stored_, 0, GetParam()), GetParam());
  }
  void set_table(const Stored& stored) { reads_.set_table(0, table_of({stored})); }
  bool is_read(const LoadOptions& options = {}) {
    const auto session = reads_.run(options);
    return !session->failure() && session->outcomes()[0].status == ReadStatus::done &&
           reads_.result(0) == stored_.payload;
  }

  const Stored stored_ = large(GetParam(), GetParam() > 256 * kKibi ? 64 * kKibi : 256);
};

TEST_P(LoadTables, WithoutTheRecordLeaveTheCheckToItsArchive) {
  Stored other = stored_;
  other.sums.offset = 11;
  other.sums.block_crcs[0] ^= 1;
  set_table(other);
  EXPECT_TRUE(is_read());
}

TEST_P(LoadTables, WithoutBlocksCheckOnlyTheEnvelope) {
  Stored without = stored_;
  without.sums.block_crcs.clear();
  set_table(without);
  EXPECT_TRUE(is_read());
  without.sums.envelope_crc ^= 1;
  set_table(without);
  EXPECT_TRUE(failed(*reads_.run(), Errc::checksum_mismatch, 0));
}

TEST_P(LoadTables, ForARecordOfAnotherSizeAreAMismatch) {
  Stored shorter = stored_;
  shorter.sums.block_crcs.pop_back();
  set_table(shorter);
  EXPECT_TRUE(failed(*reads_.run(), Errc::checksum_mismatch, 0));
  Stored longer = stored_;
  longer.sums.block_crcs.push_back(7);
  set_table(longer);
  EXPECT_TRUE(failed(*reads_.run(), Errc::checksum_mismatch, 0));
  Stored coarser = stored_;
  coarser.sums.block_bytes = std::uint64_t{1} << 63;
  set_table(coarser);
  EXPECT_TRUE(failed(*reads_.run(), Errc::checksum_mismatch, 0));
}

TEST_P(LoadTables, ThatListATensorAsRawDoNotFailTheLoad) {
  Stored raw = stored_;
  raw.sums.raw = true;
  raw.sums.block_crcs[0] ^= 1;
  set_table(raw);
  EXPECT_TRUE(is_read());
}

TEST(LoadChecksums, AnEmptyItemIsNotCheckedAgainstTheNextItem) {
  TempDir directory;
  Reads reads(directory);
  const Stored next = store_raw("hello");
  const std::size_t file = reads.add_raw_file(next.record);
  reads.set_table(file, table_of({next}));
  OwnedRead nothing = next.request(ReadKind::raw);
  nothing.stored.length = 0;
  reads.add_to_host(nothing, 0);
  reads.add_to_host(part_of(next, 0, 5), 5);
  reads.run_all();
  EXPECT_EQ(reads.result(1), "hello");
}

TEST_P(LoadTables, ThatAreDamagedAreReportedWithTheFile) {
  std::string table = table_of({stored_});
  for (const std::size_t at :
       {std::size_t{0}, std::size_t{5}, table.size() / 2, table.size() - 1}) {
    const auto session =
        LoadSession::start(context(), open_directory(directory_),
                           {{reads_.name(0), flipped(table, at)}}, {part_of(stored_, 0, 0)}, {});
    ASSERT_TRUE(fails(session, Errc::checksum_mismatch)) << "byte " << at;
    EXPECT_EQ(session.error().path, reads_.path(0));
  }
  EXPECT_TRUE(fails(LoadSession::start(context(), open_directory(directory_),
                                       {{reads_.name(0), "x"}}, {part_of(stored_, 0, 0)}, {}),
                    Errc::checksum_mismatch));
}

TEST_P(LoadTables, AreIgnoredWithoutVerification) {
  reads_.set_table(0, "damaged");
  LoadOptions unverified;
  unverified.verify = false;
  EXPECT_TRUE(is_read(unverified));
}

TEST_P(LoadTables, DoNotDetectDamageWithoutVerification) {
  test::write_file(reads_.path(0), "ten bytes." + flipped(stored_.record, stored_.payload_at + 5));
  set_table(stored_);
  LoadOptions unverified;
  unverified.verify = false;
  const auto session = reads_.run(unverified);
  ASSERT_FALSE(session->failure().has_value());
  EXPECT_TRUE(reads_.result(0) == flipped(stored_.payload, 5));
}

TEST_P(LoadTables, ForATensorThatTheDecoderDoesNotKnowMeanThatItIsDamaged) {
  Stored unknown = stored_;
  unknown.record = test::unknown_record(stored_.payload);
  EXPECT_TRUE(failed(*Checked(unknown, DirectIo::off).read_all(), Errc::checksum_mismatch, 0));
}

TEST_P(LoadTables, ForRawBytesLeaveUnknownRecordsToTorch) {
  const Stored unknown = store_raw(test::unknown_record(stored_.payload), 10);
  Reads reads(directory_);
  reads.add_raw_file("ten bytes." + unknown.record);
  reads.set_table(0, table_of({unknown}));
  OwnedRead request = part_of(stored_, 0, GetParam());
  request.stored.length = unknown.record.size();
  reads.add_to_host(request, GetParam());
  const auto session = reads.run();
  ASSERT_FALSE(session->failure().has_value()) << session->failure()->message();
  EXPECT_EQ(session->outcomes()[0].status, ReadStatus::unknown_record);
}

TEST_P(LoadTables, ForARawArchiveReplaceTheChecksumsOfTheArchive) {
  // The archive's own checksum does not match, as if the writer had computed it differently.
  const Stored archive = store_raw(flipped(stored_.record, stored_.payload_at), 10, 64 * kKibi);
  Checked checked(archive, DirectIo::off);
  EXPECT_FALSE(checked.read_all()->failure().has_value());
  EXPECT_TRUE(checked.result() == archive.record);
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, LoadTables, ::testing::Values(1000, kMebi));

TEST(LoadChecksums, RecordsAreCheckedAgainstTheTableOfTheirFile) {
  TempDir directory;
  Random random(5);
  std::vector<std::vector<Stored>> files(3);
  for (auto& records : files) {
    std::uint64_t offset = 0;
    for (int i = 0; i < 20; ++i) {
      const std::size_t bytes = random.any_scale(400'000);
      records.push_back(store(row_major("uint8", {bytes}), random.bytes(bytes), offset));
      offset += records.back().record.size();
    }
  }
  // All records intact, and then some of them damaged, one at a time.
  for (int round = 0; round < 10; ++round) {
    const std::size_t culprit_file = random.between(0, 2);
    const std::size_t culprit = random.between(0, 19);
    Reads reads(directory);
    std::size_t culprit_request = 0;
    for (std::size_t file = 0; file < files.size(); ++file) {
      std::string contents;
      for (std::size_t i = 0; i < files[file].size(); ++i) {
        const Stored& stored = files[file][i];
        const bool damaged =
            round > 0 && file == culprit_file && i == culprit && !stored.payload.empty();
        contents += damaged ? flipped(stored.record, stored.payload_at) : stored.record;
        OwnedRead request = part_of(stored, 0, stored.payload.size());
        request.stored.file = file;
        if (file == culprit_file && i == culprit) culprit_request = reads.count();
        reads.add_to_host(request, stored.payload.size());
      }
      reads.add_raw_file(contents);
      reads.set_table(file, table_of(files[file]));
    }
    if (round == 0 || files[culprit_file][culprit].payload.empty()) {
      reads.run_all();
    } else {
      ASSERT_TRUE(failed(*reads.run(), Errc::checksum_mismatch, culprit_request));
    }
  }
}

class StoredTransposed : public ::testing::TestWithParam<std::size_t> {};

TEST_P(StoredTransposed, IsCheckedByBlocksForEveryKindOfRead) {
  const std::uint64_t rows = GetParam();
  auto header = row_major("int32", {rows, 7});
  header.strides = {1, rows};
  const Stored stored =
      store(header, Random(rows).bytes(header.storage_bytes), 10, rows > 1000 ? 64 * kKibi : 64);
  const std::size_t last = stored.payload_at + stored.payload.size() - 1;
  for (const bool damaged : {false, true}) {
    for (const bool as_storage : {false, true}) {
      TempDir directory;
      Reads reads(directory);
      reads.add_raw_file("ten bytes." + (damaged ? flipped(stored.record, last) : stored.record));
      reads.set_table(0, table_of({stored}));
      OwnedRead request = stored.request(as_storage ? ReadKind::storage : ReadKind::tensor);
      request.region = Region::of_bytes(0, stored.payload.size());
      if (!as_storage) {
        // Row-major, like the target.
        request.layout = std::make_shared<format::TensorHeader>(header);
        const std::vector<std::int64_t> strides{static_cast<std::int64_t>(7), 1};
        request.region =
            *Region::of_box(header.sizes, header.strides, std::vector<std::uint64_t>{0, 0},
                            header.sizes, strides, 4, 4);
      }
      if (as_storage) {
        // The part is requested first, before the entire tensor.
        OwnedRead part = request;
        part.region = Region::of_bytes(0, 10);
        reads.add_to_host(part, 10);
      }
      reads.add_to_host(request, stored.payload.size());
      if (damaged) {
        EXPECT_TRUE(failed(*reads.run(), Errc::checksum_mismatch, 0));
        continue;
      }
      reads.run_all();
      if (as_storage) {
        EXPECT_TRUE(reads.result(0) == stored.payload.substr(0, 10));
        EXPECT_TRUE(reads.result(1) == stored.payload);
        continue;
      }
      std::string expected;
      for (std::uint64_t row = 0; row < rows; ++row) {
        for (std::uint64_t column = 0; column < 7; ++column) {
          expected += stored.payload.substr(4 * (column * rows + row), 4);
        }
      }
      EXPECT_TRUE(reads.result(0) == expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, StoredTransposed, ::testing::Values(10, 100'000));

}  // namespace
}  // namespace torch_ckpt::engine
