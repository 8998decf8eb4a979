#include "index/name_table.h"

#include <algorithm>
#include <bit>

#include "seeded_hash.h"

namespace torch_ckpt::index {

std::optional<std::uint32_t> NameTable::find(std::string_view name) const {
  if (slots_.empty()) return std::nullopt;
  const std::uint32_t found = slots_[slot_of(name)];
  if (found == 0) return std::nullopt;
  return found - 1;
}

std::pair<std::uint32_t, bool> NameTable::add(std::string_view name) {
  if (2 * (size() + 1) > slots_.size()) reserve(std::max<std::size_t>(32, 2 * size()));
  std::uint32_t& slot = slots_[slot_of(name)];
  if (slot != 0) return {slot - 1, false};
  texts_ += name;
  begins_.push_back(texts_.size());
  slot = static_cast<std::uint32_t>(size());
  return {slot - 1, true};
}

void NameTable::reserve(std::size_t names) {
  const std::size_t count = std::bit_ceil(2 * names + 1);
  if (count <= slots_.size()) return;
  slots_.assign(count, 0);
  for (std::size_t number = 0; number < size(); ++number) {
    slots_[slot_of(at(number))] = static_cast<std::uint32_t>(number) + 1;
  }
}

std::size_t NameTable::slot_of(std::string_view name) const {
  const std::size_t mask = slots_.size() - 1;
  std::size_t slot = SeededHash()(name) & mask;
  while (slots_[slot] != 0 && at(slots_[slot] - 1) != name) slot = (slot + 1) & mask;
  return slot;
}

}  // namespace torch_ckpt::index
