#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch/python_ref.h"
#include "torch/tensor.h"

namespace torch_ckpt::tensors {

// Detects writes to tensors whose contents are read later.
//
// Compares torch's version counters, which operations on tensors increment. Does not detect writes
// through `.data` or NumPy, or writes by fused optimizers (except to their `step` tensors).
//
// All methods need the GIL.
class SourceWatch {
 public:
  /// Adds a tensor under a fully qualified name, which several tensors may share.
  ///
  /// holder: the object with the tensor as its attribute `attribute`, if another tensor may be
  /// assigned to that attribute; otherwise nullptr.
  void add(std::string_view name, Tensor tensor, PythonRef holder = {}, PythonRef attribute = {});

  /// Returns the names of the tensors that were written to or replaced since they were added.
  std::vector<std::string> changed() const;
  /// The numbers of the CUDA devices that hold tensors.
  const std::vector<int>& devices() const { return devices_; }
  /// Releases the tensors and their holders.
  void release();

 private:
  struct Source {
    std::string name;
    Tensor tensor;
    std::int64_t version = 0;
    PythonRef holder;
    PythonRef attribute;
  };

  static bool is_replaced(const Source& source);

  std::vector<Source> sources_;
  std::vector<int> devices_;
};

}  // namespace torch_ckpt::tensors
