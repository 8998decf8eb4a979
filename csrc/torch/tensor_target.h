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
  std::uint64_t offset = 0;  // offset of the record in the file
  std::uint64_t length = 0;
  at::ScalarType scalar_type = at::kByte;
  const format::Dtype* dtype = nullptr;  // nullptr if the engine does not support it
  Extents sizes;
  Extents region_offsets;
  Extents region_lengths;
  at::Tensor tensor;

  std::uint64_t region_bytes(std::uint64_t item_bytes) const;
};

/// Creates a target. If the stored tensor has dimensions, empty `region_lengths` select all of it.
/// Throws Failure if sizes are invalid, if the region does not lie within the stored tensor, or if
/// `tensor` does not have the size of the region.
TensorTarget make_target(std::string name, std::size_t file, std::uint64_t offset,
                         std::uint64_t length, at::ScalarType scalar_type, at::IntArrayRef sizes,
                         at::IntArrayRef region_offsets, at::IntArrayRef region_lengths,
                         at::Tensor tensor);

/// Returns an uninitialised tensor of `bytes` bytes, whose memory is unmapped when it is freed.
/// Memory freed by malloc might stay in the heap, so that the process exceeds the memory limit.
at::Tensor mapped_tensor(const Extents& sizes, at::ScalarType dtype, std::uint64_t bytes);

/// Returns a view of the target's region of the stored tensor. bytes: the tensor's storage. header:
/// the tensor's layout.
at::Tensor region_in_storage(const TensorTarget& target, const at::Tensor& bytes,
                             const format::TensorHeader& header);

}  // namespace torch_ckpt::tensors
