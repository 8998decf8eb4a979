#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "format/dtype.h"

namespace torch_ckpt::format {

/// The contents of `data.pkl` in a torch.save archive of one plain CPU tensor. `sizes`, `strides`
/// and `storage_offset` are in elements.
struct TensorHeader {
  const Dtype* dtype = nullptr;
  std::uint64_t storage_bytes = 0;
  std::uint64_t storage_offset = 0;
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint64_t> strides;
  bool conj = false;
  bool neg = false;

  /// Returns true if the payload is exactly the tensor's elements in row-major order.
  bool is_plain_row_major() const;

  auto operator<=>(const TensorHeader&) const = default;
};

/// Encodes the pickle, byte for byte like Python's pickler (protocol 2, memo opcodes included).
std::string encode_tensor_pickle(const TensorHeader& header);

/// Decodes such a pickle. Accepts only the opcode sequence of torch.save and calls nothing, so
/// malicious bytes are refused. Fails with Errc::pickle_unknown for anything but a plain CPU tensor
/// (quantized, subclass, other device); the caller may pass those records to torch.load.
Result<TensorHeader> decode_tensor_pickle(std::span<const std::byte> bytes);

}  // namespace torch_ckpt::format
