#include "torch/tensor.h"

#include <pybind11/pybind11.h>

#include <functional>
#include <numeric>
#include <utility>

#include "planning/strides.h"
#include "python/released_gil.h"
#include "python/types.h"
#include "torch/math_bits.h"

namespace py = pybind11;

namespace torch_ckpt::tensors {
namespace {

using libtorch::OwnedTensor;
using libtorch::TensorHandle;

// Classes and functions of torch. They live until the process ends.
PyTypeObject* tensor_class = nullptr;
PyTypeObject* parameter_class = nullptr;
PyObject* tensor_dispatch = nullptr;  // Tensor.__torch_dispatch__
PyObject* handle_from_tensor = nullptr;
PyObject* tensor_from_handle = nullptr;

PyObject* kept(const py::object& object) { return py::object(object).release().ptr(); }

template <class Value>
Value get(const libtorch::Getter<Value>& getter, TensorHandle handle) {
  Value value{};
  libtorch::check(getter(handle, &value));
  return value;
}

OwnedTensor tensor_of(PyObject* object) {
  TensorHandle found = nullptr;
  if (libtorch::tensor_from_pyobject) {
    libtorch::check(libtorch::tensor_from_pyobject(object, &found));
    return OwnedTensor(found);
  }
  const auto capsule =
      py::reinterpret_steal<py::object>(PyObject_CallOneArg(handle_from_tensor, object));
  if (!capsule) throw py::error_already_set();
  found = static_cast<TensorHandle>(
      PyCapsule_GetPointer(capsule.ptr(), PyCapsule_GetName(capsule.ptr())));
  if (found == nullptr) throw py::error_already_set();
  return OwnedTensor(found);
}

/// Returns another tensor on the same storage, without autograd. Math bits are kept. `offset` is in
/// elements, relative to the given tensor.
OwnedTensor view_of(TensorHandle tensor, Tensor::ExtentsView sizes, Tensor::ExtentsView strides,
                    std::int64_t offset) {
  TensorHandle found = nullptr;
  libtorch::check(libtorch::reinterpret(tensor, static_cast<std::int64_t>(sizes.size()),
                                        sizes.data(), strides.data(), offset, &found));
  return OwnedTensor(found);
}

/// Calls a method without arguments that returns a bool.
bool ask(PyObject* object, PyObject* method) {
  const auto answer = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object, method));
  if (!answer) throw py::error_already_set();
  return answer.ptr() == Py_True;
}

ScalarType dtype_of(TensorHandle tensor) {
  return ScalarType::of_code(get(libtorch::get_dtype, tensor));
}

bool has_dispatch(PyTypeObject* type) {
  static PyObject* const kDispatch = PyUnicode_InternFromString("__torch_dispatch__");
  const auto found = py::reinterpret_steal<py::object>(
      PyObject_GetAttr(reinterpret_cast<PyObject*>(type), kDispatch));
  if (!found) throw py::error_already_set();
  return found.ptr() != tensor_dispatch;
}

}  // namespace

Tensor::Held::Held(OwnedTensor owned, ScalarType type) : tensor(std::move(owned)), dtype(type) {
  const TensorHandle handle = tensor.get();
  const std::int32_t where = get(libtorch::get_device_type, handle);
  if (where == libtorch::cpu()) {
    device = Device::cpu;
  } else if (where == libtorch::cuda()) {
    device = Device::cuda;
  } else if (where == libtorch::meta()) {
    device = Device::meta;
  }
  std::int64_t* first_size = nullptr;
  sizes_status = libtorch::get_sizes(handle, &first_size);
  if (sizes_status != 0) return;
  const auto dims = static_cast<std::size_t>(get(libtorch::get_dim, handle));
  sizes = {first_size, dims};
  is_strided = get(libtorch::get_layout, handle) == libtorch::strided();
  if (is_strided) strides = {get(libtorch::get_strides, handle), dims};
}

Tensor::Held::~Held() {
  if (object == nullptr) return;
  if (PyGILState_Check() != 0) {
    Py_DECREF(object);
  } else {
    const python::EnsuredGil gil;
    Py_DECREF(object);
  }
}

void Tensor::load() {
  load_math_bits();
  const py::module_ torch = py::module_::import("torch");
  const py::object tensor = torch.attr("Tensor");
  tensor_class = reinterpret_cast<PyTypeObject*>(kept(tensor));
  parameter_class = reinterpret_cast<PyTypeObject*>(kept(torch.attr("nn").attr("Parameter")));
  tensor_dispatch = kept(tensor.attr("__torch_dispatch__"));
  if (libtorch::tensor_from_pyobject) return;
  const py::object aoti = torch.attr("_C").attr("_aoti");
  handle_from_tensor = kept(aoti.attr("unsafe_alloc_void_ptr_from_tensor"));
  tensor_from_handle = kept(aoti.attr("alloc_tensor_by_stealing_from_void_ptr"));
}

bool Tensor::is_tensor(PyObject* object) { return PyObject_TypeCheck(object, tensor_class) != 0; }

bool Tensor::is_exact(PyObject* object) {
  return Py_TYPE(object) == tensor_class || Py_TYPE(object) == parameter_class;
}

Tensor Tensor::of(PyObject* object) {
  OwnedTensor tensor = tensor_of(object);
  const ScalarType dtype = dtype_of(tensor.get());
  auto held = std::make_shared<Held>(std::move(tensor), dtype);
  Py_INCREF(object);
  held->object = object;
  held->math_bits = kUnknown;
  held->is_strided = held->is_strided && (is_exact(object) || !has_dispatch(Py_TYPE(object)));
  return Tensor(held);
}

std::int32_t Tensor::dtype_code_of(PyObject* object) {
  return get(libtorch::get_dtype, tensor_of(object).get());
}

std::vector<std::int64_t> Tensor::sizes_of(PyObject* object) {
  const OwnedTensor tensor = tensor_of(object);
  const std::int64_t* const first = get(libtorch::get_sizes, tensor.get());
  return {first, first + get(libtorch::get_dim, tensor.get())};
}

Tensor Tensor::adopt(OwnedTensor tensor) {
  const ScalarType dtype = dtype_of(tensor.get());
  return Tensor(std::make_shared<const Held>(std::move(tensor), dtype));
}

Tensor Tensor::adopt_view(OwnedTensor view, std::uint8_t math_bits) const {
  const auto held = std::make_shared<Held>(std::move(view), dtype());
  held->base = held_->base != nullptr ? held_->base : held_;
  held->is_snapshot = held_->is_snapshot;
  held->math_bits = math_bits;
  return Tensor(held);
}

Tensor Tensor::on_memory(const std::byte* memory, ExtentsView sizes, ExtentsView strides,
                         ScalarType dtype, std::shared_ptr<const void> owner) {
  using Owner = std::shared_ptr<const void>;
  const auto release = [](void*, void* context) { delete static_cast<Owner*>(context); };
  auto context = std::make_unique<Owner>(std::move(owner));
  TensorHandle handle = nullptr;
  libtorch::check(libtorch::from_blob(const_cast<std::byte*>(memory),
                                      static_cast<std::int64_t>(sizes.size()), sizes.data(),
                                      strides.data(), 0, dtype.code(), libtorch::cpu(), -1, &handle,
                                      libtorch::strided(), nullptr, 0, release, context.get()));
  context.release();
  return adopt(OwnedTensor(handle));
}

Tensor Tensor::empty_on_device_of(const Tensor& other, ExtentsView sizes) {
  const auto strides = planning::row_major_strides(sizes);
  TensorHandle handle = nullptr;
  libtorch::check(libtorch::empty_strided(
      static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(), other.dtype().code(),
      get(libtorch::get_device_type, other.handle()), other.device_index(), &handle));
  return adopt(OwnedTensor(handle));
}

std::int64_t Tensor::numel() const {
  const ExtentsView all = sizes();
  return std::accumulate(all.begin(), all.end(), std::int64_t{1}, std::multiplies());
}

std::int64_t Tensor::storage_offset() const { return get(libtorch::get_storage_offset, handle()); }
int Tensor::device_index() const { return get(libtorch::get_device_index, handle()); }
bool Tensor::is_contiguous() const { return planning::is_contiguous(sizes(), strides()); }

std::uint64_t Tensor::storage_bytes() const {
  return static_cast<std::uint64_t>(get(libtorch::get_storage_size, handle()));
}

const std::byte* Tensor::data() const {
  return static_cast<const std::byte*>(get(libtorch::get_const_data_ptr, handle()));
}

std::byte* Tensor::mutable_data() const {
  return static_cast<std::byte*>(get(libtorch::get_mutable_data_ptr, handle()));
}

bool Tensor::shares_storage(const Tensor& other) const {
  const void* here = nullptr;
  const void* there = nullptr;
  // Without memory, as on the meta device, there is no address.
  if (libtorch::get_const_data_ptr(handle(), &here) != 0 ||
      libtorch::get_const_data_ptr(other.handle(), &there) != 0) {
    return storage_bytes() == other.storage_bytes();
  }
  return static_cast<const std::byte*>(here) - storage_offset_bytes() ==
         static_cast<const std::byte*>(there) - other.storage_offset_bytes();
}

Tensor Tensor::narrow(std::size_t dim, std::int64_t begin, std::int64_t length) const {
  if (is_strided()) {
    std::vector<std::int64_t> sizes(this->sizes().begin(), this->sizes().end());
    sizes[dim] = length;
    return adopt_view(view_of(handle(), sizes, strides(), begin * strides()[dim]), math_bits());
  }
  const python::EnsuredGil gil;
  const NoGrad no_grad;
  const auto object = py::reinterpret_steal<py::object>(to_python());
  return of(object.attr("narrow")(dim, begin, length).ptr());
}

Tensor Tensor::clone() const {
  TensorHandle found = nullptr;
  libtorch::check(libtorch::clone(handle(), &found));
  return Tensor(std::make_shared<const Held>(OwnedTensor(found), dtype()));
}

Tensor Tensor::lazily(bool conj, bool neg) const {
  Tensor result = *this;
  const auto apply = [&](const char* name, std::uint8_t bit) {
    const auto argument = get(libtorch::new_handle, result.handle());
    auto stack = reinterpret_cast<std::uint64_t>(argument);
    libtorch::check(libtorch::call_dispatcher(name, "", &stack, libtorch::kVersion2_11));
    const auto bits = static_cast<std::uint8_t>(result.math_bits() ^ bit);
    result = result.adopt_view(OwnedTensor(reinterpret_cast<TensorHandle>(stack)), bits);
  };
  if (conj) apply("aten::_conj", kConj);
  if (neg) apply("aten::_neg_view", kNeg);
  return result;
}

void Tensor::find_math_bits(std::span<const Tensor> tensors) {
  std::vector<TensorHandle> handles;
  std::vector<const Held*> asked;
  for (const Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.is_strided() || tensor.held_->math_bits != kUnknown) continue;
    handles.push_back(tensor.handle());
    asked.push_back(tensor.held_.get());
  }
  if (handles.empty() || have_math_bits(handles)) return;
  for (const Held* held : asked) held->math_bits = 0;
}

std::uint8_t Tensor::math_bits() const {
  if (held_->math_bits == kUnknown) find_math_bits({this, 1});
  if (held_->math_bits == kUnknown) {
    const python::EnsuredGil gil;
    static PyObject* const kIsConj = PyUnicode_InternFromString("is_conj");
    static PyObject* const kIsNeg = PyUnicode_InternFromString("is_neg");
    const int conj = ask(object(), kIsConj) ? kConj : 0;
    const int neg = ask(object(), kIsNeg) ? kNeg : 0;
    held_->math_bits = static_cast<std::uint8_t>(conj | neg);
  }
  return held_->math_bits;
}

Tensor Tensor::snapshot() const {
  if (!is_strided() || held_->is_snapshot) return *this;
  const auto held = std::make_shared<Held>(view_of(handle(), sizes(), strides(), 0), dtype());
  held->base = held_->base != nullptr ? held_->base : held_;
  held->is_snapshot = true;
  held->math_bits = held_->math_bits.load();
  return Tensor(held);
}

PythonRef Tensor::shared_storage() const {
  static PyObject* const kStorage = PyUnicode_InternFromString("untyped_storage");
  if (object() == nullptr || held_->is_snapshot) return {};
  PythonRef storage(PyObject_CallMethodNoArgs(object(), kStorage));
  if (!storage) throw py::error_already_set();
  return storage;
}

void Tensor::copy_from(const Tensor& other) const {
  const NoGrad no_grad;
  libtorch::check(libtorch::copy(handle(), other.handle(), 0));
}

PyObject* Tensor::object() const {
  return held_->base != nullptr ? held_->base->object : held_->object;
}

PyObject* Tensor::to_python() const {
  if (held_->object != nullptr) return py::handle(held_->object).inc_ref().ptr();
  if (object() != nullptr && !held_->is_snapshot) {
    // A view of the base, so that writes to the result count as writes to the base.
    const NoGrad no_grad;
    return py::handle(object())
        .attr("as_strided")(python::tuple_of(sizes()), python::tuple_of(strides()),
                            storage_offset())
        .release()
        .ptr();
  }
  if (libtorch::tensor_to_pyobject) {
    void* made = nullptr;
    libtorch::check(libtorch::tensor_to_pyobject(handle(), nullptr, &made));
    return static_cast<PyObject*>(made);
  }
  // Despite its name, the function does not delete the handle that it gets.
  const py::capsule pointer(static_cast<const void*>(handle()));
  return py::handle(tensor_from_handle)(pointer).release().ptr();
}

InferenceMode::InferenceMode() {
  const python::EnsuredGil gil;
  py::object mode = py::module_::import("torch").attr("inference_mode")();
  mode.attr("__enter__")();
  mode_ = mode.release().ptr();
}

InferenceMode::~InferenceMode() {
  const python::EnsuredGil gil;
  const auto mode = py::reinterpret_steal<py::object>(mode_);
  try {
    mode.attr("__exit__")(py::none(), py::none(), py::none());
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("leaving inference mode");
  }
}

}  // namespace torch_ckpt::tensors
