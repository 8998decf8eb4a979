#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch/python_ref.h"

namespace torch_ckpt::tensors {

// Tensors whose contents are read later. Detects writes to them in the meantime.
//
// It compares torch's version counters, which operations on the tensors increment. It does not see
// writes through `.data` or NumPy, nor the writes of all fused optimizers (except to their `step`
// tensors).
//
// All methods need the GIL.
class SourceWatch {
 public:
  /// Adds a tensor under a fully qualified name. Several tensors may have one name.
  ///
  /// `holder` is the object that has the tensor as its attribute `attribute` and may replace it by
  /// another tensor; null if the tensor cannot be replaced.
  void add(std::string_view name, at::Tensor tensor, PythonRef holder = {},
           PythonRef attribute = {});

  /// The names of the tensors that were written to, or replaced, since they were added.
  std::vector<std::string> changed() const;
  /// The CUDA devices of the tensors.
  const std::vector<at::Device>& devices() const { return devices_; }
  /// Releases the tensors and their holders.
  void release() { sources_.clear(); }

 private:
  struct Source {
    std::string name;
    at::Tensor tensor;
    std::int64_t version = 0;
    PythonRef holder;
    PythonRef attribute;
  };

  static bool is_replaced(const Source& source);

  std::vector<Source> sources_;
  std::vector<at::Device> devices_;
};

}  // namespace torch_ckpt::tensors
