#include "engine/fetch_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "engine/load_session.h"
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

ReadRequest request_of(const Stored& stored, const Sizes& offsets, const Sizes& lengths) {
  return fetch_request(0, stored.offset(), stored.record.size(), stored.header.dtype,
                       stored.header.sizes, offsets, lengths);
}

/// Fetches what a load of these requests needs.
void fetch_all(Remote& remote, const FetchPlan& plan) {
  remote.fetch(plan.ends());
  for (const FetchPlan::Wave& wave : plan.waves(remote.copies(), kAll)) remote.fetch(wave.ranges);
}

/// Loads requests from the copies into memory, and returns the bytes of each.
std::vector<std::string> load(const Remote& remote, std::vector<ReadRequest> requests,
                              const std::string& table) {
  std::vector<std::string> results(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    results[i].resize(requests[i].region.bytes());
    requests[i].target.address = reinterpret_cast<std::byte*>(results[i].data());
  }
  auto session = LoadSession::start(context(), remote.copies(), {{"data", table}}, requests, {});
  EXPECT_TRUE(ok(session));
  wait_for_end(**session);
  const auto failure = (*session)->failure();
  EXPECT_FALSE(failure) << failure->error.message();
  return results;
}

/// The bytes of a box of a row-major tensor.
std::string box_of(const Stored& stored, const Sizes& offsets, const Sizes& lengths) {
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
    std::vector<ReadRequest> requests;
    std::vector<std::string> expected;
    for (int i = 0; i < 4; ++i) {
      const Stored& stored = records[random.between(0, 2)];
      Sizes offsets;
      Sizes lengths;
      for (const std::uint64_t size : stored.header.sizes) {
        offsets.push_back(random.between(0, size - 1));
        lengths.push_back(random.between(1, size - offsets.back()));
      }
      requests.push_back(request_of(stored, offsets, lengths));
      expected.push_back(box_of(stored, offsets, lengths));
    }
    const std::string table = random.coin() ? table_of(records) : std::string();
    Remote remote(records);
    fetch_all(remote, FetchPlan({{"data", table}}, requests, true));
    EXPECT_EQ(load(remote, requests, table), expected);
  }
}

TEST(FetchPlan, ASmallPartNeedsLittleMoreThanItsBytes) {
  const Stored stored = store(row_major("uint8", {4096, 1024}), std::string(4 << 20, 'x'));
  for (const std::string& table : {std::string(), table_of({stored})}) {
    Remote remote({stored});
    const ReadRequest request = request_of(stored, {2000, 0}, {100, 1024});
    fetch_all(remote, FetchPlan({{"data", table}}, {request}, true));
    EXPECT_GE(remote.bytes_fetched(), 100u << 10);
    EXPECT_LE(remote.bytes_fetched(), 200u << 10);
  }
}

TEST(FetchPlan, ARecordThatIsReadEntirelyIsFetchedOnce) {
  const Stored stored = store(row_major("uint8", {1024, 1024}), std::string(1 << 20, 'x'));
  for (const auto& [offsets, lengths] :
       {std::pair(Sizes{}, Sizes{}), std::pair(Sizes{0, 0}, Sizes{1024, 1024})}) {
    Remote remote({stored});
    const FetchPlan plan({{"data", ""}}, {request_of(stored, offsets, lengths)}, true);
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
  fetch_all(remote, FetchPlan({{"data", ""}}, {request_of(stored, {0, 0}, {10, 1024})}, true));
  EXPECT_GE(remote.bytes_fetched(), stored.record.size());
}

TEST(FetchPlan, WavesContainAllRequestsWithinTheLimit) {
  std::vector<Stored> records;
  std::vector<ReadRequest> requests;
  std::uint64_t offset = 0;
  for (int i = 0; i < 8; ++i) {
    records.push_back(store(row_major("uint8", {300 << 10}), std::string(300 << 10, 'x'), offset));
    offset += records.back().record.size();
    requests.push_back(request_of(records.back(), {}, {}));
  }
  const Remote remote(records);
  const FetchPlan plan({{"data", ""}}, requests, true);
  std::vector<std::size_t> seen;
  const auto waves = plan.waves(remote.copies(), std::uint64_t{1} << 20);
  for (const FetchPlan::Wave& wave : waves) {
    std::uint64_t bytes = 0;
    for (const FileRange& range : wave.ranges) bytes += range.bytes.bytes();
    EXPECT_LE(bytes, 1u << 20);
    seen.insert(seen.end(), wave.requests.begin(), wave.requests.end());
  }
  EXPECT_EQ(waves.size(), 3u);
  EXPECT_EQ(seen, (std::vector<std::size_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  // A larger record gets a wave of its own.
  EXPECT_EQ(plan.waves(remote.copies(), 1).size(), 8u);
}

TEST(FetchPlan, DamagedMetadataIsLeftToTheLoad) {
  const Stored stored = store(row_major("uint8", {1 << 20}), std::string(1 << 20, 'x'));
  const Remote remote({stored});
  std::vector<ReadRequest> requests = {
      // A location beyond the end of the file, or of all files.
      fetch_request(0, 5 << 20, stored.record.size(), format::find_dtype("uint8"), {1 << 20},
                    Sizes{0}, Sizes{9}),
      fetch_request(0, kAll - 5, kAll, format::find_dtype("uint8"), {1 << 20}, Sizes{0}, Sizes{9}),
      // A box outside the tensor, an overflowing tensor and an unknown dtype.
      fetch_request(0, 0, stored.record.size(), format::find_dtype("uint8"), {1 << 20},
                    Sizes{1 << 20}, Sizes{9}),
      fetch_request(0, 0, stored.record.size(), format::find_dtype("uint8"), {kAll, kAll},
                    Sizes{0, 0}, Sizes{1, 9}),
      fetch_request(0, 0, stored.record.size(), nullptr, {1 << 20}, Sizes{0}, Sizes{9}),
      // A record whose bytes were not fetched.
      request_of(stored, {100}, {9}),
  };
  const FetchPlan plan({{"data", "not a table"}}, requests, true);
  std::size_t planned = 0;
  for (const auto& wave : plan.waves(remote.copies(), kAll)) planned += wave.requests.size();
  EXPECT_EQ(planned, requests.size());
}

}  // namespace
}  // namespace torch_ckpt::engine
