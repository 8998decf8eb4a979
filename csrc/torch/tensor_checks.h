#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "format/dtype.h"

namespace torch_ckpt::tensors {

/// torch's name of the dtype, without "torch.".
std::string name_of(at::ScalarType type);

/// Returns nullptr if the engine does not know the dtype.
const format::Dtype* dtype_of(at::ScalarType type);

/// True if the engine can write the tensor without torch.save: it is strided, on the CPU or a CUDA
/// device, of a dtype that format/dtype.cpp knows, with a storage that contains its elements, and
/// not a tensor subclass.
bool is_plain(const at::Tensor& tensor);

/// True if the tensor's elements are contiguous in memory, in any order of dimensions, without
/// overlap and without a pending conjugation or negation. A CUDA tensor must be dense to be saved.
bool is_dense(const at::Tensor& tensor);

/// True if the engine may write into the tensor's memory.
bool can_be_filled(const at::Tensor& tensor);

}  // namespace torch_ckpt::tensors
