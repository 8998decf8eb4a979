#include "staging/host_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

#include "support.h"

namespace torch_ckpt::staging {
namespace {

using test::Random;

// A strided source with its own storage, and its payload gathered item by item.
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

// Strides of any size and sign, including overlapping items.
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

TEST(HostCopy, BeginsAndEndsWithinItems) {
  const std::string bytes = "aaaa____bbbb____cccc";
  Source source = test::host_source(bytes);
  source.item_bytes = 4;
  source.dims = {{3, 8}};
  source.bytes = 12;
  EXPECT_EQ(copied(source, 3, 6), "abbbbc");
  EXPECT_EQ(copied(source, 5, 2), "bb");
}

TEST(HostCopy, CopiesNothingOfAnEmptyTensor) {
  Source source;
  source.dims = {{0, 4}, {3, 4}};
  source.item_bytes = 4;
  EXPECT_EQ(copied(source, 0, 0), "");
}

class ItemSizes : public ::testing::TestWithParam<std::size_t> {};

TEST_P(ItemSizes, AnySplitEqualsANaiveGather) {
  Random random(GetParam());
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

TEST_P(ItemSizes, AnyRangeEqualsANaiveGather) {
  Random random(100 + GetParam());
  const Strided made = random_source(random, GetParam());
  for (int round = 0; round < 2000; ++round) {
    const std::size_t offset = random.between(0, made.payload.size());
    const std::size_t count = random.between(0, made.payload.size() - offset);
    ASSERT_EQ(copied(made.source, offset, count), made.payload.substr(offset, count))
        << offset << "+" << count;
  }
}

TEST_P(ItemSizes, CopiesPastTheCachesGatherTheSameBytes) {
  Random random(200 + GetParam());
  for (int round = 0; round < 100; ++round) {
    const Strided made = random_source(random, GetParam());
    const std::size_t offset = random.between(0, made.payload.size());
    const std::size_t count = random.between(0, made.payload.size() - offset);
    std::string out(count, '?');
    copy_past_caches(made.source, offset, std::as_writable_bytes(std::span(out)));
    ASSERT_EQ(out, made.payload.substr(offset, count)) << "round " << round;
  }
}

INSTANTIATE_TEST_SUITE_P(Bytes, ItemSizes, ::testing::Values(1, 2, 3, 4, 8, 16));

// Begins and ends at all positions relative to the unit of a copy past the caches.
TEST(HostCopy, PastTheCachesIsExactAtAnyAlignmentAndSize) {
  Random random(300);
  constexpr std::size_t kMost = 300;
  const std::string from = random.bytes(kMost + 64);
  const Source source = test::host_source(from);
  alignas(64) std::array<char, kMost + 128> memory;
  for (std::size_t offset = 0; offset < 16; ++offset) {
    for (std::size_t at = 0; at < 64; ++at) {
      for (std::size_t count = 0; count <= kMost; ++count) {
        memory.fill('?');
        copy_past_caches(source, offset,
                         std::as_writable_bytes(std::span(memory)).subspan(at, count));
        const std::string_view found(memory.data(), memory.size());
        const bool right = found.substr(at, count) == copied(source, offset, count) &&
                           found.substr(0, at).find_first_not_of('?') == std::string::npos &&
                           found.substr(at + count).find_first_not_of('?') == std::string::npos;
        ASSERT_TRUE(right) << count << " bytes from " << offset << " to " << at;
      }
    }
  }
}

TEST(HostCopy, PastTheCachesIsExactForLargeCopies) {
  Random random(301);
  const std::string from = random.bytes((3 << 20) + 100);
  const Source source = test::host_source(from);
  for (int round = 0; round < 20; ++round) {
    const std::size_t offset = random.between(0, 100);
    const std::size_t at = random.between(0, 100);
    const std::size_t count = random.between(1 << 20, 3 << 20);
    std::string out(at + count, '?');
    copy_past_caches(source, offset, std::as_writable_bytes(std::span(out)).subspan(at));
    ASSERT_TRUE(out.substr(at) == from.substr(offset, count))
        << count << " bytes from " << offset << " to " << at;
  }
}

TEST(HostCopy, PastTheCachesTouchesNoAddressOfAnEmptySource) { copy_past_caches({}, 0, {}); }

TEST(HostCopy, PastTheCachesIsVisibleToTheThreadThatIsSignalled) {
  Random random(302);
  const std::string from = random.bytes(64 << 10);
  const Source source = test::host_source(from);
  for (int round = 0; round < 50; ++round) {
    std::string out(from.size(), '?');
    std::atomic<bool> copied_all{false};
    const std::jthread reader([&] {
      while (!copied_all.load(std::memory_order_acquire)) std::this_thread::yield();
      EXPECT_TRUE(out == from);
    });
    copy_past_caches(source, 0, std::as_writable_bytes(std::span(out)));
    copied_all.store(true, std::memory_order_release);
  }
}

}  // namespace
}  // namespace torch_ckpt::staging
