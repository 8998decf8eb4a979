#pragma once

#include <cstddef>
#include <string_view>

namespace torch_ckpt::format {

/// The properties of a torch dtype that a tensor record needs.
struct Dtype {
  std::string_view name;     // name in the module torch: "bfloat16"
  std::string_view storage;  // legacy storage class; empty if the dtype never had one
  std::size_t item_bytes;
};

/// Returns nullptr for dtypes that plain tensor records do not support: quantized types and
/// sub-byte integers.
const Dtype* find_dtype(std::string_view name);
const Dtype* find_dtype_of_storage(std::string_view storage);

}  // namespace torch_ckpt::format
