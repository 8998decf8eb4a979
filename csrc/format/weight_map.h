#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"

namespace torch_ckpt::format {

/// Names of tensors, each with the safetensors file that holds the tensor.
using WeightMap = std::vector<std::pair<std::string, std::string>>;

/// The end of the name of a directory's index, which names the file of each tensor.
inline constexpr std::string_view kWeightMapSuffix = ".safetensors.index.json";

/// Decodes the index of a directory of safetensors files: a JSON object whose "weight_map" is an
/// object of strings. Ignores all other keys. Fails with Errc::metadata_inconsistent and the
/// reason. Memory and time are proportional to the size of the text.
Result<WeightMap> decode_weight_map(std::string_view json);

}  // namespace torch_ckpt::format
