#pragma once

#include <cstddef>

#include "format/dtype.h"

namespace torch_ckpt::format {

/// Converts `count` elements. The pointers may be unaligned; the ranges must not overlap.
using Conversion = void (*)(std::byte* out, const std::byte* in, std::size_t count);

/// Returns the conversion between two different dtypes of {float64, float32, float16, bfloat16},
/// and nullptr for any other pair. It rounds as torch's copy_ does: to the nearest, ties to even. A
/// NaN is converted to a NaN with any sign and payload.
Conversion find_conversion(const Dtype& from, const Dtype& to);

namespace internal {

// The implementations that find_conversion() chooses from. Exposed for tests.
Conversion find_scalar_conversion(const Dtype& from, const Dtype& to);
/// Also returns nullptr if the processor lacks AVX2 or F16C.
Conversion find_vector_conversion(const Dtype& from, const Dtype& to);

}  // namespace internal

}  // namespace torch_ckpt::format
