#pragma once

#include <cstdint>

#include "torch/tensor.h"

namespace torch_ckpt::tensors {

/// Computes a CRC-32 of the elements of a plain tensor, in the order of their indices. The CRC does
/// not depend on device, strides or a pending conjugation. Returns 0 for tensors that are not
/// plain.
///
/// A CRC suffices to compare replicas, because it must detect drift, not forgery. It misses one
/// change in four billion, which the next comparison finds.
///
/// whole: false reads at most 64 KiB, in 16 evenly spread stripes of a larger tensor.
std::uint32_t fingerprint_of(const Tensor& tensor, bool whole);

}  // namespace torch_ckpt::tensors
