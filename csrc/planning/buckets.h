#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"

namespace torch_ckpt::planning {

/// The size of an item to write. For a shard, `bytes` is the size of the shard, not of the global
/// tensor.
struct ItemSize {
  std::uint64_t bytes = 0;
  bool is_tensor = false;
};

/// Indices of items. Bytes items precede tensors.
using Bucket = std::vector<std::size_t>;

/// Number of buckets: at most `max`, fewer if there are few bytes.
struct BucketCount {
  std::size_t max = 1;
  std::uint64_t bytes_each = 0;  // use one bucket per `bytes_each` bytes; 0: always use `max`
};

/// Splits items into `count` buckets: bytes items round-robin, then tensors by decreasing size,
/// each into the bucket that is smallest so far (longest-processing-time rule, R. L. Graham 1969,
/// with a min-heap). Items of equal size keep their order, so the result is deterministic. With one
/// bucket, items keep their order, except that bytes items come first. Some buckets are empty if
/// there are fewer items than buckets.
std::vector<Bucket> split_by_size(std::span<const ItemSize> items, BucketCount count);

struct NamedBucket {
  std::string prefix;  // prefix of the file name: the separation hint, or empty
  Bucket items;
};

/// Like split_by_size(), but puts items whose names begin with `hint` into separate files, whose
/// names also begin with the hint. Each group gets at most half of the buckets. If `hint` is empty,
/// separates nothing. Otherwise fails with Errc::invalid_argument if `count.max` is less than two.
Result<std::vector<NamedBucket>> split_with_hint(std::span<const ItemSize> items,
                                                 std::span<const std::string> names,
                                                 BucketCount count, std::string_view hint);

}  // namespace torch_ckpt::planning
