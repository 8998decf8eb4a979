#include "torch/scalar_type.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace py = pybind11;

namespace torch_ckpt::tensors {

std::vector<ScalarType::Entry> ScalarType::entries_;
std::vector<const ScalarType::Entry*> ScalarType::by_code_;

void ScalarType::load(std::int32_t (*code_of)(PyObject* tensor)) {
  const py::module_ torch = py::module_::import("torch");
  const py::object empty =
      torch.attr("empty")(0, py::arg("dtype") = torch.attr("uint8"), py::arg("device") = "cpu");
  const py::object dtype_class = torch.attr("dtype");
  for (const auto& [name, value] : torch.attr("__dict__").cast<py::dict>()) {
    // Some dtypes have several names, of which str() returns the first.
    if (!py::type::handle_of(value).is(dtype_class) || of(value.ptr())) continue;
    // A view, because torch warns of new tensors of some dtypes.
    const py::object tensor = empty.attr("view")(value);
    Entry entry;
    entry.name = py::str(value).cast<std::string>().substr(std::string_view("torch.").size());
    entry.item_bytes = value.attr("itemsize").cast<std::size_t>();
    entry.code = code_of(tensor.ptr());
    entry.is_complex = value.attr("is_complex").cast<bool>();
    entry.object = value.inc_ref().ptr();
    entry.known = format::find_dtype(entry.name);
    entries_.push_back(std::move(entry));
  }
  for (const Entry& entry : entries_) {
    const auto number = static_cast<std::size_t>(entry.code);
    by_code_.resize(std::max(by_code_.size(), number + 1));
    by_code_[number] = &entry;
  }
}

template <class IsWanted>
std::optional<ScalarType> ScalarType::find(IsWanted is_wanted) {
  const auto found = std::ranges::find_if(entries_, is_wanted);
  if (found == entries_.end()) return std::nullopt;
  return ScalarType(*found);
}

std::optional<ScalarType> ScalarType::of(PyObject* object) {
  return find([=](const Entry& entry) { return entry.object == object; });
}

std::optional<ScalarType> ScalarType::named(std::string_view name) {
  return find([=](const Entry& entry) { return entry.name == name; });
}

ScalarType ScalarType::of_code(std::int32_t code) {
  const auto number = static_cast<std::size_t>(code);
  if (number >= by_code_.size() || by_code_[number] == nullptr) {
    throw std::runtime_error("torch has a tensor of an unknown dtype, number " +
                             std::to_string(code));
  }
  return ScalarType(*by_code_[number]);
}

}  // namespace torch_ckpt::tensors
