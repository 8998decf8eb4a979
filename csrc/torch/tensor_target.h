#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "format/dtype.h"
#include "format/tensor_pickle.h"
#include "torch/extents.h"

namespace torch_ckpt::tensors {

/// A region of a stored tensor, and the tensor to read it into.
struct TensorTarget {
  std::string name;
  std::size_t file = 0;
  std::uint64_t offset = 0;  // of the record in the file
  std::uint64_t length = 0;
  at::ScalarType scalar_type = at::kByte;
  const format::Dtype* dtype = nullptr;  // nullptr if the engine does not know it
  Extents sizes;
  Extents region_offsets;
  Extents region_lengths;
  at::Tensor tensor;

  std::uint64_t region_bytes(std::uint64_t item_bytes) const;
};

/// Creates a target. If the stored tensor has dimensions, empty `region_lengths` select all of it.
/// Throws Failure for impossible sizes, for a region outside of them, and for a `tensor` of another
/// size.
TensorTarget make_target(std::string name, std::size_t file, std::uint64_t offset,
                         std::uint64_t length, at::ScalarType scalar_type, at::IntArrayRef sizes,
                         at::IntArrayRef region_offsets, at::IntArrayRef region_lengths,
                         at::Tensor tensor);

/// An uninitialised tensor of `bytes` whose memory returns to the system when it is freed. Memory
/// of malloc may stay in the heap between other blocks, which would exceed the memory limit.
at::Tensor mapped_tensor(const Extents& sizes, at::ScalarType dtype, std::uint64_t bytes);

/// The target's region of the tensor with the storage `bytes` and the layout of `header`.
at::Tensor region_in_storage(const TensorTarget& target, const at::Tensor& bytes,
                             const format::TensorHeader& header);

}  // namespace torch_ckpt::tensors
