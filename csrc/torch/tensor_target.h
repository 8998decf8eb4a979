#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "format/dtype.h"
#include "format/tensor_pickle.h"
#include "torch/extents.h"

namespace torch_ckpt::tensors {

/// One wanted region of one stored tensor, and the tensor that receives it.
struct TensorTarget {
  std::string name;
  std::size_t file = 0;
  std::uint64_t offset = 0;  // of the record in the file
  std::uint64_t length = 0;
  at::ScalarType scalar_type = at::kByte;
  const format::Dtype* dtype = nullptr;  // where the engine knows it
  Extents sizes;
  Extents region_offsets;
  Extents region_lengths;
  at::Tensor tensor;

  std::uint64_t region_bytes(std::uint64_t item_bytes) const;
};

/// An empty region of a tensor with dimensions is all of it. Throws Failure for sizes that are
/// impossible, for a region that does not lie within them, and for a tensor of other sizes.
TensorTarget make_target(std::string name, std::size_t file, std::uint64_t offset,
                         std::uint64_t length, at::ScalarType scalar_type, at::IntArrayRef sizes,
                         at::IntArrayRef region_offsets, at::IntArrayRef region_lengths,
                         at::Tensor tensor);

/// An uninitialised tensor of `bytes` whose memory goes back to the system with it. Of malloc's the
/// heap keeps what is freed between other blocks, beyond every limit.
at::Tensor mapped_tensor(const Extents& sizes, at::ScalarType dtype, std::uint64_t bytes);

/// The target's region of the tensor whose storage is `bytes`, as `header` says.
at::Tensor region_in_storage(const TensorTarget& target, const at::Tensor& bytes,
                             const format::TensorHeader& header);

}  // namespace torch_ckpt::tensors
