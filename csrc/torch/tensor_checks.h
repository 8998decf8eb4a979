#pragma once

#include <vector>

#include "torch/tensor.h"

namespace torch_ckpt::tensors {

/// Returns true if the engine can write the tensor without torch.save. Such a tensor is strided, is
/// on the CPU or a CUDA device, has a dtype listed in format/dtype.cpp and a storage that contains
/// all its elements, and is not a tensor subclass.
bool is_plain(const Tensor& tensor);

/// Returns true if the tensor's elements are contiguous in memory, in any order of dimensions,
/// without overlap and without a pending conjugation or negation. CUDA tensors must be dense to be
/// saved.
bool is_dense(const Tensor& tensor);

/// Adds the number of a CUDA device that the list lacks.
void add_cuda_device(std::vector<int>& devices, int device);
/// Adds the tensor's device, if it is a CUDA device.
void add_cuda_device(std::vector<int>& devices, const Tensor& tensor);

/// Returns true if the engine may write directly into the tensor's memory.
bool can_be_filled(const Tensor& tensor);

}  // namespace torch_ckpt::tensors
