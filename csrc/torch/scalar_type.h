#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/dtype.h"

namespace torch_ckpt::tensors {

/// A dtype of the running torch. Copies like a pointer.
class ScalarType {
 public:
  /// Reads torch's dtypes. Call it once, with the GIL, before the other functions.
  ///
  /// code_of: returns LibTorch's number of the dtype of a torch.Tensor.
  static void load(std::int32_t (*code_of)(PyObject* tensor));

  /// Returns nothing if the object is not a torch.dtype.
  static std::optional<ScalarType> of(PyObject* object);
  /// Returns nothing if this version of torch lacks the dtype. name: without "torch.".
  static std::optional<ScalarType> named(std::string_view name);
  /// code: LibTorch's number of the dtype.
  static ScalarType of_code(std::int32_t code);

  /// Returns torch's name, without "torch.".
  const std::string& name() const { return entry_->name; }
  std::size_t item_bytes() const { return entry_->item_bytes; }
  std::int32_t code() const { return entry_->code; }
  /// Returns the torch.dtype, which lives until the process ends.
  PyObject* object() const { return entry_->object; }
  bool is_complex() const { return entry_->is_complex; }
  /// Returns nullptr if the engine does not support the dtype.
  const format::Dtype* known() const { return entry_->known; }

  friend bool operator==(ScalarType, ScalarType) = default;

 private:
  struct Entry {
    std::string name;
    std::size_t item_bytes = 0;
    std::int32_t code = 0;
    bool is_complex = false;
    PyObject* object = nullptr;
    const format::Dtype* known = nullptr;
  };

  explicit ScalarType(const Entry& entry) : entry_(&entry) {}
  template <class IsWanted>
  static std::optional<ScalarType> find(IsWanted is_wanted);

  // They do not change after load().
  static std::vector<Entry> entries_;
  static std::vector<const Entry*> by_code_;  // nullptr for a code without a dtype

  const Entry* entry_;
};

}  // namespace torch_ckpt::tensors
