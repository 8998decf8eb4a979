#include "index/name_table.h"

#include <algorithm>
#include <bit>

#include "seeded_hash.h"

namespace torch_ckpt::index {

std::optional<std::uint32_t> NameTable::find(std::string_view name) const {
  if (slots_.empty()) return std::nullopt;
  const Slot& found = slots_[slot_of(name, SeededHash()(name))];
  if (found.number == kFree) return std::nullopt;
  return found.number;
}

std::pair<std::uint32_t, bool> NameTable::add(std::string_view name) {
  if (2 * (size() + 1) > slots_.size()) reserve(std::max<std::size_t>(32, 2 * size()));
  const std::uint64_t hash = SeededHash()(name);
  Slot& slot = slots_[slot_of(name, hash)];
  if (slot.number != kFree) return {slot.number, false};
  slot = {static_cast<std::uint32_t>(size()), static_cast<std::uint32_t>(hash)};
  texts_ += name;
  begins_.push_back(texts_.size());
  return {slot.number, true};
}

void NameTable::reserve(std::size_t names) {
  const std::size_t count = std::bit_ceil(2 * names + 1);
  if (count <= slots_.size()) return;
  const std::vector<Slot> before = std::exchange(slots_, std::vector<Slot>(count));
  for (const Slot& slot : before) {
    if (slot.number == kFree) continue;
    std::size_t at = slot.hash & (count - 1);
    while (slots_[at].number != kFree) at = (at + 1) & (count - 1);
    slots_[at] = slot;
  }
}

std::size_t NameTable::slot_of(std::string_view name, std::uint64_t hash) const {
  const std::size_t mask = slots_.size() - 1;
  const auto part = static_cast<std::uint32_t>(hash);
  std::size_t at_slot = part & mask;
  for (; slots_[at_slot].number != kFree; at_slot = (at_slot + 1) & mask) {
    if (slots_[at_slot].hash == part && at(slots_[at_slot].number) == name) break;
  }
  return at_slot;
}

}  // namespace torch_ckpt::index
