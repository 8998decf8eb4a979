#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "format/tensor_pickle.h"
#include "staging/source.h"

namespace torch_ckpt::python {

/// Whether the engine can write the tensor itself: strided, on the CPU or a CUDA device, of a dtype
/// that format/dtype.cpp knows, with storage of its own and no Python behaviour. All others go
/// through torch.save.
bool is_plain(const at::Tensor& tensor);

/// Whether the tensor's elements lie in its memory one beside the other and mean what they say: no
/// gaps, no overlap, no pending conjugation or negation. A CUDA tensor must be, to be written.
bool is_dense(const at::Tensor& tensor);

/// A plain tensor as the core sees it. `owner` keeps the bytes alive; it is the tensor itself but
/// for the rare ones that must be made concrete first (conjugate views of a part of a storage).
struct TensorSpan {
  at::Tensor owner;
  format::TensorHeader header;
  staging::Source source;
};

/// What DCP's stock writer stores for the tensor: its storage as it is where the tensor covers all
/// of it, otherwise what tensor.clone() would make (torch/distributed/checkpoint/filesystem.py).
TensorSpan to_span(const at::Tensor& tensor);

const format::Dtype* dtype_of(const at::Tensor& tensor);

}  // namespace torch_ckpt::python
