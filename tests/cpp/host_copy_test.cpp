#include "staging/host_copy.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support.h"

namespace torch_ckpt::staging {
namespace {

using test::Random;

// A strided source in a storage of its own, and its payload gathered item by item.
struct Strided {
  std::string storage;
  Source source;
  std::string payload;
};

std::string gather(const Source& source) {
  std::string out;
  std::vector<std::uint64_t> at(source.dims.size(), 0);
  for (std::uint64_t number = 0; number < source.bytes / source.item_bytes; ++number) {
    std::uint64_t rest = number;
    const std::byte* item = source.address;
    for (std::size_t d = source.dims.size(); d-- > 0;) {
      item += static_cast<std::int64_t>(rest % source.dims[d].size) * source.dims[d].stride_bytes;
      rest /= source.dims[d].size;
    }
    out.append(reinterpret_cast<const char*>(item), source.item_bytes);
  }
  return out;
}

// Strides of any size and sign, overlapping items included.
Strided random_source(Random& random, std::size_t item_bytes) {
  Strided made;
  made.source.item_bytes = item_bytes;
  made.source.bytes = item_bytes;
  std::int64_t lowest = 0;
  std::int64_t highest = 0;
  const std::size_t dims = random.between(1, 5);
  for (std::size_t d = 0; d < dims; ++d) {
    Source::Dim dim;
    dim.size = random.between(1, dims < 3 ? 40 : 6);
    dim.stride_bytes = static_cast<std::int64_t>(random.between(0, 3 * item_bytes * 5)) -
                       static_cast<std::int64_t>(item_bytes * 5);
    if (random.coin()) dim.stride_bytes = static_cast<std::int64_t>(item_bytes);
    const std::int64_t reach = static_cast<std::int64_t>(dim.size - 1) * dim.stride_bytes;
    lowest += std::min<std::int64_t>(reach, 0);
    highest += std::max<std::int64_t>(reach, 0);
    made.source.bytes *= dim.size;
    made.source.dims.push_back(dim);
  }
  made.storage = random.bytes(static_cast<std::size_t>(highest - lowest) + item_bytes);
  made.source.address = test::bytes_of(made.storage).data() - lowest;
  made.payload = gather(made.source);
  return made;
}

std::string copied(const Source& source, std::uint64_t offset, std::size_t count) {
  std::string out(count, '?');
  copy_from_host(source, offset, std::as_writable_bytes(std::span(out)));
  return out;
}

TEST(HostCopy, CopiesAnyRangeOfContiguousBytes) {
  const std::string bytes = "0123456789";
  const Source source = test::host_source(bytes);
  EXPECT_EQ(copied(source, 0, 10), bytes);
  EXPECT_EQ(copied(source, 3, 4), "3456");
  EXPECT_EQ(copied(source, 10, 0), "");
}

TEST(HostCopy, GathersATransposedMatrix) {
  const std::string bytes = "abcdef";  // 2 x 3
  Source source = test::host_source(bytes);
  source.dims = {{3, 1}, {2, 3}};
  EXPECT_EQ(copied(source, 0, 6), "adbecf");
}

TEST(HostCopy, RepeatsAnExpandedDimension) {
  const std::string bytes = "ab";
  Source source = test::host_source(bytes);
  source.dims = {{3, 0}, {2, 1}};
  source.bytes = 6;
  EXPECT_EQ(copied(source, 0, 6), "ababab");
}

TEST(HostCopy, FollowsANegativeStride) {
  const std::string bytes = "abcd";
  Source source = test::host_source(bytes);
  source.address += 3;
  source.dims = {{4, -1}};
  EXPECT_EQ(copied(source, 1, 2), "cb");
}

TEST(HostCopy, BeginsAndEndsInsideItems) {
  const std::string bytes = "aaaa____bbbb____cccc";
  Source source = test::host_source(bytes);
  source.item_bytes = 4;
  source.dims = {{3, 8}};
  source.bytes = 12;
  EXPECT_EQ(copied(source, 3, 6), "abbbbc");
  EXPECT_EQ(copied(source, 5, 2), "bb");
}

TEST(HostCopy, OfAnEmptyTensorCopiesNothing) {
  Source source;
  source.dims = {{0, 4}, {3, 4}};
  source.item_bytes = 4;
  EXPECT_EQ(copied(source, 0, 0), "");
}

class ItemSizes : public ::testing::TestWithParam<std::size_t> {};

TEST_P(ItemSizes, AnySplitGivesTheNaivelyGatheredBytes) {
  Random random(GetParam());
  SCOPED_TRACE(random.seed_text());
  for (int round = 0; round < 400; ++round) {
    const Strided made = random_source(random, GetParam());
    const std::uint64_t longest = random.between(1, made.payload.size());
    std::string out;
    while (out.size() < made.payload.size()) {
      const std::size_t count =
          std::min<std::size_t>(random.between(1, longest), made.payload.size() - out.size());
      out += copied(made.source, out.size(), count);
    }
    ASSERT_EQ(out, made.payload) << "round " << round;
  }
}

TEST_P(ItemSizes, AnyRangeGivesTheNaivelyGatheredBytes) {
  Random random(100 + GetParam());
  SCOPED_TRACE(random.seed_text());
  const Strided made = random_source(random, GetParam());
  for (int round = 0; round < 2000; ++round) {
    const std::size_t offset = random.between(0, made.payload.size());
    const std::size_t count = random.between(0, made.payload.size() - offset);
    ASSERT_EQ(copied(made.source, offset, count), made.payload.substr(offset, count))
        << offset << "+" << count;
  }
}

INSTANTIATE_TEST_SUITE_P(Bytes, ItemSizes, ::testing::Values(1, 2, 3, 4, 8, 16));

}  // namespace
}  // namespace torch_ckpt::staging
