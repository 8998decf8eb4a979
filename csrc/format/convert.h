#pragma once

#include <cstddef>

#include "format/dtype.h"

namespace torch_ckpt::format {

/// Converts `count` elements. The pointers may be unaligned; the ranges must not overlap.
using Conversion = void (*)(std::byte* out, const std::byte* in, std::size_t count);

/// Returns the conversion between two different dtypes of {float64, float32, float16, bfloat16}, or
/// nullptr for any other pair. Rounds like torch's copy_: to nearest, ties to even. A NaN becomes a
/// NaN with unspecified sign and payload.
Conversion find_conversion(const Dtype& from, const Dtype& to);

namespace internal {

// The two implementations of find_conversion(), exposed for tests.
Conversion find_scalar_conversion(const Dtype& from, const Dtype& to);
/// Returns nullptr for any pair if the processor lacks AVX2 or F16C.
Conversion find_vector_conversion(const Dtype& from, const Dtype& to);

}  // namespace internal

}  // namespace torch_ckpt::format
