#include "index/extents.h"

#include <algorithm>

#include "seeded_hash.h"

namespace torch_ckpt::index {

std::string listed(std::span<const std::int64_t> numbers) {
  std::string text = "[";
  for (const std::int64_t number : numbers) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(number);
  }
  return text + "]";
}

bool lies_inside(std::span<const std::int64_t> offsets, std::span<const std::int64_t> sizes,
                 std::span<const std::int64_t> tensor_sizes) {
  if (offsets.size() != tensor_sizes.size() || sizes.size() != tensor_sizes.size()) return false;
  for (std::size_t d = 0; d < tensor_sizes.size(); ++d) {
    if (offsets[d] < 0 || sizes[d] < 0 || offsets[d] > tensor_sizes[d] ||
        sizes[d] > tensor_sizes[d] - offsets[d]) {
      return false;
    }
  }
  return true;
}

std::uint32_t ExtentsTable::intern(std::span<const std::int64_t> numbers) {
  const auto [id, is_new] = ids_.add(SeededHash()(numbers), size(), [&](std::uint32_t known) {
    return std::ranges::equal(at(known), numbers);
  });
  if (is_new) {
    numbers_.insert(numbers_.end(), numbers.begin(), numbers.end());
    begins_.push_back(numbers_.size());
  }
  return id;
}

}  // namespace torch_ckpt::index
