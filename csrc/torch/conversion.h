#pragma once

#include <string>

#include "staging/host_scatter.h"
#include "torch/scalar_type.h"

namespace torch_ckpt::tensors {

/// Returns a conversion between two dtypes with the same results as Tensor.copy_. With `conj` or
/// `neg`, it converts the conjugate or negative of the source. Throws a Failure that names the item
/// if copy_ does not support the conversion.
staging::Convert conversion_between(const std::string& name, ScalarType from, ScalarType to,
                                    bool conj, bool neg);

}  // namespace torch_ckpt::tensors
