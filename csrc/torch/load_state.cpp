#include "torch/load_state.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>
#include <utility>

namespace py = pybind11;

namespace torch_ckpt::tensors {

using index::CheckpointIndex;

namespace {

/// Returns an attribute, or nothing if the object lacks it.
PythonRef attribute(PyObject* object, const char* name) {
  PythonRef found(PyObject_GetAttrString(object, name));
  if (!found) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
    PyErr_Clear();
  }
  return found;
}

std::vector<std::int64_t> vector_of(std::span<const std::int64_t> numbers) {
  return {numbers.begin(), numbers.end()};
}

bool permits(SizeRule rule, std::span<const std::int64_t> stored,
             std::span<const std::int64_t> wanted) {
  if (stored.size() != wanted.size()) return false;
  for (std::size_t d = 0; d < stored.size(); ++d) {
    const bool fits = rule == SizeRule::any || stored[d] == wanted[d] ||
                      (rule == SizeRule::growing && stored[d] < wanted[d]);
    if (!fits) return false;
  }
  return true;
}

/// Formats offsets as Python formats a tuple; 0 for a tensor without dimensions.
std::string text_of_offsets(std::span<const std::int64_t> offsets) {
  if (offsets.empty()) return "0";
  std::string text = "(";
  for (const std::int64_t offset : offsets) text += std::to_string(offset) + ", ";
  if (offsets.size() > 1) text.pop_back();
  text.pop_back();
  if (offsets.size() == 1) text += ',';
  return text + ')';
}

/// Fails if the metadata has no location for a record.
void require_file(std::string_view name, const CheckpointIndex::Shard& shard,
                  std::span<const std::int64_t> offsets) {
  if (shard.file != CheckpointIndex::kNone) return;
  throw Failure(
      format_error(Errc::metadata_inconsistent,
                   std::string(name) + ": the metadata gives no location for the shard at offset " +
                       text_of_offsets(offsets) + "; the save that wrote it was incomplete"));
}

/// Fails if stored boxes, relative to `begins`, leave an element of a part unread.
void require_complete(std::string_view name, std::span<const std::int64_t> wanted,
                      std::span<const std::int64_t> begins, std::vector<planning::Box> boxes,
                      std::uint64_t found, std::uint64_t elements,
                      const InterruptCheck& check_interrupt) {
  const auto fail = [&](const std::string& how) {
    throw Failure(
        format_error(Errc::metadata_inconsistent,
                     std::string(name) + ": " + how + "; the save that wrote them was incomplete"));
  };
  if (found < elements) {
    fail("the shards in the metadata contain only " + std::to_string(found) + " of the " +
         std::to_string(elements) + " wanted elements");
  }
  if (found == elements && (boxes.size() == 1 || planning::tile(wanted, boxes))) return;
  const std::size_t count = boxes.size();
  const auto coverage = planning::check_coverage(wanted, std::move(boxes), check_interrupt).value();
  if (coverage.state == planning::Coverage::State::complete) return;
  fail("shards in the metadata overlap, and " + planning::describe(coverage, count, begins));
}

}  // namespace

void plan_box(const CheckpointIndex& index, std::string_view name,
              const CheckpointIndex::Entry& entry, const planning::Box& wanted_box,
              const Tensor& target, TensorReads& reads, const InterruptCheck& check_interrupt) {
  const auto& [begins, room] = wanted_box;
  const auto stored = index.extents(entry.size);
  const std::size_t dims = stored.size();
  std::vector<std::int64_t> wanted = room;
  std::uint64_t elements = 1;
  for (std::size_t d = 0; d < dims; ++d) {
    wanted[d] = std::clamp(stored[d] - begins[d], std::int64_t{0}, wanted[d]);
    elements *= static_cast<std::uint64_t>(wanted[d]);
  }
  if (elements == 0) return;
  const std::optional<ScalarType> dtype = ScalarType::named(index.dtypes()[entry.dtype]);
  if (!dtype) {
    throw Failure(format_error(
        Errc::metadata_inconsistent,
        std::string(name) + ": the installed torch has no dtype " + index.dtypes()[entry.dtype]));
  }
  std::vector<planning::Box> boxes;
  std::uint64_t found = 0;
  for (const CheckpointIndex::Shard& shard : index.shards(entry)) {
    const auto offsets = index.extents(shard.offsets);
    const auto sizes = index.extents(shard.sizes);
    // The intersection, relative to the wanted box.
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
    require_file(name, shard, offsets);
    found += common;
    Tensor filled = target;
    for (std::size_t d = 0; d < dims; ++d) {
      if (box.lengths[d] == room[d]) continue;
      filled = filled.narrow(d, box.offsets[d], box.lengths[d]);
    }
    const std::size_t file = reads.file_number(index.text(index.files()[shard.file]));
    TensorRead read = make_read({std::string(name), file, shard.offset, shard.length}, *dtype,
                                {sizes.data(), dims}, {region.data(), dims},
                                {box.lengths.data(), dims}, std::move(filled));
    read.is_transformed = shard.is_transformed;
    reads.add(std::move(read));
    boxes.push_back(std::move(box));
  }
  require_complete(name, wanted, begins, std::move(boxes), found, elements, check_interrupt);
}

std::optional<LoadState::TensorLike> LoadState::tensor_like(const Row& row) const {
  if (row.has_tensor()) {
    return TensorLike{vector_of(extents().at(row.size)), row.local.dtype()};
  }
  PyObject* value = row.value.get();
  // Most values of this kind are numbers and texts.
  if (value == Py_None || PyLong_Check(value) || PyFloat_Check(value) || PyUnicode_Check(value)) {
    return std::nullopt;
  }
  const PythonRef dtype = attribute(value, "dtype");
  PythonRef size = attribute(value, "global_shape");
  if (!size) {
    const PythonRef method = attribute(value, "size");
    if (!dtype || !method || PyCallable_Check(method.get()) == 0) return std::nullopt;
    size = PythonRef(PyObject_CallNoArgs(method.get()));
    if (!size) throw py::error_already_set();
  }
  TensorLike found{{}, ScalarType::of(dtype.get())};
  // A storage also has size() and dtype, but its size is a number.
  if (!numbers_of(size.get(), found.size)) return std::nullopt;
  return found;
}

MatchReport LoadState::match(const CheckpointIndex& index, SizeRule rule,
                             const std::function<bool(std::string_view)>& chosen) {
  index_ = &index;
  entries_.assign(size(), kNone);
  dtypes_.clear();
  for (const std::string& name : index.dtypes()) dtypes_.push_back(ScalarType::named(name));
  MatchReport report;
  std::vector<bool> is_wanted(index.entries().size());
  enum class Found : std::uint8_t { nothing, values, loaded };
  std::vector<Found> by_key(keys().size(), Found::nothing);
  std::vector<bool> key_loads(keys().size());
  for (std::size_t i = 0; i < size(); ++i) {
    const Row& target = row(i);
    if (target.is_removed) continue;
    const auto entry = index.find(name(i));
    if (entry) is_wanted[*entry] = true;
    if (chosen && !chosen(name(i))) continue;
    if (!entry) {
      report.missing.push_back(name(i));
    } else if (compare(i, index.entries()[*entry], rule, report)) {
      entries_[i] = *entry;
      report.loaded.push_back(name(i));
      key_loads[target.key] = true;
    }
    // Skip top-level values. Skip a None that the checkpoint lacks, because it may be the value of
    // another rank.
    if (name(i) == keys().at(target.key)) continue;
    if (target.value.get() == Py_None && !entry) continue;
    const Found here = entries_[i] == kNone ? Found::values : Found::loaded;
    by_key[target.key] = std::max(by_key[target.key], here);
  }
  for (std::size_t key = 0; key < by_key.size(); ++key) {
    if (by_key[key] == Found::values) report.absent_keys.push_back(keys().at(key));
    if (key_loads[key]) report.loaded_keys.push_back(keys().at(key));
  }
  for (std::size_t entry = 0; entry < is_wanted.size(); ++entry) {
    if (!is_wanted[entry]) report.unexpected.push_back(index.name(entry));
  }
  return report;
}

/// Compares a value with its entry. Returns true if it can be loaded.
bool LoadState::compare(std::size_t number, const Entry& entry, SizeRule rule,
                        MatchReport& report) const {
  const std::optional<TensorLike> wanted = tensor_like(row(number));
  // Accept an object for a tensor without dimensions: a counter may be either.
  if (entry.is_tensor ? !wanted : wanted && !wanted->size.empty()) {
    report.kinds.push_back(number);
    return false;
  }
  if (!entry.is_tensor) return true;
  const auto stored_dtype = dtypes_[entry.dtype];
  if (stored_dtype && wanted->dtype && *stored_dtype != *wanted->dtype) {
    report.dtypes.push_back({name(number), *stored_dtype, *wanted->dtype});
  }
  const auto stored = index_->extents(entry.size);
  if (std::ranges::equal(stored, wanted->size)) return true;
  const MatchReport::Sizes sizes{name(number), vector_of(stored), wanted->size};
  if (!permits(rule, sizes.stored, sizes.wanted)) {
    report.shapes.push_back(sizes);
    return false;
  }
  bool is_grown = false;
  bool is_truncated = false;
  for (std::size_t d = 0; d < sizes.stored.size(); ++d) {
    is_grown |= sizes.stored[d] < sizes.wanted[d];
    is_truncated |= sizes.stored[d] > sizes.wanted[d];
  }
  if (is_grown) report.grown.push_back(sizes);
  if (is_truncated) report.truncated.push_back(sizes);
  return true;
}

std::vector<std::size_t> LoadState::loaded() const {
  std::vector<std::size_t> rows;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i] != kNone) rows.push_back(i);
  }
  return rows;
}

std::vector<std::size_t> LoadState::loaded_on_meta() const {
  std::vector<std::size_t> rows = loaded();
  std::erase_if(rows, [&](std::size_t number) {
    const Row& target = row(number);
    if (target.local.defined()) return !target.local.is_meta();
    return !Tensor::is_tensor(target.value.get()) || !Tensor::of(target.value.get()).is_meta();
  });
  return rows;
}

const LoadState::Shard& LoadState::record(std::size_t row) const {
  return index_->shards(index_->entries()[entries_[row]]).front();
}

std::string_view LoadState::file_of(const Shard& shard) const {
  return index_->text(index_->files()[shard.file]);
}

std::vector<std::size_t> LoadState::undescribed() const {
  std::vector<std::size_t> rows = loaded();
  std::erase_if(rows, [&](std::size_t number) {
    return row(number).has_tensor() || !index_->entries()[entries_[number]].is_tensor;
  });
  return rows;
}

std::vector<std::size_t> LoadState::plan(TensorReads& reads,
                                         const InterruptCheck& check_interrupt) const {
  std::vector<std::size_t> objects;
  const std::vector<std::size_t> rows = loaded();
  reads.reserve(rows.size());
  for (const std::size_t number : rows) {
    const Entry& entry = index_->entries()[entries_[number]];
    if (entry.is_tensor) {
      for (const Part& part : parts_of(row(number))) {
        plan_box(*index_, name(number), entry, part.box, part.target, reads, check_interrupt);
      }
    } else {
      require_file(name(number), record(number), {});
      objects.push_back(number);
    }
  }
  return objects;
}

std::vector<LoadState::Part> LoadState::parts_of(const Row& row) const {
  const auto box_of = [&](std::uint32_t offsets, std::uint32_t sizes) {
    return planning::Box{vector_of(extents().at(offsets)), vector_of(extents().at(sizes))};
  };
  std::vector<Part> parts;
  if (row.kind == Kind::dtensor) {
    const LocalBox& part = box(row);
    if (part.is_present) parts.push_back({box_of(part.offsets, part.sizes), row.local});
  } else if (row.kind == Kind::plain) {
    const auto sizes = extents().at(row.size);
    parts.push_back({{std::vector<std::int64_t>(sizes.size()), vector_of(sizes)}, row.local});
  } else if (row.description != nullptr) {
    for (const Description::Part& part : row.description->parts) {
      parts.push_back({box_of(part.offsets, part.sizes), Tensor::of(part.value.get())});
    }
  }
  return parts;
}

void LoadState::zero_unstored() const {
  for (const std::size_t number : loaded()) {
    const Row& target = row(number);
    const Entry& entry = index_->entries()[entries_[number]];
    if (!entry.is_tensor || (!target.has_tensor() && !target.description)) continue;
    const auto stored = index_->extents(entry.size);
    if (std::ranges::equal(stored, extents().at(target.size))) continue;
    for (const Part& part : parts_of(target)) {
      const InferenceMode inference;
      py::object left = py::handle(part.target.object()).attr("detach")();
      for (std::size_t d = 0; d < stored.size(); ++d) {
        const std::int64_t length = part.target.sizes()[d];
        const std::int64_t kept =
            std::clamp(stored[d] - part.box.offsets[d], std::int64_t{0}, length);
        if (kept < length) left.attr("narrow")(d, kept, length - kept).attr("zero_")();
        left = left.attr("narrow")(d, 0, kept);
      }
    }
  }
}

}  // namespace torch_ckpt::tensors
