#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace torch_ckpt::planning {

// How the elements of a tensor lie in memory, by its sizes and strides. All strides are in
// elements. The functions agree with torch's functions of the same meaning.

using Geometry = std::span<const std::int64_t>;

std::vector<std::int64_t> row_major_strides(Geometry sizes);

/// Returns true if the elements lie in row-major order, without gaps.
bool is_contiguous(Geometry sizes, Geometry strides);

/// Returns true if the elements lie without gaps and without overlap, in any order of dimensions.
bool is_dense(Geometry sizes, Geometry strides);

/// Returns true if a dimension repeats the same elements. Does not find other overlaps.
bool is_repeated(Geometry sizes, Geometry strides);

/// Returns the strides of a dense tensor of the same size whose dimensions have the same order in
/// memory: the strides that torch gives to a clone.
std::vector<std::int64_t> dense_strides(Geometry sizes, Geometry strides);

}  // namespace torch_ckpt::planning
