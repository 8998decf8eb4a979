#pragma once

#include <cstddef>
#include <string_view>

namespace torch_ckpt::format {

/// What a tensor record needs to know of a torch dtype.
struct Dtype {
  std::string_view name;     // torch's, without the module: "bfloat16"
  std::string_view storage;  // legacy storage class; empty for dtypes that never had one
  std::size_t item_bytes;
};

/// nullptr for dtypes that are not stored as plain tensors (quantized, sub-byte integers).
const Dtype* find_dtype(std::string_view name);
const Dtype* find_dtype_of_storage(std::string_view storage);

}  // namespace torch_ckpt::format
