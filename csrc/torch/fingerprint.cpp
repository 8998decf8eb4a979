#include "torch/fingerprint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "format/crc32.h"
#include "torch/tensor_checks.h"

namespace torch_ckpt::tensors {
namespace {

constexpr std::uint64_t kSampleBytes = 64 << 10;
constexpr std::uint64_t kStripes = 16;

// Elements that are copied to the host at once.
constexpr std::int64_t kPieceBytes = 64 << 20;

/// Some dtypes can be copied and gathered only as integers.
at::Tensor as_integers(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
  switch (tensor.itemsize()) {
    case 1:
      return plain.view(at::kByte);
    case 2:
      return plain.view(at::kShort);
    case 4:
      return plain.view(at::kInt);
    case 8:
      return plain.view(at::kLong);
    default:
      return plain;
  }
}

std::uint32_t crc_of_pieces(const at::Tensor& elements) {
  // Do not flatten by view() or reshape(): they keep the stride of a dimension of size 1, which can
  // be any number.
  const at::Tensor flat = elements.contiguous().as_strided({elements.numel()}, {1});
  const std::int64_t step = kPieceBytes / static_cast<std::int64_t>(flat.itemsize());
  std::uint32_t crc = 0;
  for (std::int64_t begin = 0; begin < flat.numel(); begin += step) {
    const at::Tensor piece = flat.slice(0, begin, begin + step).cpu();
    crc = format::crc32(
        crc, std::span(static_cast<const std::byte*>(piece.const_data_ptr()), piece.nbytes()));
  }
  return crc;
}

/// Gathers the elements that format::crc32_of_sample reads.
at::Tensor sample_of(const at::Tensor& elements) {
  const auto length = static_cast<std::int64_t>(kSampleBytes / kStripes / elements.itemsize());
  const std::int64_t last = elements.numel() - length;
  std::vector<std::int64_t> begins;
  for (std::uint64_t stripe = 0; stripe < kStripes; ++stripe) {
    begins.push_back(last * static_cast<std::int64_t>(stripe) / (kStripes - 1));
  }
  const at::Tensor rows = at::tensor(begins, at::kLong).unsqueeze(1).to(elements.device());
  return at::take(elements, rows + at::arange(length, rows.options()));
}

}  // namespace

std::uint32_t fingerprint_of(const at::Tensor& tensor, bool whole) {
  if (!is_plain(tensor)) return 0;
  if (tensor.is_cpu() && tensor.is_contiguous() && is_dense(tensor)) {
    const std::span memory(static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes());
    if (whole) return format::crc32(0, memory);
    return format::crc32_of_sample(memory, {tensor.itemsize(), kSampleBytes, kStripes});
  }
  const at::Tensor elements = as_integers(tensor);
  const bool is_complete = whole || tensor.nbytes() <= kSampleBytes;
  return crc_of_pieces(is_complete ? elements : sample_of(elements));
}

}  // namespace torch_ckpt::tensors
