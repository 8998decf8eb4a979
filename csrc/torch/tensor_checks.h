#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "format/dtype.h"

namespace torch_ckpt::tensors {

/// torch's name, without "torch.".
std::string name_of(at::ScalarType type);

/// nullptr where the engine does not know the dtype.
const format::Dtype* dtype_of(at::ScalarType type);

/// Whether the engine can write the tensor itself: strided, on the CPU or a CUDA device, of a dtype
/// that format/dtype.cpp knows, with storage of its own and no Python behaviour. All others go
/// through torch.save.
bool is_plain(const at::Tensor& tensor);

/// Whether the tensor's elements lie in its memory one beside the other and mean what they say: no
/// gaps, no overlap, no pending conjugation or negation. A CUDA tensor must be, to be written.
bool is_dense(const at::Tensor& tensor);

/// Whether the engine may write into the tensor's memory.
bool can_be_filled(const at::Tensor& tensor);

}  // namespace torch_ckpt::tensors
