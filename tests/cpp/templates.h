#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "planning/state_template.h"

// Templates for plans, row by row.
namespace torch_ckpt::test {

using planning::StateTemplate;
using Kind = StateTemplate::Kind;
using Sizes = std::vector<std::int64_t>;

inline StateTemplate::Row row_of(StateTemplate& made, Kind kind, const Sizes& size,
                                 const Sizes& offsets, const Sizes& sizes,
                                 std::string_view dtype = "float32") {
  StateTemplate::Row row;
  row.kind = kind;
  row.dtype = made.add_dtype(dtype);
  row.size = made.add_extents(size);
  row.offsets = made.add_extents(offsets);
  row.sizes = made.add_extents(sizes);
  row.bytes = 4;
  for (const std::int64_t length : sizes) row.bytes *= static_cast<std::uint64_t>(length);
  return row;
}

inline void add(StateTemplate& made, std::string_view name, const StateTemplate::Row& row) {
  const StateTemplate::PathPart whole{static_cast<std::uint32_t>(name.size()), false};
  made.add(name, {&whole, 1}, row);
}
inline void add_tensor(StateTemplate& made, std::string_view name, const Sizes& size,
                       std::string_view dtype = "float32") {
  add(made, name, row_of(made, Kind::tensor, size, Sizes(size.size()), size, dtype));
}
inline void add_object(StateTemplate& made, std::string_view name) {
  StateTemplate::Row row;
  row.kind = Kind::object;
  add(made, name, row);
}

}  // namespace torch_ckpt::test
