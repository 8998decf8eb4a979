#include "torch/flat_state.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <utility>

#include "checked_math.h"
#include "python/released_gil.h"
#include "torch/fingerprint.h"
#include "torch/tensor_checks.h"

namespace py = pybind11;

namespace torch_ckpt::tensors {
namespace {

// The string lives until the process ends, like an identifier in code.
PyObject* interned(const char* name) {
  PyObject* text = PyUnicode_InternFromString(name);
  if (text == nullptr) throw py::error_already_set();
  return text;
}

PythonRef checked(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return PythonRef(object);
}

PythonRef imported(const char* module, const char* name) {
  const PythonRef loaded = checked(PyImport_ImportModule(module));
  return checked(PyObject_GetAttrString(loaded.get(), name));
}

/// Raises RecursionError if a state dict contains itself.
class Recursion {
 public:
  Recursion() {
    if (Py_EnterRecursiveCall(" in a state dict") != 0) throw py::error_already_set();
  }
  ~Recursion() { Py_LeaveRecursiveCall(); }
  Recursion(const Recursion&) = delete;
  Recursion& operator=(const Recursion&) = delete;
};

/// Calls `use` with the text encoded as UTF-8; lone surrogates are encoded as in pickles.
template <class Use>
void with_utf8(PyObject* text, Use use) {
  Py_ssize_t size = 0;
  if (const char* bytes = PyUnicode_AsUTF8AndSize(text, &size)) {
    use(std::string_view(bytes, static_cast<std::size_t>(size)));
    return;
  }
  PyErr_Clear();
  const PythonRef encoded = checked(PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass"));
  use(std::string_view(PyBytes_AS_STRING(encoded.get()),
                       static_cast<std::size_t>(PyBytes_GET_SIZE(encoded.get()))));
}

bool requires_grad(PyObject* tensor) {
  static PyObject* const kRequiresGrad = interned("requires_grad");
  return checked(PyObject_GetAttr(tensor, kRequiresGrad)).get() == Py_True;
}

/// True if the tensor has methods of its own that torch's planner calls.
bool plans_itself(PyObject* tensor) {
  PyObject** dict = _PyObject_GetDictPtr(tensor);
  if (dict == nullptr || *dict == nullptr || PyDict_GET_SIZE(*dict) == 0) return false;
  static const std::array<PyObject*, 3> kNames = {interned("__create_write_items__"),
                                                  interned("__create_chunk_list__"),
                                                  interned("global_shape")};
  for (PyObject* name : kNames) {
    if (PyDict_GetItemWithError(*dict, name) != nullptr) return true;
    if (PyErr_Occurred()) throw py::error_already_set();
  }
  return false;
}

}  // namespace

FlatState::FlatState(PyObject* state_dict, PyObject* local_chunks,
                     std::shared_ptr<SourceWatch> watch)
    : mapping_class_(imported("collections.abc", "Mapping")),
      dtensor_class_(imported("torch.distributed.tensor", "DTensor")),
      sharded_tensor_class_(
          imported("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")),
      local_chunks_(PythonRef::to(local_chunks)),
      watch_(std::move(watch)),
      placements_(checked(PyDict_New())) {
  nodes_.emplace_back();
  boxes_.emplace_back();  // the box of all rows that are not DTensors
  const auto count = PyObject_Size(state_dict);
  if (count < 0) throw py::error_already_set();
  rows_.reserve(static_cast<std::size_t>(count));
  nodes_.reserve(static_cast<std::size_t>(count) + 1);
  names_.reserve(static_cast<std::size_t>(count));
  visit_mapping(state_dict, kRoot);
  prefix_.clear();
  find_math_bits();
}

FlatState::Container FlatState::container_of(PyObject* value) {
  const auto [known, is_new] = containers_.try_emplace(Py_TYPE(value), Container::none);
  if (!is_new) return known->second;
  Container found = Container::none;
  if (Tensor::is_tensor(value)) {
    found = Container::tensor;
  } else if (PyDict_Check(value)) {
    found = Container::mapping;
  } else if (PyList_Check(value)) {
    found = Container::list;
  } else {
    const int is_mapping = PyObject_IsInstance(value, mapping_class_.get());
    if (is_mapping < 0) throw py::error_already_set();
    if (is_mapping != 0) found = Container::mapping;
  }
  // The entry stays valid: the state dict holds an instance, which keeps its class alive.
  return known->second = found;
}

bool FlatState::is_terminal(PyObject* list) {
  const Recursion recursion;
  bool found = true;
  for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(list); ++i) {
    PyObject* entry = PyList_GET_ITEM(list, i);
    switch (container_of(entry)) {
      case Container::tensor:
      case Container::mapping:
        found = false;
        break;
      case Container::list:
        found = is_terminal(entry);
        break;
      case Container::none:
        break;
    }
  }
  return found;
}

std::uint32_t FlatState::add_node(std::uint32_t parent, PythonRef key, std::size_t bytes) {
  nodes_.push_back({parent, std::move(key), static_cast<std::uint32_t>(bytes)});
  return static_cast<std::uint32_t>(nodes_.size() - 1);
}

void FlatState::visit_mapping(PyObject* mapping, std::uint32_t node) {
  if (PyDict_CheckExact(mapping)) {
    // The reference keeps the copy alive, and the copy its keys and values: str(key), for example,
    // can run code that changes the dict.
    const PythonRef copy = checked(PyDict_Copy(mapping));
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(copy.get(), &at, &key, &value) != 0;) {
      visit_item(key, value, node);
    }
    return;
  }
  const PythonRef items = checked(PyMapping_Items(mapping));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); ++i) {
    PyObject* item = PyList_GET_ITEM(items.get(), i);
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2) {
      PyErr_SetString(PyExc_TypeError,
                      "the items() of a mapping must be pairs of a key and a value");
      throw py::error_already_set();
    }
    visit_item(PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1), node);
  }
}

void FlatState::visit_item(PyObject* key, PyObject* value, std::uint32_t node) {
  const std::size_t before = prefix_.size();
  PythonRef text = checked(PyObject_Str(key));
  // The first key may be empty; like torch, write the dot nevertheless.
  if (node != kRoot) prefix_ += '.';
  const std::size_t begin = prefix_.size();
  with_utf8(text.get(), [&](std::string_view bytes) { prefix_ += bytes; });
  if (node == kRoot) key_ = keys_.add(prefix_).first;
  visit(value, add_node(node, std::move(text), prefix_.size() - begin));
  prefix_.resize(before);
}

void FlatState::visit(PyObject* value, std::uint32_t node) {
  const Container container = container_of(value);
  if (container == Container::mapping || (container == Container::list && !is_terminal(value))) {
    const Recursion recursion;
    if (container == Container::mapping) {
      visit_mapping(value, node);
    } else {
      const std::size_t before = prefix_.size();
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
        prefix_ += '.';
        prefix_ += std::to_string(i);
        const PythonRef entry = PythonRef::to(PyList_GET_ITEM(value, i));
        visit(entry.get(),
              add_node(node, checked(PyLong_FromSsize_t(i)), prefix_.size() - before - 1));
        prefix_.resize(before);
      }
    }
    return;
  }
  add_row(prefix_, value, node);
}

void FlatState::add_row(std::string_view name, PyObject* value, std::uint32_t node) {
  const auto [number, is_new] = names_.add(name);
  if (is_new) rows_.emplace_back();
  Row& row = rows_[number];
  if (!is_new && !row.is_removed) {
    const std::string text = "duplicated flatten key " + std::string(name);
    PyErr_SetString(PyExc_ValueError, text.c_str());
    throw py::error_already_set();
  }
  row.is_removed = false;
  row.node = node;
  row.key = key_;
  row.value = PythonRef::to(value);
  fill(row, name);
}

void FlatState::fill(Row& row, std::string_view name) {
  PyObject* value = row.value.get();
  row.kind = Kind::other;
  row.description = nullptr;
  row.local = Tensor();
  if (Tensor::is_exact(value)) {
    if (plans_itself(value)) return;
    row.local = used(value);
    try {
      row.size = extents_.intern(row.local.sizes());
    } catch (const std::runtime_error&) {  // a nested tensor has no sizes
      row.local = Tensor();
      return;
    }
    row.kind = Kind::plain;
    row.requires_grad = requires_grad(value);
    if (watch_) watch_->add(name, row.local);
    return;
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == dtensor_class_.get() &&
      fill_dtensor(row, name)) {
    row.kind = Kind::dtensor;
  } else if (is_object(value)) {
    row.kind = Kind::object;
  }
}

bool FlatState::fill_dtensor(Row& row, std::string_view name) {
  static PyObject* const kLocal = interned("_local_tensor");
  PyObject* value = row.value.get();
  const PythonRef local = checked(PyObject_GetAttr(value, kLocal));
  if (!Tensor::is_exact(local.get()) || plans_itself(local.get())) return false;
  row.requires_grad = requires_grad(value);
  row.size = extents_.intern(Tensor::sizes_of(value));
  row.box = box_of(value, row.size);
  if (row.box == 0) return false;
  row.local = used(local.get());
  const LocalBox& box = boxes_[row.box];
  if (box.is_present && !std::ranges::equal(row.local.sizes(), extents_.at(box.sizes))) {
    // If a part has no elements, torch's local tensor may be empty in other dimensions as well.
    const auto sizes = extents_.at(box.sizes);
    if (row.local.numel() != 0 || std::ranges::find(sizes, 0) == sizes.end()) return false;
    py::list shape;
    for (const std::int64_t size : sizes) shape.append(size);
    const auto empty = py::reinterpret_steal<py::object>(row.local.to_python());
    row.local = Tensor::of(empty.attr("detach")().attr("reshape")(shape).ptr());
    return true;  // nothing to watch
  }
  if (watch_) watch_->add(name, row.local, PythonRef::to(value), PythonRef::to(kLocal));
  return true;
}

Tensor FlatState::used(PyObject* tensor) {
  // Few enough that they are still in the processor's caches when they are asked.
  constexpr std::size_t kAskedTogether = 128;
  const Tensor found = Tensor::of(tensor);
  unasked_.push_back(found);
  if (unasked_.size() == kAskedTogether) find_math_bits();
  return watch_ ? found.snapshot() : found;
}

void FlatState::find_math_bits() {
  Tensor::find_math_bits(unasked_);
  unasked_.clear();
}

PythonRef FlatState::value(const Row& row) const {
  if (watch_ && row.kind == Kind::plain) return PythonRef(row.local.to_python());
  return PythonRef::to(row.value.get());
}

std::uint32_t FlatState::box_of(PyObject* value, std::uint32_t size) {
  static PyObject* const kSpec = interned("_spec");
  static PyObject* const kMesh = interned("mesh");
  static PyObject* const kPlacements = interned("placements");
  const PythonRef spec = checked(PyObject_GetAttr(value, kSpec));
  const PythonRef mesh = checked(PyObject_GetAttr(spec.get(), kMesh));
  const PythonRef placements = checked(PyObject_GetAttr(spec.get(), kPlacements));
  PyObject* number = PyDict_GetItemWithError(placements_.get(), placements.get());
  if (number == nullptr) {
    if (PyErr_Occurred()) throw py::error_already_set();
    const PythonRef next = checked(PyLong_FromSsize_t(PyDict_GET_SIZE(placements_.get())));
    if (PyDict_SetItem(placements_.get(), placements.get(), next.get()) != 0)
      throw py::error_already_set();
    number = PyDict_GetItemWithError(placements_.get(), placements.get());
  }
  const auto key = std::tuple(mesh.get(), static_cast<std::size_t>(PyLong_AsSize_t(number)), size);
  if (const auto found = box_numbers_.find(key); found != box_numbers_.end()) return found->second;
  const std::uint32_t layout = layout_of(mesh.get(), placements.get(), std::get<1>(key));
  if (layouts_[layout].has_partial) return 0;
  const PythonRef chunks =
      checked(PyObject_CallFunctionObjArgs(local_chunks_.get(), value, nullptr));
  std::uint32_t box_number = 0;
  if (PyList_Check(chunks.get()) && PyList_GET_SIZE(chunks.get()) <= 1) {
    LocalBox box;
    box.layout = layout;
    box.is_present = PyList_GET_SIZE(chunks.get()) == 1;
    bool is_box = true;
    if (box.is_present) {
      PyObject* chunk = PyList_GET_ITEM(chunks.get(), 0);
      const PythonRef offsets = checked(PyObject_GetAttrString(chunk, "offsets"));
      const PythonRef sizes = checked(PyObject_GetAttrString(chunk, "sizes"));
      std::vector<std::int64_t> numbers;
      is_box = numbers_of(offsets.get(), numbers);
      box.offsets = extents_.intern(numbers);
      is_box = is_box && numbers_of(sizes.get(), numbers);
      box.sizes = extents_.intern(numbers);
      is_box = is_box && extents_.at(box.offsets).size() == extents_.at(size).size() &&
               extents_.at(box.sizes).size() == extents_.at(size).size();
    }
    if (is_box) {
      box_number = static_cast<std::uint32_t>(boxes_.size());
      boxes_.push_back(box);
    }
  }
  box_numbers_.emplace(key, box_number);
  return box_number;
}

std::uint32_t FlatState::layout_of(PyObject* mesh, PyObject* placements, std::size_t number) {
  const auto [known, is_new] = layout_numbers_.try_emplace(
      std::pair(mesh, number), static_cast<std::uint32_t>(layouts_.size()));
  if (is_new) {
    bool has_partial = false;
    for (const py::handle placement : py::reinterpret_borrow<py::object>(placements)) {
      has_partial |= placement.attr("is_partial")().cast<bool>();
    }
    layouts_.push_back({PythonRef::to(mesh), PythonRef::to(placements), has_partial});
  }
  return known->second;
}

void FlatState::nodes_to(const Row& row, std::vector<const Node*>& nodes) const {
  nodes.clear();
  for (std::uint32_t node = row.node; node != kRoot; node = nodes_[node].parent) {
    nodes.push_back(&nodes_[node]);
  }
  std::ranges::reverse(nodes);
}

PythonRef FlatState::path(const Row& row) const {
  std::vector<const Node*> nodes;
  nodes_to(row, nodes);
  PythonRef path = checked(PyTuple_New(static_cast<Py_ssize_t>(nodes.size())));
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    PyObject* key = nodes[i]->key.get();
    Py_INCREF(key);
    PyTuple_SET_ITEM(path.get(), static_cast<Py_ssize_t>(i), key);
  }
  return path;
}

std::uint64_t FlatState::tensor_bytes() const {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t total = 0;
  for (const Row& row : rows_) {
    if (!row.has_tensor()) continue;
    std::uint64_t bytes = row.local.item_bytes();
    for (const std::int64_t size : extents_.at(row.size)) {
      bytes = checked_mul(bytes, static_cast<std::uint64_t>(size)).value_or(kMost);
    }
    total = checked_add(total, bytes).value_or(kMost);
  }
  return total;
}

bool FlatState::is_object(PyObject* value) const {
  if (Tensor::is_tensor(value)) return false;
  const int is_sharded = PyObject_IsInstance(value, sharded_tensor_class_.get());
  if (is_sharded < 0) throw py::error_already_set();
  return is_sharded == 0 && PyObject_HasAttrString(value, "__create_write_items__") == 0;
}

void FlatState::add_part(Description& description, std::span<const std::int64_t> offsets,
                         std::span<const std::int64_t> sizes) {
  description.parts.push_back({extents_.intern(offsets), extents_.intern(sizes), {}});
}

void FlatState::describe(std::size_t number, bool requires_grad, std::span<const std::int64_t> size,
                         Description description) {
  Row& row = rows_[number];
  row.requires_grad = requires_grad;
  row.size = extents_.intern(size);
  row.description = std::make_shared<Description>(std::move(description));
}

std::size_t FlatState::part_of_item(std::size_t item) const {
  if (rows_of_items_.empty()) return 0;
  const auto first = std::ranges::lower_bound(rows_of_items_, rows_of_items_.at(item));
  return item - static_cast<std::size_t>(first - rows_of_items_.begin());
}

planning::RankState FlatState::to_rank_state(std::span<const std::uint64_t> layouts) {
  using planning::StateTemplate;
  // The code below reads only members that do not change, so it does not need the GIL.
  const python::ReleasedGil released;
  auto of = std::make_shared<StateTemplate>();
  std::vector<StateTemplate::PathPart> path;
  std::vector<const Node*> nodes;
  std::map<std::int32_t, std::uint32_t> dtypes;  // by ScalarType::code()
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    StateTemplate::Row planned;
    const Description* const described = row.description.get();
    if (row.has_tensor() || described != nullptr) {
      const bool is_sharded = described ? described->is_sharded : row.kind == Kind::dtensor;
      planned.kind = is_sharded ? StateTemplate::Kind::shard : StateTemplate::Kind::tensor;
      planned.is_described = described != nullptr;
      planned.requires_grad = row.requires_grad;
      const ScalarType type = described ? described->dtype : row.local.dtype();
      const auto [dtype, is_new] = dtypes.try_emplace(type.code(), 0);
      if (is_new) dtype->second = of->add_dtype(type.name(), type.item_bytes());
      planned.dtype = dtype->second;
      planned.size = of->add_size(extents_.at(row.size));
    } else if (row.kind == Kind::object) {
      planned.kind = StateTemplate::Kind::object;
    }
    nodes_to(row, nodes);
    path.clear();
    for (const Node* node : nodes) {
      path.push_back({node->bytes, PyLong_Check(node->key.get()) != 0});
    }
    of->add(names_.at(i), path, planned);
  }
  rows_of_items_.clear();
  const auto has_several = [](const Row& row) {
    return row.description && row.description->parts.size() > 1;
  };
  for (std::uint32_t i = 0; std::ranges::any_of(rows_, has_several) && i < rows_.size(); ++i) {
    rows_of_items_.insert(rows_of_items_.end(),
                          has_several(rows_[i]) ? rows_[i].description->parts.size() : 1, i);
  }
  planning::RankState made(std::move(of), rows_of_items_);
  std::size_t item = 0;
  for (const Row& row : rows_) {
    if (row.kind == Kind::dtensor) {
      const LocalBox& local_box = box(row);
      if (local_box.is_present) {
        made.set_box(item, extents_.at(local_box.offsets), extents_.at(local_box.sizes),
                     layouts[local_box.layout]);
      }
    } else if (row.description && row.description->is_sharded) {
      for (std::size_t i = 0; i < row.description->parts.size(); ++i) {
        const Description::Part& part = row.description->parts[i];
        made.set_box(item + i, extents_.at(part.offsets), extents_.at(part.sizes),
                     row.description->layout);
      }
    }
    item += has_several(row) ? row.description->parts.size() : 1;
  }
  return made;
}

std::vector<std::uint32_t> FlatState::items_to_convert(std::span<const std::uint32_t> items) const {
  std::vector<std::uint32_t> found;
  for (const std::uint32_t item : items) {
    const Row& row = rows_.at(row_of_item(item));
    if (!row.has_tensor() || !is_plain(row.local) ||
        (row.local.is_cuda() && !is_dense(row.local))) {
      found.push_back(item);
    }
  }
  return found;
}

std::vector<std::uint32_t> FlatState::fingerprints(bool whole) const {
  std::vector<std::uint32_t> found;
  for (const Row& row : rows_) {
    if (row.kind == Kind::plain) {
      found.push_back(fingerprint_of(row.local, whole));
    } else if (row.description && !row.description->is_sharded) {
      found.push_back(0);
    }
  }
  return found;
}

std::vector<std::uint32_t> FlatState::checksums(std::span<const std::uint32_t> items) const {
  std::vector<std::uint32_t> found;
  for (const std::uint32_t item : items) {
    const Row& row = rows_.at(row_of_item(item));
    found.push_back(row.has_tensor() ? fingerprint_of(row.local, true) : 0);
  }
  return found;
}

void FlatState::add(std::string_view name, PyObject* path, PyObject* value) {
  if (!PyTuple_Check(path) || PyTuple_GET_SIZE(path) == 0) {
    PyErr_SetString(PyExc_TypeError, "a path must be a nonempty tuple of keys and indices");
    throw py::error_already_set();
  }
  std::uint32_t node = kRoot;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(path); ++i) {
    const PythonRef text = checked(PyObject_Str(PyTuple_GET_ITEM(path, i)));
    std::size_t bytes = 0;
    with_utf8(text.get(), [&](std::string_view part) { bytes = part.size(); });
    node = add_node(node, PythonRef::to(PyTuple_GET_ITEM(path, i)), bytes);
  }
  const PythonRef key = checked(PyObject_Str(PyTuple_GET_ITEM(path, 0)));
  with_utf8(key.get(), [&](std::string_view bytes) { key_ = keys_.add(bytes).first; });
  add_row(name, value, node);
}

void FlatState::remove(std::size_t number) {
  Row& row = rows_[number];
  row.value = PythonRef();
  row.local = Tensor();
  row.kind = Kind::other;
  row.description = nullptr;
  row.is_removed = true;
}

void FlatState::replace(std::size_t number, PyObject* value) {
  rows_[number].value = PythonRef::to(value);
  fill(rows_[number], names_.at(number));
  find_math_bits();
}

void FlatState::set_item(std::size_t item, PyObject* value) {
  const std::uint32_t row = row_of_item(item);
  if (rows_.at(row).description) {
    set_part(row, part_of_item(item), value);
  } else {
    replace(row, value);
  }
}

void FlatState::set_part(std::size_t number, std::size_t part, PyObject* value) {
  rows_.at(number).description->parts.at(part).value = PythonRef::to(value);
}

}  // namespace torch_ckpt::tensors
