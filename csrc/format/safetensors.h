#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "format/dtype.h"

namespace torch_ckpt::format {

// A safetensors file, as Hugging Face's library reads it:
//
//   length   the length of the header in bytes, a u64
//   header   a JSON object: for each tensor, its dtype, shape and data_offsets; optionally
//            "__metadata__" with strings; padded with spaces
//   data     the tensors in row-major order, back to back, without gaps
//
// Offsets follow from the names, dtypes and shapes, so the layout is known before any data.

/// A tensor in a safetensors file. `sizes` are torch's: one element of a packed dtype, such as
/// float4_e2m1fn_x2, holds two elements of the format along the last dimension.
struct SafeTensor {
  std::string name;
  const Dtype* dtype = nullptr;
  std::vector<std::uint64_t> sizes;
  std::uint64_t begin = 0;  // offset in the file, in bytes
  std::uint64_t bytes = 0;
};

/// Keys and values of a file's "__metadata__".
using SafeMetadata = std::vector<std::pair<std::string, std::string>>;

/// The contents of a file, without the data.
struct SafetensorsHeader {
  std::vector<SafeTensor> tensors;  // in the order of their data
  SafeMetadata metadata;
};

/// Limits of the safetensors library.
inline constexpr std::uint64_t kMaxSafeHeaderBytes = 100'000'000;
inline constexpr std::size_t kMaxSafeDimensions = 64;
/// Size of the length at the beginning of a file.
inline constexpr std::size_t kSafeLengthBytes = 8;

/// Returns the format's name of a dtype, such as "BF16"; empty if the format lacks the dtype.
std::string_view safe_dtype_name(const Dtype& dtype);

/// Checks that the format can hold a tensor; otherwise fails with Errc::unsavable and the
/// reason.
Result<> require_safe(std::string_view name, const Dtype* dtype,
                      std::span<const std::uint64_t> sizes);

/// Appends UTF-8 text as a JSON string.
void append_json_string(std::string& out, std::string_view text);

/// Encodes the bytes before the data, and sets the offsets of the tensors, whose data follows in
/// this order. Pads the header so that the data begins at a multiple of `alignment`, a power of
/// two of at least 8. The tensors must satisfy require_safe() and have different names. Fails with
/// Errc::unsavable if the header would be larger than readers accept.
Result<std::string> encode_safetensors_header(std::span<SafeTensor> tensors,
                                              const SafeMetadata& metadata, std::size_t alignment);

/// Returns the length of the header, given the first bytes of a file of `file_bytes` bytes. Fails
/// with Errc::metadata_inconsistent if the file is not a safetensors file.
Result<std::uint64_t> safetensors_header_bytes(std::span<const std::byte> begin,
                                               std::uint64_t file_bytes);

/// Decodes the header, which follows the length, of a file of `file_bytes` bytes. Accepts only
/// files that the safetensors library accepts: every name occurs once, every dtype is known, and
/// the tensors fill the file without gaps. Fails with Errc::metadata_inconsistent and the reason.
/// Memory and time are proportional to the size of the header.
Result<SafetensorsHeader> decode_safetensors_header(std::string_view json,
                                                    std::uint64_t file_bytes);

}  // namespace torch_ckpt::format
