#pragma once

#include <span>

#include "torch/libtorch.h"

namespace torch_ckpt::tensors {

// torch stores a conjugation or negation that is still to be applied to the elements as a bit of
// the tensor, a math bit. LibTorch has no stable function that returns these bits. Tensor.is_conj()
// and Tensor.is_neg() of Python release the GIL, so that each of thousands of calls might wait for
// other threads. Therefore torch's dispatcher, which chooses a kernel by the bits of all tensors in
// a list, is asked:
//
//   1. load_math_bits() defines the operator torch_ckpt::has_math_bits(Tensor[]) -> bool. Its kernel
//      for the dispatch keys Conjugate and Negative returns true, and its kernel for all other keys
//      returns false.
//   2. have_math_bits() calls the operator.

/// Defines the operator. Call it once.
void load_math_bits();

/// Returns false if none of the tensors has a math bit. Otherwise, and if torch has no kernel for
/// one of the tensors, returns true. Does not need the GIL.
bool have_math_bits(std::span<const libtorch::TensorHandle> tensors);

}  // namespace torch_ckpt::tensors
