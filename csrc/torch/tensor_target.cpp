#include "torch/tensor_target.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <utility>

#include "checked_math.h"
#include "error.h"
#include "os/file.h"
#include "os/pages.h"
#include "planning/region.h"
#include "torch/tensor_checks.h"

namespace torch_ckpt::tensors {
namespace {

[[noreturn]] void refuse(std::string why) {
  throw Failure(format_error(Errc::invalid_argument, std::move(why)));
}

// Checks values from the metadata, which may be damaged or malicious.
Extents checked_extents(at::IntArrayRef values) {
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
  std::ostringstream text;
  text << at::IntArrayRef(signed_of(values));
  return text.str();
}

}  // namespace

std::uint64_t TensorTarget::region_bytes(std::uint64_t item_bytes) const {
  return checked_product(region_lengths) * item_bytes;
}

TensorTarget make_target(std::string name, std::size_t file, std::uint64_t offset,
                         std::uint64_t length, at::ScalarType scalar_type, at::IntArrayRef sizes,
                         at::IntArrayRef region_offsets, at::IntArrayRef region_lengths,
                         at::Tensor tensor) {
  TensorTarget target{std::move(name),
                      file,
                      offset,
                      length,
                      scalar_type,
                      dtype_of(scalar_type),
                      checked_extents(sizes),
                      checked_extents(region_offsets),
                      checked_extents(region_lengths),
                      std::move(tensor)};
  if (region_lengths.empty() && !sizes.empty()) {
    target.region_offsets.assign(sizes.size(), 0);
    target.region_lengths = target.sizes;
  }
  checked_product(target.sizes);
  if (!planning::box_inside(target.sizes, target.region_offsets, target.region_lengths)) {
    refuse(target.name + ": the requested region " + text_of(target.region_lengths) + " at " +
           text_of(target.region_offsets) + " does not lie within the stored tensor of " +
           text_of(target.sizes));
  }
  const Extents target_sizes = unsigned_of(target.tensor.sizes());
  if (target_sizes != target.region_lengths) {
    refuse(target.name + ": size mismatch: the target has " + text_of(target_sizes) +
           ", the requested region has " + text_of(target.region_lengths));
  }
  return target;
}

at::Tensor mapped_tensor(const Extents& sizes, at::ScalarType dtype, std::uint64_t bytes) {
  auto pages = std::make_shared<os::Pages>(
      os::Pages::allocate(align_up(bytes, std::uint64_t{os::kDirectAlignment})).value());
  std::byte* const address = pages->bytes().data();
  return at::from_blob(
      address, signed_of(sizes), [pages = std::move(pages)](void*) {},
      at::TensorOptions().dtype(dtype));
}

at::Tensor region_in_storage(const TensorTarget& target, const at::Tensor& bytes,
                             const format::TensorHeader& header) {
  at::Tensor stored = at::empty({0}, at::TensorOptions().dtype(target.scalar_type));
  stored.set_(bytes.storage(), static_cast<std::int64_t>(header.storage_offset),
              signed_of(header.sizes), signed_of(header.strides));
  if (header.conj) stored = stored.conj();
  if (header.neg) stored = stored._neg_view();
  for (std::size_t d = 0; d < target.sizes.size(); ++d) {
    stored = stored.narrow(static_cast<std::int64_t>(d),
                           static_cast<std::int64_t>(target.region_offsets[d]),
                           static_cast<std::int64_t>(target.region_lengths[d]));
  }
  return stored;
}

}  // namespace torch_ckpt::tensors
