#pragma once

#include <vector>

#include "engine/context.h"
#include "format/tensor_pickle.h"
#include "staging/source.h"
#include "torch/tensor.h"

namespace torch_ckpt::tensors {

/// A plain tensor as a source for the engine. `owner` keeps the bytes alive. It is the tensor
/// itself or, for a conjugate or negative view of part of a storage, a clone.
struct TensorSource {
  Tensor owner;
  format::TensorHeader header;
  staging::Source source;
};

/// Describes what DCP's stock writer stores for the tensor: its storage if the tensor occupies all
/// of it, otherwise the result of tensor.clone() (torch/distributed/checkpoint/filesystem.py).
TensorSource source_of(const Tensor& tensor);

/// Describes the tensor's elements in row-major order. A tensor on a device must be contiguous.
TensorSource row_major_source_of(const Tensor& tensor);

/// Copies dense CPU tensors into memory of the chunk pool. The copies have the same strides.
std::vector<Tensor> copies_in_pool(engine::Context& context, const std::vector<Tensor>& tensors);

}  // namespace torch_ckpt::tensors
