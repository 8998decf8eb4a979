#include "planning/region.h"

#include "checked_math.h"

namespace torch_ckpt::planning {

bool box_inside(std::span<const std::uint64_t> sizes, std::span<const std::uint64_t> offsets,
                std::span<const std::uint64_t> lengths) {
  if (sizes.size() != offsets.size() || sizes.size() != lengths.size()) return false;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (!inside(offsets[d], lengths[d], sizes[d])) return false;
  }
  return true;
}

std::optional<Run> contiguous_run(std::span<const std::uint64_t> sizes,
                                  std::span<const std::uint64_t> offsets,
                                  std::span<const std::uint64_t> lengths) {
  if (!box_inside(sizes, offsets, lengths)) return std::nullopt;
  Run run{0, 1};
  bool narrowed = false;  // a dimension further in is not taken whole
  std::uint64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    if (narrowed && lengths[d] > 1) return std::nullopt;
    if (lengths[d] != sizes[d]) narrowed = true;
    run.begin += offsets[d] * stride;
    run.count *= lengths[d];
    const auto next = checked_mul(stride, sizes[d]);
    if (!next) return std::nullopt;
    stride = *next;
  }
  if (run.count == 0) run.begin = 0;
  return run;
}

}  // namespace torch_ckpt::planning
