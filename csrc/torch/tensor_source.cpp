#include "torch/tensor_source.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "engine/bulk_copy.h"
#include "format/crc32.h"
#include "torch/extents.h"
#include "torch/tensor_checks.h"

namespace torch_ckpt::tensors {
namespace {

// Returns the loops that copy a tensor to its payload. The payload is laid out by the dense
// strides, with dimensions in order of decreasing stride.
std::vector<staging::Source::Dim> gather_dims(const at::Tensor& tensor,
                                              const std::vector<std::int64_t>& dense_strides,
                                              std::size_t item_bytes) {
  std::vector<std::size_t> order(dense_strides.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return dense_strides[a] > dense_strides[b];
  });
  std::vector<staging::Source::Dim> dims;
  for (const std::size_t d : order) {
    const auto size = static_cast<std::uint64_t>(tensor.size(static_cast<std::int64_t>(d)));
    if (size == 1) continue;
    const std::int64_t stride_bytes =
        tensor.stride(static_cast<std::int64_t>(d)) * static_cast<std::int64_t>(item_bytes);
    // Merge contiguous dimensions, so that rows are long.
    if (!dims.empty() &&
        dims.back().stride_bytes == stride_bytes * static_cast<std::int64_t>(size)) {
      dims.back().size *= size;
      dims.back().stride_bytes = stride_bytes;
    } else {
      dims.push_back({size, stride_bytes});
    }
  }
  const bool contiguous =
      dims.empty() ||
      (dims.size() == 1 && dims[0].stride_bytes == static_cast<std::int64_t>(item_bytes));
  if (contiguous) dims.clear();
  return dims;
}

}  // namespace

TensorSource source_of(const at::Tensor& tensor) {
  const format::Dtype* dtype = dtype_of(tensor.scalar_type());
  if (dtype == nullptr) {
    throw std::invalid_argument(std::string("the engine does not support tensors of dtype ") +
                                c10::toString(tensor.scalar_type()));
  }
  const auto bytes = static_cast<std::uint64_t>(tensor.numel()) * dtype->item_bytes;
  TensorSource found;
  found.owner = tensor;
  found.header.dtype = dtype;
  found.header.sizes = unsigned_of(tensor.sizes());
  found.header.storage_bytes = bytes;
  found.source.bytes = bytes;
  found.source.item_bytes = dtype->item_bytes;
  if (tensor.is_cuda()) found.source.device = tensor.get_device();

  const std::uint64_t storage_bytes = tensor.storage().nbytes();
  if (storage_bytes == bytes && !tensor.is_cuda()) {
    found.header.storage_offset = static_cast<std::uint64_t>(tensor.storage_offset());
    found.header.strides = unsigned_of(tensor.strides());
    found.header.conj = tensor.is_conj();
    found.header.neg = tensor.is_neg();
    found.source.address = static_cast<const std::byte*>(tensor.storage().data());
    return found;
  }
  if (tensor.is_cuda()) {
    if (!is_dense(tensor))
      throw std::invalid_argument("a CUDA tensor that is not dense must be cloned first");
  } else if (tensor.is_conj() || tensor.is_neg() || tensor.numel() == 0) {
    return source_of(tensor.clone());
  }
  const std::vector<std::int64_t> strides =
      tensor.is_non_overlapping_and_dense()
          ? tensor.strides().vec()
          : at::infer_dense_strides(tensor.sizes(), tensor.strides());
  found.header.strides = unsigned_of(strides);
  found.source.address = static_cast<const std::byte*>(tensor.const_data_ptr());
  found.source.dims = gather_dims(tensor, strides, dtype->item_bytes);
  return found;
}

std::vector<at::Tensor> copies_in_pool(engine::Context& context,
                                       const std::vector<at::Tensor>& tensors) {
  std::vector<staging::Source> sources;
  for (const at::Tensor& tensor : tensors) {
    staging::Source& source = sources.emplace_back();
    source.address = static_cast<const std::byte*>(tensor.const_data_ptr());
    source.bytes = tensor.nbytes();
  }
  std::vector<engine::PooledCopy> placed = engine::copy_to_pool(context, sources).value();
  std::vector<at::Tensor> copies;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    copies.push_back(at::from_blob(
        placed[i].address, tensors[i].sizes(), tensors[i].strides(),
        [memory = std::move(placed[i].memory)](void*) {}, tensors[i].options()));
  }
  return copies;
}

}  // namespace torch_ckpt::tensors
