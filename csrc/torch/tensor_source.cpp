#include "torch/tensor_source.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "engine/bulk_copy.h"
#include "planning/strides.h"
#include "torch/extents.h"
#include "torch/tensor_checks.h"

namespace torch_ckpt::tensors {
namespace {

// Returns the dimensions in order of decreasing stride.
std::vector<std::size_t> order_by(const std::vector<std::int64_t>& strides) {
  std::vector<std::size_t> order(strides.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return strides[a] > strides[b]; });
  return order;
}

// Returns the loops that copy a tensor to its payload, whose dimensions have this order, outermost
// first.
std::vector<staging::Source::Dim> gather_dims(const Tensor& tensor,
                                              const std::vector<std::size_t>& order,
                                              std::size_t item_bytes) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  std::vector<staging::Source::Dim> dims;
  for (const std::size_t d : order) {
    const auto size = static_cast<std::uint64_t>(sizes[d]);
    if (size == 1) continue;
    const std::int64_t stride_bytes = strides[d] * static_cast<std::int64_t>(item_bytes);
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

TensorSource source_of(const Tensor& tensor) {
  const format::Dtype* dtype = tensor.dtype().known();
  if (dtype == nullptr) {
    throw std::invalid_argument("the engine does not support tensors of dtype " +
                                tensor.dtype().name());
  }
  const auto bytes = static_cast<std::uint64_t>(tensor.numel()) * dtype->item_bytes;
  TensorSource found;
  found.owner = tensor;
  found.header.dtype = dtype;
  found.header.sizes = unsigned_of(tensor.sizes());
  found.header.storage_bytes = bytes;
  found.source.bytes = bytes;
  found.source.item_bytes = dtype->item_bytes;
  if (tensor.is_cuda()) found.source.device = tensor.device_index();

  const std::uint64_t storage_bytes = tensor.storage_bytes();
  if (storage_bytes == bytes && !tensor.is_cuda()) {
    found.header.storage_offset = static_cast<std::uint64_t>(tensor.storage_offset());
    found.header.strides = unsigned_of(tensor.strides());
    found.header.conj = tensor.is_conj();
    found.header.neg = tensor.is_neg();
    if (bytes > 0) found.source.address = tensor.storage_data();
    return found;
  }
  if (tensor.is_cuda()) {
    if (!is_dense(tensor))
      throw std::invalid_argument("a CUDA tensor that is not dense must be cloned first");
  } else if (tensor.is_conj() || tensor.is_neg() || tensor.numel() == 0) {
    return source_of(tensor.clone());
  }
  std::vector<std::int64_t> strides(tensor.strides().begin(), tensor.strides().end());
  if (!planning::is_dense(tensor.sizes(), strides)) {
    strides = planning::dense_strides(tensor.sizes(), strides);
  }
  found.header.strides = unsigned_of(strides);
  found.source.address = tensor.data();
  found.source.dims = gather_dims(tensor, order_by(strides), dtype->item_bytes);
  return found;
}

TensorSource row_major_source_of(const Tensor& tensor) {
  if (tensor.is_cuda() ? !tensor.is_contiguous() : tensor.is_conj() || tensor.is_neg()) {
    if (tensor.is_cuda()) throw std::invalid_argument("a CUDA tensor must be contiguous");
    return row_major_source_of(tensor.clone());
  }
  TensorSource found;
  found.owner = tensor;
  found.source.bytes = tensor.nbytes();
  found.source.item_bytes = tensor.item_bytes();
  found.source.address = tensor.data();
  if (tensor.is_cuda()) {
    found.source.device = tensor.device_index();
  } else if (tensor.numel() > 0) {
    std::vector<std::size_t> order(tensor.dims());
    std::iota(order.begin(), order.end(), std::size_t{0});
    found.source.dims = gather_dims(tensor, order, found.source.item_bytes);
  }
  return found;
}

std::vector<Tensor> copies_in_pool(engine::Context& context, const std::vector<Tensor>& tensors) {
  std::vector<staging::Source> sources;
  for (const Tensor& tensor : tensors) {
    staging::Source& source = sources.emplace_back();
    source.address = tensor.data();
    source.bytes = tensor.nbytes();
  }
  std::vector<engine::PooledCopy> placed = engine::copy_to_pool(context, sources).value();
  std::vector<Tensor> copies;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    copies.push_back(Tensor::on_memory(placed[i].address, tensors[i].sizes(), tensors[i].strides(),
                                       tensors[i].dtype(), std::move(placed[i].memory)));
  }
  return copies;
}

}  // namespace torch_ckpt::tensors
