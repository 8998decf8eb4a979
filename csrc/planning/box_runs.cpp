#include "planning/box_runs.h"

#include "checked_math.h"
#include "planning/region.h"

namespace torch_ckpt::planning {

std::optional<BoxRuns> BoxRuns::of(std::span<const std::uint64_t> sizes,
                                   std::span<const std::uint64_t> offsets,
                                   std::span<const std::uint64_t> lengths,
                                   std::uint64_t item_bytes) {
  if (!box_inside(sizes, offsets, lengths)) return std::nullopt;
  BoxRuns runs;
  std::optional<std::uint64_t> stride = item_bytes;
  bool is_run = true;  // all inner dimensions of the box are whole
  runs.bytes_ = runs.run_bytes_ = item_bytes;
  std::vector<Dim> dims;  // innermost first
  for (std::size_t d = sizes.size(); d-- > 0;) {
    runs.begin_ += offsets[d] * *stride;
    runs.bytes_ *= lengths[d];
    if (is_run) {
      runs.run_bytes_ *= lengths[d];
    } else if (lengths[d] != 1) {
      dims.push_back({lengths[d], *stride});
    }
    is_run = is_run && lengths[d] == sizes[d];
    stride = checked_mul(*stride, std::max<std::uint64_t>(sizes[d], 1));
    if (!stride) return std::nullopt;
  }
  runs.tensor_bytes_ = std::ranges::count(sizes, std::uint64_t{0}) > 0 ? 0 : *stride;
  if (runs.bytes_ == 0) {
    runs.run_bytes_ = runs.begin_ = 0;
    return runs;
  }
  runs.end_ = runs.begin_ + runs.run_bytes_;
  for (const Dim& dim : dims) runs.end_ += (dim.count - 1) * dim.stride;
  runs.dims_.assign(dims.rbegin(), dims.rend());
  return runs;
}

std::uint64_t BoxRuns::bytes_before(std::uint64_t position) const {
  if (position <= begin_) return 0;
  std::uint64_t left = position - begin_;
  std::uint64_t inner = bytes_;  // in one index of the dimension
  std::uint64_t before = 0;
  for (const Dim& dim : dims_) {
    inner /= dim.count;
    const std::uint64_t index = left / dim.stride;
    if (index >= dim.count) return before + dim.count * inner;
    before += index * inner;
    left -= index * dim.stride;
  }
  return before + std::min(left, run_bytes_);
}

}  // namespace torch_ckpt::planning
