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
                 std::string_view dtype = "float32", std::uint64_t layout = 0) {
    boxes_.push_back({template_.size(), offsets, sizes, layout});
    add(name, Kind::shard, size, dtype);
  }
  /// An item that is not present on the rank.
  void add_empty_shard(std::string_view name, const Sizes& size) {
    add(name, Kind::shard, size, "float32");
  }

  RankState state() const {
    RankState made(std::make_shared<const StateTemplate>(template_));
    for (const Part& part : boxes_) {
      made.set_box(part.row, part.offsets, part.sizes, part.layout);
    }
    return made;
  }

 private:
  struct Part {
    std::size_t row = 0;
    Sizes offsets;
    Sizes sizes;
    std::uint64_t layout = 0;
  };

  void add(std::string_view name, Kind kind, const Sizes& size, std::string_view dtype) {
    const StateTemplate::PathPart whole{static_cast<std::uint32_t>(name.size()), false};
    StateTemplate::Row row;
    row.kind = kind;
    if (kind != Kind::object) {
      row.dtype = template_.add_dtype(dtype, 4);
      row.size = template_.add_size(size);
    }
    template_.add(name, {&whole, 1}, row);
  }

  StateTemplate template_;
  std::vector<Part> boxes_;
};

inline std::vector<RankState> states_of(std::span<const Rows> ranks) {
  std::vector<RankState> states;
  for (const Rows& rows : ranks) states.push_back(rows.state());
  return states;
}

}  // namespace torch_ckpt::test
