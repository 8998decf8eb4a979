#pragma once

#include <cstddef>

#include "format/dtype.h"

namespace torch_ckpt::format {

/// Converts `count` elements; neither pointer need be aligned; the ranges must not overlap.
using Conversion = void (*)(std::byte* out, const std::byte* in, std::size_t count);

/// The conversion between two different dtypes of {float64, float32, float16, bfloat16}, with the
/// rounding of torch's copy_: to the nearest, ties to even. A NaN stays one; its sign and payload
/// are free. nullptr for any other pair.
Conversion find_conversion(const Dtype& from, const Dtype& to);

namespace internal {

// What find_conversion chooses from, for its tests.
Conversion find_scalar_conversion(const Dtype& from, const Dtype& to);
/// nullptr also where the processor lacks AVX2 or F16C.
Conversion find_vector_conversion(const Dtype& from, const Dtype& to);

}  // namespace internal

}  // namespace torch_ckpt::format
