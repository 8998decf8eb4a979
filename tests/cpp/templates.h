#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "planning/state_template.h"

namespace torch_ckpt::test {

using planning::RankState;
using planning::StateTemplate;
using Kind = StateTemplate::Kind;
using Sizes = std::vector<std::int64_t>;

// Builds the state of a rank.
class Rows {
 public:
  void add_tensor(std::string_view name, const Sizes& size, std::string_view dtype = "float32") {
    add(name, Kind::tensor, size, dtype);
  }
  void add_object(std::string_view name) { add(name, Kind::object, {}, "float32"); }
  void add_shard(std::string_view name, const Sizes& size, const Sizes& offsets, const Sizes& sizes,
                 std::string_view dtype = "float32", std::uint64_t layout = 1) {
    boxes_.push_back({rows_of_items_.size(), offsets, sizes, layout});
    add(name, Kind::shard, size, dtype);
  }
  /// A tensor without a mesh of which the rank has several shards, given by offsets and sizes.
  void add_shards(std::string_view name, const Sizes& size,
                  const std::vector<std::pair<Sizes, Sizes>>& shards) {
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto& [offsets, sizes] = shards[i];
      boxes_.push_back({rows_of_items_.size() + i, offsets, sizes, RankState::kNoLayout});
    }
    add(name, Kind::shard, size, "float32", shards.size());
  }
  /// An item that is not present on the rank.
  void add_empty_shard(std::string_view name, const Sizes& size) {
    add(name, Kind::shard, size, "float32");
  }

  RankState state() const {
    const bool has_several = rows_of_items_.size() > template_.size();
    RankState made(std::make_shared<const StateTemplate>(template_),
                   has_several ? rows_of_items_ : std::vector<std::uint32_t>());
    for (const Part& part : boxes_) {
      made.set_box(part.item, part.offsets, part.sizes, part.layout);
    }
    return made;
  }

 private:
  struct Part {
    std::size_t item = 0;
    Sizes offsets;
    Sizes sizes;
    std::uint64_t layout = 0;
  };

  void add(std::string_view name, Kind kind, const Sizes& size, std::string_view dtype,
           std::size_t items = 1) {
    rows_of_items_.insert(rows_of_items_.end(), items,
                          static_cast<std::uint32_t>(template_.size()));
    const StateTemplate::PathPart whole{static_cast<std::uint32_t>(name.size()), false};
    StateTemplate::Row row;
    row.kind = kind;
    row.is_described = items > 1;
    if (kind != Kind::object) {
      row.dtype = template_.add_dtype(dtype, 4);
      row.size = template_.add_size(size);
    }
    template_.add(name, {&whole, 1}, row);
  }

  StateTemplate template_;
  std::vector<std::uint32_t> rows_of_items_;
  std::vector<Part> boxes_;
};

inline std::vector<RankState> states_of(std::span<const Rows> ranks) {
  std::vector<RankState> states;
  for (const Rows& rows : ranks) states.push_back(rows.state());
  return states;
}

}  // namespace torch_ckpt::test
