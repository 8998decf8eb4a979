#include "planning/region.h"

#include <cstddef>
#include <numeric>

#include "checked_math.h"

namespace torch_ckpt::planning {

std::vector<ByteRange> coalesce(std::vector<ByteRange> ranges, std::uint64_t gap_bytes) {
  std::sort(ranges.begin(), ranges.end(),
            [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
  std::vector<ByteRange> united;
  for (const ByteRange& range : ranges) {
    if (range.bytes() == 0) continue;
    if (!united.empty() &&
        (range.begin <= united.back().end || range.begin - united.back().end <= gap_bytes)) {
      united.back().end = std::max(united.back().end, range.end);
    } else {
      united.push_back(range);
    }
  }
  return united;
}

bool box_inside(std::span<const std::uint64_t> sizes, std::span<const std::uint64_t> offsets,
                std::span<const std::uint64_t> lengths) {
  if (sizes.size() != offsets.size() || sizes.size() != lengths.size()) return false;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (!inside(offsets[d], lengths[d], sizes[d])) return false;
  }
  return true;
}

Region Region::of_bytes(std::uint64_t begin, std::uint64_t bytes) {
  Region region;
  region.begin_ = begin;
  region.elements_ = bytes;
  if (bytes > 0) region.dims_ = {{bytes, 1, 1}};
  region.extents_ = {bytes, 1};
  return region;
}

std::optional<Region> Region::of_box(std::span<const std::uint64_t> sizes,
                                     std::span<const std::uint64_t> stored_strides,
                                     std::span<const std::uint64_t> offsets,
                                     std::span<const std::uint64_t> lengths,
                                     std::span<const std::int64_t> target_strides,
                                     std::size_t item_bytes, std::size_t target_item_bytes) {
  if (!box_inside(sizes, offsets, lengths) || target_strides.size() != sizes.size()) {
    return std::nullopt;
  }
  Region region;
  region.item_bytes_ = item_bytes;
  region.target_item_bytes_ = target_item_bytes;
  region.elements_ = 1;
  std::vector<Dim> dims;
  std::uint64_t row_major = item_bytes;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    std::uint64_t stride = row_major;
    if (!stored_strides.empty()) {
      const auto bytes = checked_mul(stored_strides[d], item_bytes);
      if (!bytes) return std::nullopt;
      stride = *bytes;
    }
    const auto next = checked_mul(row_major, std::max<std::uint64_t>(sizes[d], 1));
    const auto skipped = checked_mul(offsets[d], stride);
    const auto begin = skipped ? checked_add(region.begin_, *skipped) : std::nullopt;
    if (!next || !begin) return std::nullopt;
    row_major = *next;
    region.begin_ = *begin;
    region.elements_ *= lengths[d];  // cannot overflow: the tensor's bytes do not
    if (lengths[d] != 1) {
      dims.push_back(
          {lengths[d], stride, target_strides[d] * static_cast<std::int64_t>(target_item_bytes)});
    }
  }
  if (region.elements_ == 0) {
    region.begin_ = 0;
    region.extents_ = {0};
    return region;
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [](const Dim& a, const Dim& b) { return a.stored_stride < b.stored_stride; });
  // From the innermost loop outwards, merge a loop into the next inner loop if payload and target
  // are contiguous across both.
  std::vector<Dim> merged;
  std::uint64_t extent = item_bytes;
  for (const Dim& dim : dims) {
    if (dim.stored_stride < extent) return std::nullopt;
    const auto reach = checked_mul(dim.count - 1, dim.stored_stride);
    const auto whole = reach ? checked_add(*reach, extent) : std::nullopt;
    if (!whole || !checked_add(region.begin_, *whole)) return std::nullopt;
    extent = *whole;
    if (!merged.empty()) {
      Dim& inner = merged.back();
      if (dim.stored_stride == inner.count * inner.stored_stride &&
          dim.target_stride == static_cast<std::int64_t>(inner.count) * inner.target_stride) {
        inner.count *= dim.count;
        continue;
      }
    }
    merged.push_back(dim);
  }
  if (merged.empty()) {
    merged.push_back({1, item_bytes, static_cast<std::int64_t>(target_item_bytes)});
  }
  region.dims_.assign(merged.rbegin(), merged.rend());
  region.extents_.assign(region.dims_.size() + 1, item_bytes);
  for (std::size_t d = region.dims_.size(); d-- > 0;) {
    region.extents_[d] =
        (region.dims_[d].count - 1) * region.dims_[d].stored_stride + region.extents_[d + 1];
  }
  return region;
}

std::vector<ByteRange> Region::ranges(std::uint64_t gap_bytes, std::size_t max_ranges) const {
  if (elements_ == 0) return {};
  // Merge the blocks of a loop into one range if the gaps between them are small. Gaps grow
  // outwards, so only the outer loops, [0, outer), are not merged.
  std::size_t outer = dims_.size();
  while (outer > 0) {
    const std::uint64_t gap = dims_[outer - 1].stored_stride - extents_[outer];
    std::uint64_t count = 1;
    for (std::size_t d = 0; d < outer && count <= max_ranges; ++d) count *= dims_[d].count;
    if (gap > gap_bytes && count <= max_ranges) break;
    --outer;
  }
  std::vector<ByteRange> found;
  std::vector<std::uint64_t> index(outer, 0);
  for (std::uint64_t begin = begin_;;) {
    found.push_back({begin, begin + extents_[outer]});
    std::size_t d = outer;
    while (d > 0 && ++index[d - 1] == dims_[d - 1].count) {
      begin -= (dims_[d - 1].count - 1) * dims_[d - 1].stored_stride;
      index[d - 1] = 0;
      --d;
    }
    if (d == 0) return found;
    begin += dims_[d - 1].stored_stride;
  }
}

}  // namespace torch_ckpt::planning
