#pragma once

#include <Python.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "torch/libtorch.h"
#include "torch/python_ref.h"
#include "torch/scalar_type.h"

namespace torch_ckpt::tensors {

/// A tensor of torch. Copies refer to the same tensor, whose sizes, strides and dtype must not
/// change meanwhile. Functions throw std::runtime_error if torch reports an error, and need no GIL
/// unless they say so.
class Tensor {
 public:
  using ExtentsView = std::span<const std::int64_t>;

  /// Prepares this class. Call it once, with the GIL, after libtorch::load().
  static void load();

  /// Returns true for a torch.Tensor, instances of subclasses included. Needs the GIL.
  static bool is_tensor(PyObject* object);
  /// Returns true for a torch.Tensor or torch.nn.Parameter, but not for instances of other
  /// subclasses. Needs the GIL.
  static bool is_exact(PyObject* object);

  Tensor() = default;
  /// The tensor of a Python object, for which is_tensor() is true. Needs the GIL.
  static Tensor of(PyObject* object);
  /// Returns LibTorch's number of the dtype of a Python object's tensor. Needs the GIL.
  static std::int32_t dtype_code_of(PyObject* object);
  /// Returns the sizes of a Python object's tensor, without the cost of a Tensor. Needs the GIL.
  static std::vector<std::int64_t> sizes_of(PyObject* object);
  /// A tensor of elements in the caller's memory. `owner` keeps the memory alive.
  static Tensor on_memory(const std::byte* memory, ExtentsView sizes, ExtentsView strides,
                          ScalarType dtype, std::shared_ptr<const void> owner);
  /// An uninitialized tensor in row-major order, on the same device as `other`.
  static Tensor empty_on_device_of(const Tensor& other, ExtentsView sizes);

  /// Prepares is_conj() and is_neg() of many tensors, for which asking each one takes much longer.
  static void find_math_bits(std::span<const Tensor> tensors);

  bool defined() const { return held_ != nullptr; }
  /// Throws for a nested tensor of the strided layout.
  ExtentsView sizes() const {
    libtorch::check(held_->sizes_status);
    return held_->sizes;
  }
  /// Returns nothing for layouts without strides.
  ExtentsView strides() const { return held_->strides; }
  std::size_t dims() const { return sizes().size(); }
  std::int64_t numel() const;
  std::uint64_t nbytes() const { return static_cast<std::uint64_t>(numel()) * item_bytes(); }
  std::int64_t storage_offset() const;
  ScalarType dtype() const { return held_->dtype; }
  std::size_t item_bytes() const { return dtype().item_bytes(); }
  bool is_cpu() const { return held_->device == Device::cpu; }
  bool is_cuda() const { return held_->device == Device::cuda; }
  bool is_meta() const { return held_->device == Device::meta; }
  int device_index() const;
  /// True if the elements lie in memory by their strides, and no code of a subclass runs when they
  /// are used.
  bool is_strided() const { return held_->is_strided; }
  /// True if the elements must be conjugated or negated when they are read.
  bool is_conj() const { return has_bit(kConj); }
  bool is_neg() const { return has_bit(kNeg); }
  bool is_contiguous() const;

  std::uint64_t storage_bytes() const;
  /// Returns the address of the storage. The tensor must have elements and memory.
  const std::byte* storage_data() const { return data() - storage_offset_bytes(); }
  /// Returns the address of the first element; nullptr if there are no elements.
  const std::byte* data() const;
  std::byte* mutable_data() const;

  bool shares_storage(const Tensor& other) const;

  /// Returns the tensor with its present storage. If it is strided, a later `tensor.data = ...`,
  /// which gives the Python object another storage, does not affect the result.
  Tensor snapshot() const;
  /// Returns the storage, which the tensor loses if another one is assigned to its Python object;
  /// nullptr if that cannot happen. Needs the GIL.
  PythonRef shared_storage() const;
  /// Returns a part of the tensor, without autograd.
  Tensor narrow(std::size_t dim, std::int64_t begin, std::int64_t length) const;
  Tensor clone() const;
  /// Returns the conjugate or the negative, without calculating it.
  Tensor lazily(bool conj, bool neg) const;
  /// Copies the elements, with conversion. Does not record the copy for autograd.
  void copy_from(const Tensor& other) const;

  /// Returns the Python object of this tensor, or of the tensor that this is a part of; nullptr if
  /// there is none.
  PyObject* object() const;
  /// Returns a new reference to a Python object of this tensor. Needs the GIL.
  PyObject* to_python() const;

 private:
  enum class Device : std::uint8_t { cpu, cuda, meta, other };
  // Bits of Held::math_bits.
  static constexpr std::uint8_t kConj = 1;
  static constexpr std::uint8_t kNeg = 2;
  static constexpr std::uint8_t kUnknown = 4;

  struct Held {
    Held(libtorch::OwnedTensor tensor, ScalarType dtype);
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held();

    const libtorch::OwnedTensor tensor;
    PyObject* object = nullptr;
    std::shared_ptr<const Held> base;  // the tensor that this is a snapshot or a part of
    bool is_snapshot = false;          // may have another storage than the object has by now
    const ScalarType dtype;
    Device device = Device::other;
    bool is_strided = false;
    mutable std::atomic<std::uint8_t> math_bits = 0;
    int sizes_status = 0;
    ExtentsView sizes;
    ExtentsView strides;
  };
  explicit Tensor(std::shared_ptr<const Held> held) : held_(std::move(held)) {}
  static Tensor adopt(libtorch::OwnedTensor tensor);
  Tensor adopt_view(libtorch::OwnedTensor tensor, std::uint8_t math_bits) const;

  libtorch::TensorHandle handle() const { return held_->tensor.get(); }
  std::uint8_t math_bits() const;
  bool has_bit(std::uint8_t bit) const { return (math_bits() & bit) != 0; }
  std::int64_t storage_offset_bytes() const {
    return storage_offset() * static_cast<std::int64_t>(item_bytes());
  }

  std::shared_ptr<const Held> held_;
};

/// Puts the calling thread into inference mode, in which all tensors may be changed and autograd is
/// off. Tensors made in inference mode may be changed only there.
class InferenceMode {
 public:
  InferenceMode();
  ~InferenceMode();
  InferenceMode(const InferenceMode&) = delete;
  InferenceMode& operator=(const InferenceMode&) = delete;

 private:
  PyObject* mode_ = nullptr;
};

/// Turns off autograd for the calling thread.
class NoGrad {
 public:
  NoGrad() : was_enabled_(libtorch::grad_mode_is_enabled()) {
    libtorch::grad_mode_set_enabled(false);
  }
  ~NoGrad() { libtorch::grad_mode_set_enabled(was_enabled_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  const bool was_enabled_;
};

}  // namespace torch_ckpt::tensors
