#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"

namespace torch_ckpt::planning {

/// The size of a write item. For a shard, `bytes` is the size of the shard, not of the global
/// tensor.
struct ItemSize {
  std::uint64_t bytes = 0;
  bool is_tensor = false;
};

/// Indices into the items, bytes items before tensors.
using Bucket = std::vector<std::size_t>;

/// The number of buckets: `max`, or fewer if there are few bytes.
struct BucketCount {
  std::size_t max = 1;
  std::uint64_t bytes_each = 0;  // one bucket for each `bytes_each` bytes; 0: always `max`
};

/// Splits items into `count` buckets: bytes items round-robin, then tensors by decreasing size,
/// each onto the bucket that is smallest so far (longest-processing-time rule, R. L. Graham 1969,
/// with a min-heap). Items of equal size keep their order, so the result is the same on every run.
/// With one bucket the items keep their order, except that bytes items come first.
/// Buckets may be empty if there are fewer items than buckets.
std::vector<Bucket> split_by_size(std::span<const ItemSize> items, BucketCount count);

struct NamedBucket {
  std::string prefix;  // of the file name; the separation hint or empty
  Bucket items;
};

/// Like split_by_size(), but items whose name begins with `hint` have separate files, whose names
/// begin with the hint. Each side has at most half of the buckets. An empty hint separates nothing.
/// Fails with Errc::invalid_argument if a hint is given and `count.max` is below two.
Result<std::vector<NamedBucket>> split_with_hint(std::span<const ItemSize> items,
                                                 std::span<const std::string> names,
                                                 BucketCount count, std::string_view hint);

}  // namespace torch_ckpt::planning
