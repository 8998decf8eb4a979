#include "planning/buckets.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "support.h"

namespace torch_ckpt::planning {
namespace {

using test::Random;

std::vector<ItemSize> tensors(std::initializer_list<std::uint64_t> sizes) {
  std::vector<ItemSize> items;
  for (const std::uint64_t size : sizes) items.push_back({size, true});
  return items;
}

std::uint64_t bytes_in(const Bucket& bucket, const std::vector<ItemSize>& items) {
  return std::accumulate(bucket.begin(), bucket.end(), std::uint64_t{0},
                         [&](std::uint64_t sum, std::size_t i) { return sum + items[i].bytes; });
}

std::uint64_t fullest(const std::vector<Bucket>& buckets, const std::vector<ItemSize>& items) {
  std::uint64_t most = 0;
  for (const Bucket& bucket : buckets) most = std::max(most, bytes_in(bucket, items));
  return most;
}

// The size of the fullest bucket in the best assignment, found by trying all of them.
std::uint64_t optimum(const std::vector<ItemSize>& items, std::size_t count, std::size_t next,
                      std::vector<std::uint64_t>& filled, std::uint64_t best) {
  const std::uint64_t most = *std::max_element(filled.begin(), filled.end());
  if (most >= best) return best;
  if (next == items.size()) return most;
  for (std::size_t bucket = 0; bucket < count; ++bucket) {
    filled[bucket] += items[next].bytes;
    best = optimum(items, count, next + 1, filled, best);
    filled[bucket] -= items[next].bytes;
    if (filled[bucket] == 0) break;  // other empty buckets give the same result
  }
  return best;
}

std::vector<ItemSize> random_tensors(Random& random, std::size_t most, std::uint64_t bytes) {
  std::vector<ItemSize> items(random.between(1, most));
  for (ItemSize& item : items) item = {random.between(0, bytes), true};
  return items;
}

TEST(Buckets, AssignsItemsBySizeToTheEmptiestBucket) {
  const auto items = tensors({10, 70, 40, 30, 50});
  EXPECT_EQ(split_by_size(items, {2}), (std::vector<Bucket>{{1, 3}, {4, 2, 0}}));
}

TEST(Buckets, BalancesBytesAndNotItems) {
  const auto items = tensors({1000, 1, 1, 1, 1, 1, 1});
  EXPECT_EQ(split_by_size(items, {2}), (std::vector<Bucket>{{0}, {1, 2, 3, 4, 5, 6}}));
}

TEST(Buckets, KeepsTheOrderOfItemsOfEqualSize) {
  const std::vector<ItemSize> items(300, ItemSize{5, true});
  const auto buckets = split_by_size(items, {3});
  for (std::size_t i = 0; i < items.size(); ++i) ASSERT_EQ(buckets[i % 3][i / 3], i);
}

TEST(Buckets, AssignsBytesItemsRoundRobinBeforeTensors) {
  const std::vector<ItemSize> items{{9, true}, {1, false}, {1, false}, {8, true}, {1, false}};
  EXPECT_EQ(split_by_size(items, {2}), (std::vector<Bucket>{{1, 4, 3}, {2, 0}}));
}

TEST(Buckets, BalancesTensorsAgainstLargeBytesItems) {
  const std::vector<ItemSize> items{{100, false}, {1, false}, {60, true}, {30, true}};
  EXPECT_EQ(split_by_size(items, {2}), (std::vector<Bucket>{{0}, {1, 2, 3}}));
}

TEST(Buckets, KeepsTheOrderOfThePlanInASingleBucket) {
  const std::vector<ItemSize> items{{1, true}, {7, false}, {900, true}, {3, false}, {50, true}};
  EXPECT_EQ(split_by_size(items, {1}), (std::vector<Bucket>{{1, 3, 0, 2, 4}}));
}

TEST(Buckets, TreatsZeroBucketsAsOne) {
  EXPECT_EQ(split_by_size(tensors({1, 2}), {0}), (std::vector<Bucket>{{0, 1}}));
}

TEST(Buckets, HasEmptyBucketsIfThereAreFewerItems) {
  EXPECT_EQ(split_by_size(tensors({4}), {3}), (std::vector<Bucket>{{0}, {}, {}}));
  EXPECT_EQ(split_by_size({}, {2}), (std::vector<Bucket>{{}, {}}));
}

TEST(Buckets, ContainEveryItemExactlyOnce) {
  Random random(1);
  for (int round = 0; round < 200; ++round) {
    auto items = random_tensors(random, 60, 1000);
    for (ItemSize& item : items) item.is_tensor = random.coin();
    Bucket all;
    for (const Bucket& bucket : split_by_size(items, {random.between(1, 9)})) {
      all.insert(all.end(), bucket.begin(), bucket.end());
    }
    std::sort(all.begin(), all.end());
    Bucket expected(items.size());
    std::iota(expected.begin(), expected.end(), std::size_t{0});
    ASSERT_EQ(all, expected);
  }
}

TEST(Buckets, AreDeterministic) {
  Random random(2);
  for (int round = 0; round < 100; ++round) {
    const auto items = random_tensors(random, 100, 4);  // many ties
    ASSERT_EQ(split_by_size(items, {7}), split_by_size(items, {7}));
  }
}

TEST(Buckets, AreWithinFourThirdsOfTheOptimum) {
  Random random(3);
  for (int round = 0; round < 300; ++round) {
    const std::size_t count = random.between(2, 4);
    const auto items = random_tensors(random, 9, 100);
    std::vector<std::uint64_t> filled(count, 0);
    const std::uint64_t best = optimum(items, count, 0, filled, ~std::uint64_t{0});
    // Graham's bound 4/3 - 1/(3 count), in whole numbers.
    ASSERT_LE(3 * count * fullest(split_by_size(items, {count}), items), (4 * count - 1) * best)
        << "round " << round << ", " << count << " buckets";
  }
}

TEST(Buckets, AreWithinOneTensorOfTheMean) {
  Random random(4);
  for (int round = 0; round < 100; ++round) {
    const std::size_t count = random.between(2, 16);
    const auto items = random_tensors(random, 400, 1'000'000);
    Bucket all(items.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    std::uint64_t largest = 0;
    for (const ItemSize& item : items) largest = std::max(largest, item.bytes);
    ASSERT_LE(fullest(split_by_size(items, {count}), items),
              bytes_in(all, items) / count + largest);
  }
}

TEST(Buckets, HasOneBucketForEachStartedShareOfBytes) {
  const auto buckets_of = [](std::uint64_t bytes) {
    return split_by_size(tensors({bytes}), {.max = 3, .bytes_each = 100}).size();
  };
  EXPECT_EQ(buckets_of(0), 1);
  EXPECT_EQ(buckets_of(100), 1);
  EXPECT_EQ(buckets_of(101), 2);
  EXPECT_EQ(buckets_of(301), 3);
  EXPECT_EQ(buckets_of(~std::uint64_t{0}), 3);
}

TEST(SeparationHint, GivesEachSideBucketsForItsBytes) {
  const auto items = tensors({90, 80, 1});
  const std::vector<std::string> names{"model.a", "model.b", "optim.a"};
  const auto split = split_with_hint(items, names, {.max = 4, .bytes_each = 100}, "optim");
  ASSERT_TRUE(test::ok(split));
  std::vector<Bucket> buckets;
  for (const NamedBucket& bucket : *split) buckets.push_back(bucket.items);
  EXPECT_EQ(buckets, (std::vector<Bucket>{{0}, {1}, {2}}));
}

TEST(SeparationHint, GivesHintedItemsHalfOfTheFiles) {
  const auto items = tensors({8, 7, 6, 5});
  const std::vector<std::string> names{"optim.a", "model.a", "optim.b", "model.b"};
  const auto split = split_with_hint(items, names, {4}, "optim");
  ASSERT_TRUE(test::ok(split));
  std::vector<std::string> prefixes;
  std::vector<Bucket> buckets;
  for (const NamedBucket& bucket : *split) {
    prefixes.push_back(bucket.prefix);
    buckets.push_back(bucket.items);
  }
  EXPECT_EQ(prefixes, (std::vector<std::string>{"", "", "optim", "optim"}));
  EXPECT_EQ(buckets, (std::vector<Bucket>{{1}, {3}, {0}, {2}}));
}

TEST(SeparationHint, LeavesAnOddFileUnused) {
  const auto items = tensors({1, 1});
  const std::vector<std::string> names{"model", "optim"};
  const auto split = split_with_hint(items, names, {5}, "optim");
  ASSERT_TRUE(test::ok(split));
  EXPECT_EQ(split->size(), 4);
}

TEST(SeparationHint, MatchesOnlyTheBeginningOfAName) {
  const auto items = tensors({2, 1});
  const std::vector<std::string> names{"my.optim", "optim"};
  const auto split = split_with_hint(items, names, {2}, "optim");
  ASSERT_TRUE(test::ok(split));
  EXPECT_EQ((*split)[0].items, Bucket{0});
  EXPECT_EQ((*split)[1].items, Bucket{1});
}

TEST(SeparationHint, AnEmptyHintSeparatesNothing) {
  const auto items = tensors({3, 2, 1});
  const auto split = split_with_hint(items, {}, {2}, "");
  ASSERT_TRUE(test::ok(split));
  const auto plain = split_by_size(items, {2});
  ASSERT_EQ(split->size(), plain.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    EXPECT_EQ((*split)[i].prefix, "");
    EXPECT_EQ((*split)[i].items, plain[i]);
  }
}

TEST(SeparationHint, RejectsASingleFileWithAReason) {
  const auto items = tensors({1});
  const std::vector<std::string> names{"a"};
  for (const std::size_t count : {0U, 1U}) {
    const auto split = split_with_hint(items, names, {count}, "optim");
    ASSERT_TRUE(test::fails(split, Errc::invalid_argument));
    EXPECT_EQ(split.error().message(),
              "separation_hint requires thread_count >= 2, because matching and other items go to "
              "separate files; got " +
                  std::to_string(count));
  }
}

}  // namespace
}  // namespace torch_ckpt::planning
