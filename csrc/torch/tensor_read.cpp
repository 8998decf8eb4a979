#include "torch/tensor_read.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "checked_math.h"
#include "error.h"
#include "os/file.h"
#include "os/pages.h"
#include "planning/region.h"
#include "planning/strides.h"

namespace torch_ckpt::tensors {
namespace {

[[noreturn]] void refuse(std::string why) {
  throw Failure(format_error(Errc::invalid_argument, std::move(why)));
}

// Checks values from the metadata, which may be damaged or malicious.
Extents checked_extents(Tensor::ExtentsView values) {
  if (std::any_of(values.begin(), values.end(), [](std::int64_t value) { return value < 0; })) {
    refuse("a size or offset in the metadata is negative");
  }
  return unsigned_of(values);
}

std::uint64_t checked_product(const Extents& values) {
  std::uint64_t result = 1;
  for (const std::uint64_t value : values) {
    const auto next = checked_mul(result, value);
    if (!next) refuse("a stored tensor's size overflows 64 bits");
    result = *next;
  }
  return result;
}

std::string text_of(const Extents& values) {
  std::string text = "[";
  for (const std::uint64_t value : values) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(value);
  }
  return text + "]";
}

}  // namespace

std::uint64_t TensorRead::region_bytes(std::uint64_t item_bytes) const {
  return checked_product(lengths()) * item_bytes;
}

TensorRead make_read(planning::StoredRecord record, ScalarType dtype, Tensor::ExtentsView sizes,
                     Tensor::ExtentsView region_offsets, Tensor::ExtentsView region_lengths,
                     Tensor tensor) {
  record.is_tensor = true;
  record.dtype = dtype.known();
  record.sizes = checked_extents(sizes);
  TensorRead read{std::move(record), dtype, nullptr, std::move(tensor)};
  const Extents& stored = read.record.sizes;
  checked_product(stored);
  if (!region_lengths.empty() || sizes.empty()) {
    TensorRead::Region region{checked_extents(region_offsets), checked_extents(region_lengths)};
    if (!planning::box_inside(stored, region.offsets, region.lengths)) {
      refuse(read.record.name + ": the requested region " + text_of(region.lengths) + " at " +
             text_of(region.offsets) + " does not lie within the stored tensor of " +
             text_of(stored));
    }
    if (region.lengths != stored) {
      read.region = std::make_shared<const TensorRead::Region>(std::move(region));
    }
  }
  const Extents target_sizes = unsigned_of(read.tensor.sizes());
  if (target_sizes != read.lengths()) {
    refuse(read.record.name + ": size mismatch: the target has " + text_of(target_sizes) +
           ", the requested region has " + text_of(read.lengths()));
  }
  return read;
}

Tensor mapped_tensor(const Extents& sizes, ScalarType dtype, std::uint64_t bytes) {
  auto pages = std::make_shared<os::Pages>(
      os::Pages::allocate(align_up(bytes, std::uint64_t{os::kDirectAlignment})).value());
  const std::byte* const address = pages->bytes().data();
  const auto extents = signed_of(sizes);
  return Tensor::on_memory(address, extents, planning::row_major_strides(extents), dtype,
                           std::move(pages));
}

Tensor region_in_storage(const TensorRead& read, const Tensor& bytes,
                         const format::TensorHeader& header) {
  const auto strides = signed_of(header.strides);
  std::uint64_t offset = header.storage_offset;
  const Extents offsets = read.offsets();
  for (std::size_t d = 0; d < strides.size(); ++d) {
    offset += offsets[d] * header.strides[d];
  }
  const std::byte* const begin = bytes.data() + offset * read.dtype.item_bytes();
  const auto owner = std::make_shared<const Tensor>(bytes);
  return Tensor::on_memory(begin, signed_of(read.lengths()), strides, read.dtype, owner)
      .lazily(header.conj, header.neg);
}

}  // namespace torch_ckpt::tensors
