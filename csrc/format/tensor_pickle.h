#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "format/dtype.h"

namespace torch_ckpt::format {

/// What `data.pkl` of a torch.save archive says of one plain CPU tensor. Sizes, strides and the
/// offset count elements.
struct TensorHeader {
  const Dtype* dtype = nullptr;
  std::uint64_t storage_bytes = 0;
  std::uint64_t storage_offset = 0;
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint64_t> strides;
  bool conj = false;
  bool neg = false;

  /// Whether the payload is the elements in row-major order, with nothing around them.
  bool is_plain_row_major() const;

  bool operator==(const TensorHeader&) const = default;
};

/// Emits the pickle, byte for byte as Python's pickler does (protocol 2, memo included).
std::string encode_tensor_pickle(const TensorHeader& header);

/// Reads such a pickle and nothing else: a fixed sequence of opcodes with no calls, so that a
/// hostile file can at most be refused. Errc::pickle_unknown for anything but a plain CPU tensor
/// (quantized, subclass, other device); the caller may hand those to torch.load.
Result<TensorHeader> decode_tensor_pickle(std::span<const std::byte> bytes);

}  // namespace torch_ckpt::format
