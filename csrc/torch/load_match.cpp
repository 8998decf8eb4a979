#include "torch/load_match.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <utility>

#include "planning/tiling.h"

namespace torch_ckpt::tensors {

using index::CheckpointIndex;

namespace {

/// Returns torch's dtype with this name (without "torch."), or nullopt if this version of torch
/// lacks it.
std::optional<at::ScalarType> scalar_type_named(const std::string& name) {
  const PythonRef torch(PyImport_ImportModule("torch"));
  if (!torch) throw python_error();
  const PythonRef dtype(PyObject_GetAttrString(torch.get(), name.c_str()));
  if (!dtype) {
    PyErr_Clear();
    return std::nullopt;
  }
  if (!THPDtype_Check(dtype.get())) return std::nullopt;
  return reinterpret_cast<THPDtype*>(dtype.get())->scalar_type;
}

}  // namespace

LoadMatch::LoadMatch(const FlatState& state, const CheckpointIndex& index, SizeRule rule,
                     const std::vector<bool>& chosen)
    : state_(state),
      index_(index),
      rule_(rule),
      statuses_(state.size(), Status::skipped),
      entries_(state.size(), kNone),
      is_wanted_(index.entries().size()) {
  for (const std::string& name : index.dtypes()) dtypes_.push_back(scalar_type_named(name));
  for (std::size_t i = 0; i < state.size(); ++i) {
    const FlatState::Row& row = state.row(i);
    if (row.is_removed) continue;
    const auto entry = index.find(state.name(i));
    if (entry) is_wanted_[*entry] = true;
    if (!chosen.empty() && !chosen[i]) continue;
    entries_[i] = entry.value_or(kNone);
    if (row.kind == FlatState::Kind::other) {
      statuses_[i] = Status::pending;
    } else if (!entry) {
      statuses_[i] = Status::missing;
    } else {
      statuses_[i] = compare(row, index.entries()[*entry]);
    }
  }
}

LoadMatch::Status LoadMatch::compare(const FlatState::Row& row, const Entry& entry) const {
  const auto wanted = state_.extents().at(row.size);
  if (!entry.is_tensor) {
    // Accept an object for a tensor without dimensions: a counter may be either.
    return wanted.empty() ? Status::loaded : Status::kind;
  }
  const auto stored = index_.extents(entry.size);
  if (stored.size() != wanted.size()) return Status::shape;
  for (std::size_t d = 0; d < stored.size(); ++d) {
    const bool fits = rule_ == SizeRule::any || stored[d] == wanted[d] ||
                      (rule_ == SizeRule::growing && stored[d] < wanted[d]);
    if (!fits) return Status::shape;
  }
  return Status::loaded;
}

std::vector<std::size_t> LoadMatch::rows_with(Status status) const {
  std::vector<std::size_t> rows;
  for (std::size_t i = 0; i < statuses_.size(); ++i) {
    if (statuses_[i] == status && !state_.row(i).is_removed) rows.push_back(i);
  }
  return rows;
}

std::vector<std::uint32_t> LoadMatch::unexpected() const {
  std::vector<std::uint32_t> found;
  for (std::uint32_t i = 0; i < index_.entries().size(); ++i) {
    if (!is_wanted_[i]) found.push_back(i);
  }
  return found;
}

std::vector<std::uint32_t> LoadMatch::absent() const {
  enum class Found : std::uint8_t { nothing, values, loaded };
  std::vector<Found> found(state_.keys().size(), Found::nothing);
  for (std::size_t i = 0; i < statuses_.size(); ++i) {
    const FlatState::Row& row = state_.row(i);
    // Skip top-level values. Skip None too, because it counts only on its own rank.
    if (row.is_removed || statuses_[i] == Status::skipped || row.value.get() == Py_None ||
        state_.name(i) == state_.keys().at(row.key)) {
      continue;
    }
    const Found here = statuses_[i] == Status::loaded ? Found::loaded : Found::values;
    found[row.key] = std::max(found[row.key], here);
  }
  std::vector<std::uint32_t> keys;
  for (std::uint32_t key = 0; key < found.size(); ++key) {
    if (found[key] == Found::values) keys.push_back(key);
  }
  return keys;
}

std::vector<std::uint32_t> LoadMatch::keys() const {
  std::vector<bool> found(state_.keys().size());
  for (const std::size_t row : rows_with(Status::loaded)) found[state_.row(row).key] = true;
  std::vector<std::uint32_t> keys;
  for (std::uint32_t key = 0; key < found.size(); ++key) {
    if (found[key]) keys.push_back(key);
  }
  return keys;
}

const LoadMatch::Entry* LoadMatch::tensor(std::size_t row) const {
  if (state_.row(row).kind == FlatState::Kind::other || entries_[row] == kNone) return nullptr;
  const Entry& entry = index_.entries()[entries_[row]];
  return entry.is_tensor ? &entry : nullptr;
}

std::vector<std::size_t> LoadMatch::plan() {
  std::vector<std::size_t> left;
  files_.clear();
  file_numbers_.assign(index_.files().size(), kNone);
  targets_.clear();
  targets_.reserve(statuses_.size());
  for (std::size_t i = 0; i < statuses_.size(); ++i) {
    if (statuses_[i] != Status::loaded) continue;
    const std::size_t before = targets_.size();
    if (plan_row(i)) continue;
    targets_.erase(targets_.begin() + static_cast<std::ptrdiff_t>(before), targets_.end());
    left.push_back(i);
  }
  return left;
}

std::uint32_t LoadMatch::file_number(std::uint32_t file) {
  std::uint32_t& number = file_numbers_[file];
  if (number == kNone) {
    number = static_cast<std::uint32_t>(files_.size());
    files_.push_back(file);
  }
  return number;
}

/// Plans the reads of a row. Returns false if the row is left to the caller.
bool LoadMatch::plan_row(std::size_t number) {
  const FlatState::Row& row = state_.row(number);
  if (row.kind == FlatState::Kind::other) return false;
  const Entry& entry = index_.entries()[entries_[number]];
  if (!entry.is_tensor) return false;
  const std::optional<at::ScalarType> scalar_type = dtypes_[entry.dtype];
  if (!scalar_type) return false;
  const auto stored = index_.extents(entry.size);
  const std::size_t dims = stored.size();
  std::vector<std::int64_t> begins(dims);
  std::vector<std::int64_t> wanted(state_.extents().at(row.size).begin(),
                                   state_.extents().at(row.size).end());
  if (row.kind == FlatState::Kind::dtensor) {
    const FlatState::Box& box = state_.box(row);
    if (!box.is_present) return true;
    begins.assign(state_.extents().at(box.offsets).begin(), state_.extents().at(box.offsets).end());
    wanted.assign(state_.extents().at(box.sizes).begin(), state_.extents().at(box.sizes).end());
  }
  const std::vector<std::int64_t> room = wanted;
  std::uint64_t elements = 1;
  for (std::size_t d = 0; d < dims; ++d) {
    wanted[d] = std::clamp(stored[d] - begins[d], std::int64_t{0}, wanted[d]);
    elements *= static_cast<std::uint64_t>(wanted[d]);
  }
  if (elements == 0) return true;
  const at::Tensor whole = row.local.detach();
  std::vector<planning::Box> boxes;
  std::uint64_t found = 0;
  for (const Shard& shard : index_.shards(entry)) {
    const auto offsets = index_.extents(shard.offsets);
    const auto sizes = index_.extents(shard.sizes);
    // The intersection, relative to this rank's part of the tensor.
    planning::Box box{std::vector<std::int64_t>(dims), std::vector<std::int64_t>(dims)};
    std::vector<std::int64_t> region(dims);
    std::uint64_t common = 1;
    for (std::size_t d = 0; common > 0 && d < dims; ++d) {
      const std::int64_t begin = std::max(offsets[d], begins[d]);
      const std::int64_t end = std::min(offsets[d] + sizes[d], begins[d] + wanted[d]);
      common = end <= begin ? 0 : common * static_cast<std::uint64_t>(end - begin);
      region[d] = begin - offsets[d];
      box.offsets[d] = begin - begins[d];
      box.lengths[d] = end - begin;
    }
    if (common == 0) continue;
    if (shard.file == kNone || shard.is_transformed) return false;
    found += common;
    at::Tensor part = whole;
    for (std::size_t d = 0; d < dims; ++d) {
      if (box.lengths[d] == room[d]) continue;
      part = part.narrow(static_cast<std::int64_t>(d), box.offsets[d], box.lengths[d]);
    }
    targets_.push_back(make_target(std::string(state_.name(number)), file_number(shard.file),
                                   shard.offset, shard.length, *scalar_type, {sizes.data(), dims},
                                   {region.data(), dims}, {box.lengths.data(), dims},
                                   std::move(part)));
    boxes.push_back(std::move(box));
  }
  return found == elements && (boxes.size() == 1 || planning::tile(wanted, boxes));
}

}  // namespace torch_ckpt::tensors
