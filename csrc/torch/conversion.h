#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "staging/host_scatter.h"

namespace torch_ckpt::tensors {

/// What Tensor.copy_ does between two dtypes, and with `conj` or `neg` of the source's conjugate or
/// negative. Throws Failure, naming the item, where copy_ knows no such conversion.
staging::Convert conversion_between(const std::string& name, at::ScalarType from, at::ScalarType to,
                                    bool conj, bool neg);

}  // namespace torch_ckpt::tensors
