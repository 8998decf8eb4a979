#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"

namespace torch_ckpt::planning {

/// One write item as planning sees it: `bytes` is what will really be written for it, not the size
/// of the global tensor that it is a shard of.
struct ItemSize {
  std::uint64_t bytes = 0;
  bool is_tensor = false;
};

/// Indices into the items, bytes items before tensors.
using Bucket = std::vector<std::size_t>;

/// How many buckets to make: always `most`, or fewer if there are few bytes.
struct BucketCount {
  std::size_t most = 1;
  std::uint64_t bytes_each = 0;  // a bucket for each share of so many bytes; 0: always `most`
};

/// Splits items into `count` buckets: bytes items round-robin, then tensors by decreasing size,
/// each onto the bucket that is smallest so far (longest-processing-time rule, R. L. Graham 1969,
/// with a min-heap). Items of equal size keep their order, so the result is the same on every run.
/// With one bucket the items keep their order, but for bytes items coming first.
/// Buckets may be empty when there are fewer items than buckets.
std::vector<Bucket> split_by_size(std::span<const ItemSize> items, BucketCount count);

struct NamedBucket {
  std::string prefix;  // of the file name; the separation hint or empty
  Bucket items;
};

/// As split_by_size, but items whose name begins with `hint` get files of their own whose names
/// carry the hint; each side has at most half of the buckets. An empty hint separates nothing.
/// Fails with invalid_argument if a hint is given and `count.most` is below two.
Result<std::vector<NamedBucket>> split_with_hint(std::span<const ItemSize> items,
                                                 std::span<const std::string> names,
                                                 BucketCount count, std::string_view hint);

}  // namespace torch_ckpt::planning
