#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "format/tensor_pickle.h"
#include "torch/extents.h"
#include "torch/tensor.h"

namespace torch_ckpt::tensors {

/// A region of a stored tensor, and the tensor to read it into.
struct TensorTarget {
  std::string name;
  std::size_t file = 0;
  std::uint64_t offset = 0;  // offset of the record in the file
  std::uint64_t length = 0;
  ScalarType dtype;
  Extents sizes;
  Extents region_offsets;
  Extents region_lengths;
  Tensor tensor;
  bool is_transformed = false;  // a transform has changed the record, so only torch can read it

  std::uint64_t region_bytes(std::uint64_t item_bytes) const;
};

/// Creates a target. If the stored tensor has dimensions, empty `region_lengths` select all of it.
/// Throws Failure if sizes are invalid, if the region does not lie within the stored tensor, or if
/// `tensor` does not have the size of the region.
TensorTarget make_target(std::string name, std::size_t file, std::uint64_t offset,
                         std::uint64_t length, ScalarType dtype, Tensor::Extents sizes,
                         Tensor::Extents region_offsets, Tensor::Extents region_lengths,
                         Tensor tensor);

/// Returns an uninitialised tensor of `bytes` bytes, whose memory is unmapped when it is freed.
/// Memory freed by malloc might stay in the heap, so that the process exceeds the memory limit.
Tensor mapped_tensor(const Extents& sizes, ScalarType dtype, std::uint64_t bytes);

/// Returns a view of the target's region of the stored tensor. bytes: the tensor's storage. header:
/// the tensor's layout.
Tensor region_in_storage(const TensorTarget& target, const Tensor& bytes,
                         const format::TensorHeader& header);

}  // namespace torch_ckpt::tensors
