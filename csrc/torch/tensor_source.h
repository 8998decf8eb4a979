#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/context.h"
#include "format/tensor_pickle.h"
#include "staging/source.h"

namespace torch_ckpt::tensors {

/// A plain tensor as the core sees it. `owner` keeps the bytes alive; it is the tensor itself but
/// for the rare ones that must be made concrete first (conjugate views of a part of a storage).
struct TensorSource {
  at::Tensor owner;
  format::TensorHeader header;
  staging::Source source;
};

/// What DCP's stock writer stores for the tensor: its storage as it is where the tensor covers all
/// of it, otherwise what tensor.clone() would make (torch/distributed/checkpoint/filesystem.py).
TensorSource source_of(const at::Tensor& tensor);

/// Copies of dense CPU tensors, with their strides, in memory of the chunk pool.
std::vector<at::Tensor> copies_in_pool(engine::Context& context,
                                       const std::vector<at::Tensor>& tensors);

/// The CRC-32 of a sample (format/crc32.h) of a tensor that is plain and lies in the host's memory
/// as one piece; nullopt for others.
std::optional<std::uint32_t> crc_of_sample(const at::Tensor& tensor, std::uint64_t most_bytes,
                                           std::uint64_t stripes);

}  // namespace torch_ckpt::tensors
