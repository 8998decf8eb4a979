#include "index/name_table.h"

#include "seeded_hash.h"

namespace torch_ckpt::index {

std::optional<std::uint32_t> NameTable::find(std::string_view name) const {
  return numbers_.find(SeededHash()(name),
                       [&](std::uint32_t number) { return at(number) == name; });
}

std::pair<std::uint32_t, bool> NameTable::add(std::string_view name) {
  const auto added = numbers_.add(SeededHash()(name), size(),
                                  [&](std::uint32_t number) { return at(number) == name; });
  if (added.second) {
    texts_ += name;
    begins_.push_back(texts_.size());
  }
  return added;
}

}  // namespace torch_ckpt::index
