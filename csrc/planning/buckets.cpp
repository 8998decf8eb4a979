#include "planning/buckets.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "checked_math.h"

namespace torch_ckpt::planning {
namespace {

std::size_t number_of_buckets(std::span<const ItemSize> items,
                              const std::vector<std::size_t>& subset, BucketCount count) {
  if (count.bytes_each == 0) return std::max<std::size_t>(count.max, 1);
  std::uint64_t bytes = 0;
  for (const std::size_t index : subset) bytes += items[index].bytes;
  const std::uint64_t shares = divide_up(bytes, count.bytes_each);
  return std::max<std::uint64_t>(std::min<std::uint64_t>(shares, count.max), 1);
}

std::vector<Bucket> split_subset(std::span<const ItemSize> items,
                                 const std::vector<std::size_t>& subset, BucketCount count) {
  std::vector<Bucket> buckets(number_of_buckets(items, subset, count));
  std::vector<std::uint64_t> filled(buckets.size(), 0);
  std::vector<std::size_t> tensors;
  std::size_t next = 0;
  for (const std::size_t index : subset) {
    if (items[index].is_tensor) {
      tensors.push_back(index);
      continue;
    }
    buckets[next].push_back(index);
    filled[next] += items[index].bytes;
    next = (next + 1) % buckets.size();
  }
  // A single bucket keeps the order of the plan, as in stock torch.
  if (buckets.size() > 1) {
    std::stable_sort(tensors.begin(), tensors.end(),
                     [&](std::size_t a, std::size_t b) { return items[a].bytes > items[b].bytes; });
  }
  // {bytes so far, bucket number}: comparing pairs breaks ties by number.
  using Entry = std::pair<std::uint64_t, std::size_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> smallest;
  for (std::size_t i = 0; i < buckets.size(); ++i) smallest.emplace(filled[i], i);
  for (const std::size_t index : tensors) {
    const auto [bytes, bucket] = smallest.top();
    smallest.pop();
    buckets[bucket].push_back(index);
    smallest.emplace(bytes + items[index].bytes, bucket);
  }
  return buckets;
}

}  // namespace

std::vector<Bucket> split_by_size(std::span<const ItemSize> items, BucketCount count) {
  std::vector<std::size_t> all(items.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  return split_subset(items, all, count);
}

Result<std::vector<NamedBucket>> split_with_hint(std::span<const ItemSize> items,
                                                 std::span<const std::string> names,
                                                 BucketCount count, std::string_view hint) {
  std::vector<NamedBucket> result;
  if (hint.empty()) {
    for (auto& bucket : split_by_size(items, count)) result.push_back({"", std::move(bucket)});
    return result;
  }
  if (count.max < 2) {
    return format_error(Errc::invalid_argument,
                        "separation_hint requires thread_count >= 2, because matching and other "
                        "items go to separate "
                        "files; got " +
                            std::to_string(count.max));
  }
  const BucketCount half{count.max / 2, count.bytes_each};
  std::vector<std::size_t> hinted;
  std::vector<std::size_t> others;
  for (std::size_t i = 0; i < items.size(); ++i) {
    (std::string_view(names[i]).starts_with(hint) ? hinted : others).push_back(i);
  }
  for (auto& bucket : split_subset(items, others, half)) {
    result.push_back({"", std::move(bucket)});
  }
  for (auto& bucket : split_subset(items, hinted, half)) {
    result.push_back({std::string(hint), std::move(bucket)});
  }
  return result;
}

}  // namespace torch_ckpt::planning
