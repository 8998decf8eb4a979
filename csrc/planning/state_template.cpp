#include "planning/state_template.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace torch_ckpt::planning {
namespace {

// Numbers in base 128, the lowest digit first; the top bit says that more follow.
void put(std::string& bytes, std::uint64_t number) {
  for (; number >= 0x80; number >>= 7) bytes += static_cast<char>(number | 0x80);
  bytes += static_cast<char>(number);
}
void put(std::string& bytes, std::string_view text) {
  put(bytes, text.size());
  bytes += text;
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  std::uint64_t number() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (rest_.empty()) break;
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      value |= std::uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    has_failed_ = true;
    return 0;
  }
  /// A number of things, each of which takes a byte at least.
  std::size_t count() {
    const std::uint64_t value = number();
    if (value <= rest_.size()) return static_cast<std::size_t>(value);
    has_failed_ = true;
    return 0;
  }
  std::string_view text() {
    const std::size_t size = count();
    const std::string_view found = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return found;
  }
  bool has_failed() const { return has_failed_; }
  bool is_at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
  bool has_failed_ = false;
};

}  // namespace

std::uint32_t StateTemplate::add_dtype(std::string_view dtype) {
  const auto found = std::ranges::find(dtypes_, dtype);
  if (found == dtypes_.end()) {
    dtypes_.emplace_back(dtype);
    return static_cast<std::uint32_t>(dtypes_.size() - 1);
  }
  return static_cast<std::uint32_t>(found - dtypes_.begin());
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
  for (const std::string& dtype : dtypes_) put(bytes, dtype);
  put(bytes, extents_.size());
  for (std::uint32_t id = 0; id < extents_.size(); ++id) {
    put(bytes, extents_.at(id).size());
    for (const std::int64_t number : extents_.at(id)) {
      put(bytes, static_cast<std::uint64_t>(number));
    }
  }
  put(bytes, rows_.size());
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    put(bytes,
        static_cast<std::uint64_t>(row.kind) | (row.is_here ? 4 : 0) | (row.requires_grad ? 8 : 0));
    put(bytes, names_.at(i));
    put(bytes, path(i).size());
    for (const PathPart& part : path(i)) {
      put(bytes, (std::uint64_t{part.bytes} << 1) | (part.is_number ? 1 : 0));
    }
    if (row.kind == Kind::tensor || row.kind == Kind::shard) {
      for (const std::uint32_t id : {row.dtype, row.size, row.offsets, row.sizes}) put(bytes, id);
    }
    put(bytes, row.bytes);
  }
  return bytes;
}

Result<StateTemplate> StateTemplate::decode(std::string_view bytes) {
  const auto damaged = [] {
    return format_error(Errc::frame_damaged, "what a rank tells of its state dict is damaged");
  };
  Reader reader(bytes);
  StateTemplate made;
  for (std::size_t left = reader.count(); left > 0; --left)
    made.dtypes_.emplace_back(reader.text());
  std::vector<std::int64_t> numbers;
  const std::size_t extents = reader.count();
  for (std::size_t i = 0; i < extents; ++i) {
    numbers.clear();
    for (std::size_t left = reader.count(); left > 0; --left) {
      numbers.push_back(static_cast<std::int64_t>(reader.number()));
    }
    if (made.extents_.intern(numbers) != i) return damaged();
  }
  const std::size_t rows = reader.count();
  made.names_.reserve(rows);
  made.rows_.reserve(rows);
  std::vector<PathPart> path;
  for (std::size_t i = 0; i < rows && !reader.has_failed(); ++i) {
    Row row;
    const std::uint64_t head = reader.number();
    row.kind = static_cast<Kind>(head & 3);
    row.is_here = (head & 4) != 0;
    row.requires_grad = (head & 8) != 0;
    const std::string_view name = reader.text();
    path.clear();
    for (std::size_t left = reader.count(); left > 0; --left) {
      const std::uint64_t part = reader.number();
      path.push_back({static_cast<std::uint32_t>(part >> 1), (part & 1) != 0});
    }
    if (row.kind == Kind::tensor || row.kind == Kind::shard) {
      row.dtype = static_cast<std::uint32_t>(reader.number());
      row.size = static_cast<std::uint32_t>(reader.number());
      row.offsets = static_cast<std::uint32_t>(reader.number());
      row.sizes = static_cast<std::uint32_t>(reader.number());
      if (row.dtype >= made.dtypes_.size() ||
          std::max({row.size, row.offsets, row.sizes}) >= extents) {
        return damaged();
      }
      const std::size_t dims = made.extents(row.size).size();
      if (made.extents(row.offsets).size() != dims || made.extents(row.sizes).size() != dims) {
        return damaged();
      }
    }
    row.bytes = reader.number();
    if (!made.add(name, path, row)) return damaged();
  }
  if (reader.has_failed() || !reader.is_at_end()) return damaged();
  return made;
}

}  // namespace torch_ckpt::planning
