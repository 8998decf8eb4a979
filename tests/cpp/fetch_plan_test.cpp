#include "engine/fetch_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "engine/load_session.h"
#include "planning/strides.h"
#include "reads.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using namespace test;

using Sizes = std::vector<std::uint64_t>;

constexpr std::uint64_t kAll = ~std::uint64_t{0};

std::string table_of(const std::vector<Stored>& records) {
  std::vector<format::RecordSums> sums;
  for (const Stored& stored : records) sums.push_back(stored.sums);
  return format::encode_checksum_table(sums);
}

/// A file of records, and a sparse copy that is filled by fetching.
class Remote {
 public:
  explicit Remote(const std::vector<Stored>& records) {
    for (const Stored& stored : records) contents_ += stored.record;
    copy_.assign(contents_.size(), '\0');
    write_copy();
  }

  void fetch(const std::vector<FileRange>& ranges) {
    for (const FileRange& range : ranges) {
      const std::uint64_t end = std::min<std::uint64_t>(range.bytes.end, contents_.size());
      for (std::uint64_t at = range.bytes.begin; at < end; ++at) copy_[at] = contents_[at];
      bytes_ += end - range.bytes.begin;
    }
    write_copy();
  }
  std::uint64_t bytes_fetched() const { return bytes_; }
  os::Directory copies() const { return open_directory(directory_); }

 private:
  void write_copy() { write_file(directory_.file("data"), copy_); }

  TempDir directory_;
  std::string contents_;
  std::string copy_;
  std::uint64_t bytes_ = 0;
};

/// A record and the region to read; without a value, the entire record.
struct Wanted {
  planning::StoredRecord record;
  std::optional<planning::Region> region = {};
};

Wanted box(planning::StoredRecord record, const Sizes& offsets, const Sizes& lengths) {
  const auto strides =
      planning::row_major_strides(std::vector<std::int64_t>(lengths.begin(), lengths.end()));
  const std::size_t item = record.dtype->item_bytes;
  auto region = planning::Region::of_box(record.sizes, {}, offsets, lengths, strides, item, item);
  return {std::move(record), std::move(region)};
}

planning::StoredRecord record_of(const Stored& stored) {
  return {
      "", 0, stored.offset(), stored.record.size(), true, stored.header.dtype, stored.header.sizes};
}

FetchPlan plan_of(const std::vector<Wanted>& wanted, const std::string& table = {}) {
  std::vector<planning::StoredRecord> records;
  std::vector<std::optional<planning::Region>> regions;
  for (const Wanted& each : wanted) {
    records.push_back(each.record);
    regions.push_back(each.region);
  }
  return {{{"data", table}}, std::move(records), regions, true};
}

/// Fetches the ranges of a plan.
void fetch_all(Remote& remote, const FetchPlan& plan) {
  remote.fetch(plan.ends());
  for (const FetchPlan::Wave& wave : plan.waves(remote.copies(), kAll)) remote.fetch(wave.ranges);
}

/// Loads regions from the copies into memory, and returns the bytes of each.
std::vector<std::string> load(const Remote& remote, const std::vector<Wanted>& wanted,
                              const std::string& table) {
  std::vector<std::string> results(wanted.size());
  std::vector<RegionRead> reads(wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    results[i].resize(wanted[i].region->bytes());
    reads[i] = {&wanted[i].record, ReadKind::tensor, nullptr, *wanted[i].region};
    reads[i].target.address = reinterpret_cast<std::byte*>(results[i].data());
  }
  auto session = LoadSession::start(context(), remote.copies(), {{"data", table}}, reads, {});
  EXPECT_TRUE(ok(session));
  wait_for_end(**session);
  const auto failure = (*session)->failure();
  EXPECT_FALSE(failure) << failure->message();
  return results;
}

/// The bytes of a box of a row-major tensor.
std::string bytes_of_box(const Stored& stored, const Sizes& offsets, const Sizes& lengths) {
  std::string bytes;
  Sizes at = offsets;
  while (true) {
    std::uint64_t element = 0;
    for (std::size_t d = 0; d < at.size(); ++d) element = element * stored.header.sizes[d] + at[d];
    bytes += stored.payload.substr(element * stored.header.dtype->item_bytes,
                                   stored.header.dtype->item_bytes);
    std::size_t d = at.size();
    while (d-- > 0) {
      if (++at[d] < offsets[d] + lengths[d]) break;
      at[d] = offsets[d];
      if (d == 0) return bytes;
    }
  }
}

TEST(FetchPlan, ALoadFromTheFetchedRangesReadsTheSameBytes) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    std::vector<Stored> records;
    std::uint64_t offset = 0;
    for (int i = 0; i < 3; ++i) {
      const Sizes sizes = {random.between(1, 6), random.between(1, 60), random.between(1, 3000)};
      const std::uint64_t bytes = sizes[0] * sizes[1] * sizes[2] * 4;
      records.push_back(store(row_major("float32", sizes), random.bytes(bytes), offset));
      offset += records.back().record.size();
    }
    std::vector<Wanted> wanted;
    std::vector<std::string> expected;
    for (int i = 0; i < 4; ++i) {
      const Stored& stored = records[random.between(0, 2)];
      Sizes offsets;
      Sizes lengths;
      for (const std::uint64_t size : stored.header.sizes) {
        offsets.push_back(random.between(0, size - 1));
        lengths.push_back(random.between(1, size - offsets.back()));
      }
      wanted.push_back(box(record_of(stored), offsets, lengths));
      expected.push_back(bytes_of_box(stored, offsets, lengths));
    }
    const std::string table = random.coin() ? table_of(records) : std::string();
    Remote remote(records);
    fetch_all(remote, plan_of(wanted, table));
    EXPECT_EQ(load(remote, wanted, table), expected);
  }
}

TEST(FetchPlan, ASmallPartNeedsLittleMoreThanItsBytes) {
  const Stored stored = store(row_major("uint8", {4096, 1024}), std::string(4 << 20, 'x'));
  for (const std::string& table : {std::string(), table_of({stored})}) {
    Remote remote({stored});
    fetch_all(remote, plan_of({box(record_of(stored), {2000, 0}, {100, 1024})}, table));
    EXPECT_GE(remote.bytes_fetched(), 100u << 10);
    EXPECT_LE(remote.bytes_fetched(), 200u << 10);
  }
}

TEST(FetchPlan, ARecordThatIsReadEntirelyIsFetchedOnce) {
  const Stored stored = store(row_major("uint8", {1024, 1024}), std::string(1 << 20, 'x'));
  for (const Wanted& wanted :
       {Wanted{record_of(stored)}, box(record_of(stored), {0, 0}, {1024, 1024})}) {
    Remote remote({stored});
    const FetchPlan plan = plan_of({wanted});
    EXPECT_TRUE(plan.ends().empty());
    fetch_all(remote, plan);
    EXPECT_EQ(remote.bytes_fetched(), stored.record.size());
  }
}

TEST(FetchPlan, ARecordOfAnotherLayoutIsFetchedEntirely) {
  format::TensorHeader transposed = row_major("uint8", {1024, 1024});
  std::swap(transposed.strides[0], transposed.strides[1]);
  const Stored stored = store(transposed, std::string(1 << 20, 'x'));
  Remote remote({stored});
  fetch_all(remote, plan_of({box(record_of(stored), {0, 0}, {10, 1024})}));
  EXPECT_GE(remote.bytes_fetched(), stored.record.size());
}

TEST(FetchPlan, WavesContainAllReadsWithinTheLimit) {
  std::vector<Stored> records;
  std::vector<Wanted> wanted;
  std::uint64_t offset = 0;
  for (int i = 0; i < 8; ++i) {
    records.push_back(store(row_major("uint8", {300 << 10}), std::string(300 << 10, 'x'), offset));
    offset += records.back().record.size();
    wanted.push_back({record_of(records.back())});
  }
  const Remote remote(records);
  const FetchPlan plan = plan_of(wanted);
  std::vector<std::size_t> seen;
  const auto waves = plan.waves(remote.copies(), std::uint64_t{1} << 20);
  for (const FetchPlan::Wave& wave : waves) {
    std::uint64_t bytes = 0;
    for (const FileRange& range : wave.ranges) bytes += range.bytes.bytes();
    EXPECT_LE(bytes, 1u << 20);
    seen.insert(seen.end(), wave.reads.begin(), wave.reads.end());
  }
  EXPECT_EQ(waves.size(), 3u);
  EXPECT_EQ(seen, (std::vector<std::size_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  // A larger record gets a wave of its own.
  EXPECT_EQ(plan.waves(remote.copies(), 1).size(), 8u);
}

TEST(FetchPlan, DamagedMetadataIsLeftToTheLoad) {
  const Stored stored = store(row_major("uint8", {1 << 20}), std::string(1 << 20, 'x'));
  const Remote remote({stored});
  const auto* dtype = format::find_dtype("uint8");
  const std::uint64_t length = stored.record.size();
  const std::vector<Wanted> wanted = {
      // A location beyond the end of the file, or of all files.
      box({"", 0, 5 << 20, length, true, dtype, {1 << 20}}, {0}, {9}),
      box({"", 0, kAll - 5, kAll, true, dtype, {1 << 20}}, {0}, {9}),
      // A box outside the tensor, and an overflowing tensor.
      box({"", 0, 0, length, true, dtype, {1 << 20}}, {1 << 20}, {9}),
      box({"", 0, 0, length, true, dtype, {kAll, kAll}}, {0, 0}, {1, 9}),
      // A record of an unknown dtype.
      {{"", 0, 0, length, true, nullptr, {1 << 20}}, std::nullopt},
      // A record whose bytes were not fetched.
      box(record_of(stored), {100}, {9}),
  };
  const FetchPlan plan = plan_of(wanted, "not a table");
  std::size_t planned = 0;
  for (const auto& wave : plan.waves(remote.copies(), kAll)) planned += wave.reads.size();
  EXPECT_EQ(planned, wanted.size());
}

}  // namespace
}  // namespace torch_ckpt::engine
