#include "torch/source_watch.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "torch/tensor_checks.h"

namespace py = pybind11;

namespace torch_ckpt::tensors {
namespace {

/// Returns -1 for inference tensors, which have no version.
std::int64_t version_of(const Tensor& tensor) {
  static PyObject* const kVersion = PyUnicode_InternFromString("_version");
  const PythonRef version(PyObject_GetAttr(tensor.object(), kVersion));
  if (version) return PyLong_AsLongLong(version.get());
  if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw py::error_already_set();
  PyErr_Clear();
  return -1;
}

}  // namespace

void SourceWatch::add(std::string_view name, Tensor tensor, PythonRef holder, PythonRef attribute) {
  add_cuda_device(devices_, tensor);
  const std::int64_t version = version_of(tensor);
  sources_.push_back(
      {std::string(name), std::move(tensor), version, std::move(holder), std::move(attribute)});
}

std::vector<std::string> SourceWatch::changed() const {
  std::vector<std::string> names;
  std::unordered_set<std::string_view> known;
  for (const Source& source : sources_) {
    if (version_of(source.tensor) == source.version && !is_replaced(source)) continue;
    if (known.insert(source.name).second) names.push_back(source.name);
  }
  return names;
}

void SourceWatch::release() {
  // Destroying a holder can run Python code, which can call this object: it must be empty by then.
  const std::vector<Source> released = std::exchange(sources_, {});
}

bool SourceWatch::is_replaced(const Source& source) {
  if (!source.holder) return false;
  const PythonRef held(PyObject_GetAttr(source.holder.get(), source.attribute.get()));
  if (!held) throw py::error_already_set();
  if (!Tensor::is_tensor(held.get())) return true;
  const Tensor tensor = Tensor::of(held.get());
  return !std::ranges::equal(tensor.sizes(), source.tensor.sizes()) ||
         !tensor.shares_storage(source.tensor);
}

}  // namespace torch_ckpt::tensors
