#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace torch_ckpt::index {

/// A hash table of the ids of keys. The caller stores the keys, usually in an array by id, so the
/// table can be copied and moved with that array. Pass seeded hashes if the keys are untrusted.
class IdTable {
 public:
  /// Returns the id for which is_key(id) is true. All calls for a key must pass the same hash.
  template <class IsKey>
  std::optional<std::uint32_t> find(std::uint64_t hash, IsKey is_key) const {
    if (slots_.empty()) return std::nullopt;
    const Slot& slot = slots_[slot_of(hash, is_key)];
    return slot.id == kFree ? std::nullopt : std::optional(slot.id);
  }
  /// Returns the id of the key, and true if the key was not in the table before. A new key gets
  /// `id`, which must be less than 2^32 - 1.
  template <class IsKey>
  std::pair<std::uint32_t, bool> add(std::uint64_t hash, std::size_t id, IsKey is_key) {
    if (2 * (count_ + 1) > slots_.size()) reserve(std::max<std::size_t>(32, 2 * count_));
    Slot& slot = slots_[slot_of(hash, is_key)];
    if (slot.id != kFree) return {slot.id, false};
    slot = {static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(hash)};
    ++count_;
    return {slot.id, true};
  }
  void reserve(std::size_t keys) {
    const std::size_t size = std::bit_ceil(2 * keys + 1);
    if (size <= slots_.size()) return;
    const std::vector<Slot> before = std::exchange(slots_, std::vector<Slot>(size));
    for (const Slot& slot : before) {
      if (slot.id != kFree) slots_[slot_of(slot.hash, [](std::uint32_t) { return false; })] = slot;
    }
  }

 private:
  static constexpr std::uint32_t kFree = 0xffffffff;
  struct Slot {
    std::uint32_t id = kFree;
    std::uint32_t hash = 0;  // low bits of the key's hash, to skip most comparisons of keys
  };

  /// Returns the slot that holds the key, or the free slot for it.
  template <class IsKey>
  std::size_t slot_of(std::uint64_t hash, IsKey is_key) const {
    const auto low = static_cast<std::uint32_t>(hash);
    const std::size_t mask = slots_.size() - 1;
    std::size_t at = low & mask;
    while (slots_[at].id != kFree && !(slots_[at].hash == low && is_key(slots_[at].id))) {
      at = (at + 1) & mask;
    }
    return at;
  }

  std::vector<Slot> slots_;  // the size is a power of two
  std::size_t count_ = 0;
};

}  // namespace torch_ckpt::index
