// Loads regions of tensors into targets that are strided, converted, or share a record.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/load_session.h"
#include "os/fault.h"
#include "reads.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using os::ScopedFaultHook;
using planning::Region;
using namespace test;
using Dims = std::vector<std::uint64_t>;
using Steps = std::vector<std::int64_t>;

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMebi = std::size_t{1} << 20;

// A matrix of items of two bytes: a small one, and a large one whose rows are longer than the
// largest gap that a read spans.
struct Shape {
  std::string name;
  std::uint64_t rows;
  std::uint64_t columns;
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

class RegionOfAMatrix : public ReadsTestWith<Shape> {
 protected:
  void SetUp() override { reads_.add_file({stored_.record}); }

  OwnedRead request(const Dims& offsets, const Dims& lengths, const Steps& target_strides,
                    std::size_t target_item = 2) const {
    OwnedRead request = stored_.request(ReadKind::tensor);
    request.region =
        *Region::of_box(stored_.header.sizes, {}, offsets, lengths, target_strides, 2, target_item);
    if (target_item == 4) request.target.convert = widen;
    return request;
  }
  std::string item(std::uint64_t row, std::uint64_t column) const {
    return stored_.payload.substr(2 * (row * columns_ + column), 2);
  }
  /// The expected contents, row by row.
  std::string box(const Dims& offsets, const Dims& lengths) const {
    std::string text;
    for (std::uint64_t row = offsets[0]; row < offsets[0] + lengths[0]; ++row) {
      text += stored_.payload.substr(2 * (row * columns_ + offsets[1]), 2 * lengths[1]);
    }
    return text;
  }
  static Steps dense(const Dims& lengths) { return {static_cast<std::int64_t>(lengths[1]), 1}; }

  const std::uint64_t rows_ = GetParam().rows;
  const std::uint64_t columns_ = GetParam().columns;
  const Stored stored_ =
      store(row_major("int16", {rows_, columns_}), Random(rows_).bytes(2 * rows_ * columns_));
};

TEST_P(RegionOfAMatrix, ColumnsAreReadIntoAContiguousTarget) {
  const Dims offsets{0, 1};
  const Dims lengths{rows_, columns_ / 3};
  reads_.add_to_host(request(offsets, lengths, dense(lengths)), 2 * lengths[0] * lengths[1]);
  reads_.run_all();
  EXPECT_TRUE(reads_.result(0) == box(offsets, lengths));
}

TEST_P(RegionOfAMatrix, OneColumnIsRead) {
  const Dims offsets{0, columns_ - 1};
  const Dims lengths{rows_, 1};
  reads_.add_to_host(request(offsets, lengths, dense(lengths)), 2 * rows_);
  reads_.run_all();
  EXPECT_TRUE(reads_.result(0) == box(offsets, lengths));
}

TEST_P(RegionOfAMatrix, RowsAreReadIntoEveryOtherRowOfATarget) {
  const Dims lengths{rows_, columns_};
  const std::uint64_t pitch = columns_ + 3;
  reads_.add_to_host(request({0, 0}, lengths, {static_cast<std::int64_t>(pitch), 1}),
                     2 * rows_ * pitch);
  reads_.run_all();
  std::string expected;
  for (std::uint64_t row = 0; row < rows_; ++row) {
    expected += stored_.payload.substr(2 * row * columns_, 2 * columns_) + "??????";
  }
  EXPECT_TRUE(reads_.result(0) == expected);
}

TEST_P(RegionOfAMatrix, AMatrixIsReadIntoATransposedTarget) {
  reads_.add_to_host(request({0, 0}, {rows_, columns_}, {1, static_cast<std::int64_t>(rows_)}),
                     2 * rows_ * columns_);
  reads_.run_all();
  std::string expected;
  for (std::uint64_t column = 0; column < columns_; ++column) {
    for (std::uint64_t row = 0; row < rows_; ++row) expected += item(row, column);
  }
  EXPECT_TRUE(reads_.result(0) == expected);
}

TEST_P(RegionOfAMatrix, AMatrixIsReadBackwards) {
  const std::size_t bytes = 2 * rows_ * columns_;
  reads_.add_to_host(request({0, 0}, {rows_, columns_}, {-static_cast<std::int64_t>(columns_), -1}),
                     bytes, bytes - 2);
  reads_.run_all();
  std::string expected;
  for (std::size_t at = bytes; at > 0; at -= 2) expected += stored_.payload.substr(at - 2, 2);
  EXPECT_TRUE(reads_.result(0) == expected);
}

TEST_P(RegionOfAMatrix, AMatrixIsConverted) {
  const Dims lengths{rows_, columns_};
  reads_.add_to_host(request({0, 0}, lengths, dense(lengths), 4), 4 * rows_ * columns_);
  reads_.run_all();
  EXPECT_TRUE(reads_.result(0) == widened(stored_.payload));
}

TEST_P(RegionOfAMatrix, ColumnsAreConvertedIntoEveryOtherItem) {
  const Dims offsets{1, 1};
  const Dims lengths{rows_ - 1, 2};
  reads_.add_to_host(request(offsets, lengths, {4, 2}, 4), 16 * lengths[0]);
  reads_.run_all();
  const std::string converted = widened(box(offsets, lengths));
  std::string expected;
  for (std::size_t at = 0; at < converted.size(); at += 4) {
    expected += converted.substr(at, 4) + "????";
  }
  EXPECT_TRUE(reads_.result(0) == expected);
}

TEST_P(RegionOfAMatrix, NoChunkSizeSplitsAnItem) {
  for (const std::size_t pages : {1, 2, 3, 5, 64}) {
    for (const DirectIo mode : {DirectIo::on, DirectIo::off}) {
      Reads reads(directory_);
      reads.use_file("f0");
      const Dims lengths{rows_, columns_ - 1};
      reads.add_to_host(request({0, 1}, lengths, dense(lengths), 4), 4 * lengths[0] * lengths[1]);
      LoadOptions given = load_options(mode);
      given.chunk_bytes = pages * kPage;
      given.max_scratch_bytes = pages * kPage;
      reads.run_all(given);
      ASSERT_TRUE(reads.result(0) == widened(box({0, 1}, lengths))) << pages << " pages";
    }
  }
}

TEST_P(RegionOfAMatrix, SeveralRegionsAreReadAtOnce) {
  const Dims whole{rows_, columns_};
  const Dims left{rows_, 1};
  reads_.add_to_host(request({0, 0}, whole, dense(whole)), 2 * rows_ * columns_);
  reads_.add_to_host(request({0, 0}, whole, dense(whole), 4), 4 * rows_ * columns_);
  reads_.add_to_host(request({0, 0}, left, dense(left)), 2 * rows_);
  reads_.add_to_host(request({rows_, 0}, {0, columns_}, {1, 1}), 0);
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    reads_.run_all(load_options(DirectIo::off));
  }
  EXPECT_TRUE(reads_.result(0) == stored_.payload);
  EXPECT_TRUE(reads_.result(1) == widened(stored_.payload));
  EXPECT_TRUE(reads_.result(2) == box({0, 0}, left));

  // As many reads as for one region.
  Reads alone(directory_);
  alone.use_file("f0");
  alone.add_to_host(request({0, 0}, whole, dense(whole), 4), 4 * rows_ * columns_);
  CallCounter counter_alone;
  ScopedFaultHook hook(counter_alone);
  alone.run_all(load_options(DirectIo::off));
  EXPECT_EQ(counter.calls("pread"), counter_alone.calls("pread"));
}

TEST_P(RegionOfAMatrix, DamageIsFoundIfRegionsTogetherCoverTheMatrix) {
  std::string damaged = stored_.record;
  damaged[stored_.payload_at + 2 * columns_] ^= 1;
  reads_.add_file({damaged});
  const std::uint64_t half = rows_ / 2;
  for (const std::uint64_t begin : {half, std::uint64_t{0}}) {
    const Dims lengths{begin == 0 ? half : rows_ - half, columns_};
    OwnedRead part = request({begin, 0}, lengths, dense(lengths));
    part.stored.file = 1;
    reads_.add_to_host(part, 2 * lengths[0] * columns_);
  }
  const auto session = reads_.run();
  ASSERT_TRUE(session->failure().has_value());
  EXPECT_EQ(session->failure()->code, Errc::checksum_mismatch);
}

INSTANTIATE_TEST_SUITE_P(Shapes, RegionOfAMatrix,
                         ::testing::Values(Shape{"Small", 10, 7}, Shape{"Tall", 100'000, 9},
                                           Shape{"Wide", 9, 100'001}),
                         [](const auto& shape) { return shape.param.name; });

using LoadRegionsTest = ReadsTest;

TEST_F(LoadRegionsTest, OnlyTheWantedPartsOfALargeRecordAreRead) {
  const std::size_t columns = 2 * kMebi;
  const Stored stored = store(row_major("uint8", {4, columns}), Random(1).bytes(4 * columns));
  reads_.add_file({stored.record});
  OwnedRead request = stored.request(ReadKind::tensor);
  request.region =
      *Region::of_box(Dims{4, columns}, {}, Dims{0, 5}, Dims{4, 10}, Steps{10, 1}, 1, 1);
  reads_.add_to_host(request, 40);
  CallCounter counter;
  ScopedFaultHook hook(counter);
  reads_.run_all(load_options(DirectIo::off));
  // Two reads for the ends of the archive, and one for each row.
  EXPECT_EQ(counter.calls("pread"), 6);
  for (std::size_t row = 0; row < 4; ++row) {
    EXPECT_EQ(reads_.result(0).substr(10 * row, 10), stored.payload.substr(row * columns + 5, 10));
  }
}

TEST_F(LoadRegionsTest, AColumnOfManyRowsIsReadTogetherWithItsGaps) {
  const Stored stored = store(row_major("uint8", {5000, 100}), Random(2).bytes(500'000));
  reads_.add_file({stored.record});
  OwnedRead request = stored.request(ReadKind::tensor);
  request.region =
      *Region::of_box(Dims{5000, 100}, {}, Dims{0, 9}, Dims{5000, 1}, Steps{1, 1}, 1, 1);
  reads_.add_to_host(request, 5000);
  CallCounter counter;
  ScopedFaultHook hook(counter);
  reads_.run_all(load_options(DirectIo::off));
  EXPECT_LE(counter.calls("pread"), 5);
}

TEST_F(LoadRegionsTest, RequestsWithAnotherLayoutGetTheRecordsLayout) {
  auto header = row_major("int16", {10, 7});
  header.strides = {1, 10};
  const Stored stored = store(header, Random(3).bytes(140));
  auto other = header;
  other.strides = {7, 1};
  reads_.add_file({stored.record});
  OwnedRead request = stored.request(ReadKind::tensor);
  request.layout = std::make_shared<format::TensorHeader>(other);
  request.region = Region::of_bytes(0, 140);
  reads_.add_to_host(request, 140);
  const auto session = reads_.run();
  ASSERT_FALSE(session->failure().has_value());
  ASSERT_EQ(session->outcomes()[0].status, ReadStatus::other_layout);
  EXPECT_EQ(*session->outcomes()[0].header, header);
}

TEST_F(LoadRegionsTest, ChecksumsOfAStorageAreNotComparedIfOnlyItsBeginIsRead) {
  const Stored stored = store(row_major("uint8", {kMebi}), Random(5).bytes(kMebi));
  reads_.add_file({stored.record});
  OwnedRead request = stored.request(ReadKind::storage);
  request.region = Region::of_bytes(0, 100);
  reads_.add_to_host(request, 100);
  reads_.run_all();
  EXPECT_EQ(reads_.result(0), stored.payload.substr(0, 100));
}

// Regions of a raw record, which is checked entry by entry if it is read entirely.
class RawRegions : public ReadsTestWith<std::size_t> {
 protected:
  OwnedRead part(std::uint64_t begin, std::uint64_t bytes) const {
    OwnedRead request = stored_.request(ReadKind::raw);
    request.region = Region::of_bytes(begin, bytes);
    return request;
  }
  const Stored stored_ = store_raw(test::byte_record(Random(4).bytes(GetParam())));
};

TEST_P(RawRegions, AreReadTogetherWithTheEntireRecordInAnyOrder) {
  reads_.add_file({stored_.record});
  const std::size_t bytes = stored_.record.size();
  reads_.add_to_host(part(20, 10), 10);
  reads_.add_to_host(part(0, bytes), bytes);
  reads_.add_to_host(part(0, 30), 30);
  reads_.run_all();
  EXPECT_TRUE(reads_.result(0) == stored_.record.substr(20, 10));
  EXPECT_TRUE(reads_.result(1) == stored_.record);
  EXPECT_TRUE(reads_.result(2) == stored_.record.substr(0, 30));
}

TEST_P(RawRegions, FindDamageIfTheEntireRecordIsAlsoRead) {
  std::string damaged = stored_.record;
  damaged[damaged.size() / 2] ^= 1;
  reads_.add_file({damaged});
  reads_.add_to_host(part(20, 10), 10);
  reads_.add_to_host(part(0, damaged.size()), damaged.size());
  EXPECT_TRUE(failed(*reads_.run(), Errc::checksum_mismatch, 0));
}

TEST_P(RawRegions, FarOutsideTheRecordAreRejectedWithATableToo) {
  reads_.add_file({stored_.record});
  reads_.set_table(0, format::encode_checksum_table(std::vector{stored_.sums}));
  reads_.add_to_host(part(std::uint64_t{1} << 50, 10), 10);
  EXPECT_TRUE(failed(*reads_.run(), Errc::range_past_end, 0));
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, RawRegions, ::testing::Values(1000, kMebi));

}  // namespace
}  // namespace torch_ckpt::engine
