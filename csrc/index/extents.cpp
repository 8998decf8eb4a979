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
  if (2 * (size() + 1) > slots_.size()) grow();
  const std::size_t mask = slots_.size() - 1;
  std::size_t slot = SeededHash()(numbers) & mask;
  for (; slots_[slot] != 0; slot = (slot + 1) & mask) {
    if (std::ranges::equal(at(slots_[slot] - 1), numbers)) return slots_[slot] - 1;
  }
  const auto id = static_cast<std::uint32_t>(size());
  slots_[slot] = id + 1;
  numbers_.insert(numbers_.end(), numbers.begin(), numbers.end());
  begins_.push_back(numbers_.size());
  return id;
}

void ExtentsTable::grow() {
  slots_.assign(std::max<std::size_t>(64, 2 * slots_.size()), 0);
  const std::size_t mask = slots_.size() - 1;
  for (std::uint32_t id = 0; id < size(); ++id) {
    std::size_t slot = SeededHash()(at(id)) & mask;
    while (slots_[slot] != 0) slot = (slot + 1) & mask;
    slots_[slot] = id + 1;
  }
}

}  // namespace torch_ckpt::index
