#include "planning/state_template.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "planning/message_bytes.h"

namespace torch_ckpt::planning {
namespace {

void put_extents(std::string& bytes, const index::ExtentsTable& extents) {
  put(bytes, extents.size());
  for (std::uint32_t id = 0; id < extents.size(); ++id) {
    put(bytes, extents.at(id).size());
    for (const std::int64_t number : extents.at(id)) {
      put(bytes, static_cast<std::uint64_t>(number));
    }
  }
}

bool read_extents(MessageReader& reader, index::ExtentsTable& extents) {
  std::vector<std::int64_t> numbers;
  const std::size_t count = reader.count();
  for (std::size_t i = 0; i < count; ++i) {
    numbers.clear();
    for (std::size_t left = reader.count(); left > 0; --left) {
      numbers.push_back(static_cast<std::int64_t>(reader.number()));
    }
    if (extents.intern(numbers) != i) return false;
  }
  return true;
}

Error damaged() {
  return format_error(Errc::frame_damaged, "a rank's description of its state dict is damaged");
}

bool is_tensor(StateTemplate::Kind kind) {
  return kind == StateTemplate::Kind::tensor || kind == StateTemplate::Kind::shard;
}

}  // namespace

std::uint32_t StateTemplate::add_dtype(std::string_view name, std::uint64_t item_bytes) {
  const auto found = std::ranges::find(dtypes_, name, &Dtype::name);
  const auto number = static_cast<std::uint32_t>(found - dtypes_.begin());
  if (found == dtypes_.end()) dtypes_.push_back({std::string(name), item_bytes});
  return number;
}

bool StateTemplate::add(std::string_view name, std::span<const PathPart> path, const Row& row) {
  if (!names_.add(name).second) return false;
  rows_.push_back(row);
  parts_.insert(parts_.end(), path.begin(), path.end());
  begins_.push_back(parts_.size());
  return true;
}

std::string StateTemplate::encode() const {
  std::string bytes;
  put(bytes, dtypes_.size());
  for (const Dtype& dtype : dtypes_) {
    put(bytes, dtype.name);
    put(bytes, dtype.item_bytes);
  }
  put_extents(bytes, extents_);
  put(bytes, rows_.size());
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    put(bytes, static_cast<std::uint64_t>(row.kind) | (row.is_described ? 4 : 0) |
                   (row.requires_grad ? 8 : 0));
    put(bytes, names_.at(i));
    put(bytes, path(i).size());
    for (const PathPart& part : path(i)) {
      put(bytes, (std::uint64_t{part.bytes} << 1) | (part.is_number ? 1 : 0));
    }
    if (is_tensor(row.kind)) {
      put(bytes, row.dtype);
      put(bytes, row.size);
    }
  }
  return bytes;
}

Result<StateTemplate> StateTemplate::decode(std::string_view bytes) {
  MessageReader reader(bytes);
  StateTemplate made;
  for (std::size_t left = reader.count(); left > 0; --left) {
    const std::string_view name = reader.text();
    made.dtypes_.push_back({std::string(name), reader.number()});
  }
  if (!read_extents(reader, made.extents_)) return damaged();
  const std::size_t rows = reader.count();
  made.names_.reserve(rows);
  made.rows_.reserve(rows);
  std::vector<PathPart> path;
  for (std::size_t i = 0; i < rows && !reader.has_failed(); ++i) {
    Row row;
    const std::uint64_t head = reader.number();
    row.kind = static_cast<Kind>(head & 3);
    row.is_described = (head & 4) != 0;
    row.requires_grad = (head & 8) != 0;
    const std::string_view name = reader.text();
    path.clear();
    for (std::size_t left = reader.count(); left > 0; --left) {
      const std::uint64_t part = reader.number();
      path.push_back({static_cast<std::uint32_t>(part >> 1), (part & 1) != 0});
    }
    if (is_tensor(row.kind)) {
      row.dtype = static_cast<std::uint32_t>(reader.number());
      row.size = static_cast<std::uint32_t>(reader.number());
      if (row.dtype >= made.dtypes_.size() || row.size >= made.extents_.size()) return damaged();
    }
    if (!made.add(name, path, row)) return damaged();
  }
  if (reader.has_failed() || !reader.is_at_end()) return damaged();
  return made;
}

std::uint64_t RankState::bytes(std::size_t item) const {
  const StateTemplate::Row& what = row(item);
  if (!is_tensor(what.kind) || !has(item)) return 0;
  const auto sizes =
      what.kind == StateTemplate::Kind::shard ? this->sizes(box(item)) : template_->sizes(what);
  std::uint64_t all = template_->item_bytes(what);
  for (const std::int64_t size : sizes) all *= static_cast<std::uint64_t>(size);
  return all;
}

void RankState::set_box(std::size_t item, std::span<const std::int64_t> offsets,
                        std::span<const std::int64_t> sizes, std::uint64_t layout) {
  const auto found = std::ranges::find(layouts_, layout);
  const BoxIds box{extents_.intern(offsets), extents_.intern(sizes),
                   static_cast<std::uint32_t>(found - layouts_.begin())};
  if (found == layouts_.end()) layouts_.push_back(layout);
  const auto [known, is_new] = box_numbers_.try_emplace(
      std::tuple(box.offsets, box.sizes, box.layout), static_cast<std::uint32_t>(boxes_.size()));
  if (is_new) boxes_.push_back(box);
  boxes_of_items_[item] = known->second;
}

std::string RankState::encode() const {
  std::string bytes;
  put_extents(bytes, extents_);
  put(bytes, layouts_.size());
  for (const std::uint64_t layout : layouts_) put(bytes, layout);
  put(bytes, boxes_.size());
  for (const BoxIds& box : boxes_) {
    put(bytes, box.offsets);
    put(bytes, box.sizes);
    put(bytes, box.layout);
  }
  // The number of items of each row, if it is not one for all rows.
  put(bytes, rows_of_items_.empty() ? 0 : 1);
  for (std::size_t row = 0, item = 0; item < rows_of_items_.size(); ++row) {
    const std::size_t first = item;
    while (item < rows_of_items_.size() && rows_of_items_[item] == row) ++item;
    put(bytes, item - first);
  }
  // For each run of consecutive shards with the same box, write the length of the run and the box
  // number + 1, or 0 if the rank has no part of these shards.
  std::size_t item = 0;
  while (item < items()) {
    if (row(item).kind != StateTemplate::Kind::shard) {
      ++item;
      continue;
    }
    const std::uint32_t box = boxes_of_items_[item];
    std::uint64_t count = 0;
    for (; item < items(); ++item) {
      if (row(item).kind != StateTemplate::Kind::shard) continue;
      if (boxes_of_items_[item] != box) break;
      ++count;
    }
    put(bytes, count);
    put(bytes, box == kNone ? 0 : std::uint64_t{box} + 1);
  }
  return bytes;
}

Result<RankState> RankState::decode(std::shared_ptr<const StateTemplate> of,
                                    std::string_view bytes) {
  MessageReader reader(bytes);
  RankState made(std::move(of));
  if (!read_extents(reader, made.extents_)) return damaged();
  for (std::size_t left = reader.count(); left > 0; --left) {
    made.layouts_.push_back(reader.number());
  }
  for (std::size_t left = reader.count(); left > 0; --left) {
    const auto offsets = static_cast<std::uint32_t>(reader.number());
    const auto sizes = static_cast<std::uint32_t>(reader.number());
    const auto layout = static_cast<std::uint32_t>(reader.number());
    if (layout >= made.layouts_.size() || offsets >= made.extents_.size() ||
        sizes >= made.extents_.size() ||
        made.extents_.at(offsets).size() != made.extents_.at(sizes).size()) {
      return damaged();
    }
    made.boxes_.push_back({offsets, sizes, layout});
  }
  if (reader.number() != 0) {
    for (std::uint32_t row = 0; row < made.template_->size(); ++row) {
      // Each part of a tensor has a box of its own.
      const std::uint64_t count = reader.number();
      if (count == 0 || count > std::max<std::size_t>(made.boxes_.size(), 1)) return damaged();
      made.rows_of_items_.insert(made.rows_of_items_.end(), count, row);
    }
    made.boxes_of_items_.resize(made.rows_of_items_.size(), kNone);
  }
  std::uint64_t left = 0;
  std::uint64_t box = 0;
  for (std::size_t item = 0; item < made.items(); ++item) {
    const StateTemplate::Row& what = made.row(item);
    if (what.kind != StateTemplate::Kind::shard) continue;
    if (left == 0) {
      left = reader.number();
      box = reader.number();
      if (left == 0 || box > made.boxes_.size()) return damaged();
    }
    --left;
    if (box == 0) continue;
    const auto number = static_cast<std::uint32_t>(box - 1);
    if (made.offsets(number).size() != made.template_->sizes(what).size()) return damaged();
    made.boxes_of_items_[item] = number;
  }
  if (left != 0 || reader.has_failed() || !reader.is_at_end()) return damaged();
  return made;
}

}  // namespace torch_ckpt::planning
