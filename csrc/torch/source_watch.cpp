#include "torch/source_watch.h"

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_set>
#include <utility>

#include "torch/tensor_checks.h"

namespace torch_ckpt::tensors {
namespace {

/// Returns -1 for inference tensors, which have no version.
std::int64_t version_of(const at::Tensor& tensor) {
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? static_cast<std::int64_t>(version.current_version()) : -1;
}

}  // namespace

void SourceWatch::add(std::string_view name, at::Tensor tensor, PythonRef holder,
                      PythonRef attribute) {
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
  if (!held) throw python_error();
  if (!THPVariable_Check(held.get())) return true;
  const at::Tensor& tensor = THPVariable_Unpack(held.get());
  return !tensor.sizes().equals(source.tensor.sizes()) ||
         !tensor.storage().is_alias_of(source.tensor.storage());
}

}  // namespace torch_ckpt::tensors
