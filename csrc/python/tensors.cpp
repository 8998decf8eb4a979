#include "python/tensors.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/clone.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <stdexcept>

#include "staging/device_copy.h"

namespace torch_ckpt::python {
namespace {

std::vector<std::uint64_t> unsigned_of(at::IntArrayRef values) {
  return {values.begin(), values.end()};
}

// The payload's order is that of the dense strides: dimensions by falling stride.
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
    // Merging dimensions that continue each other keeps the copied rows long.
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

const format::Dtype* dtype_of(const at::Tensor& tensor) {
  // torch's own name of the dtype, so that no list of its enumerators is repeated here. The slots
  // of its table never change, and a load asks for the same few dtypes over and over.
  thread_local std::array<std::pair<bool, const format::Dtype*>,
                          static_cast<std::size_t>(at::ScalarType::NumOptions)>
      known{};
  auto& [looked_up, dtype] = known[static_cast<std::size_t>(tensor.scalar_type())];
  if (!looked_up) {
    dtype = format::find_dtype(torch::getTHPDtype(tensor.scalar_type())->name);
    looked_up = true;
  }
  return dtype;
}

namespace {

// The elements that sizes and strides reach lie in the storage: not so after storage().resize_(0).
bool lies_in_storage(const at::Tensor& tensor, const format::Dtype& dtype) {
  if (tensor.numel() == 0) return true;
  std::int64_t last = tensor.storage_offset();
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return tensor.storage().data() != nullptr &&
         (static_cast<std::uint64_t>(last) + 1) * dtype.item_bytes <= tensor.storage().nbytes();
}

bool is_reachable(const at::Tensor& tensor) {
  return tensor.is_cpu() || (tensor.is_cuda() && staging::device_support() != nullptr);
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_nested() ||
      tensor.is_quantized() || !is_reachable(tensor) || at::isTensorSubclassLike(tensor) ||
      tensor._is_zerotensor() || !tensor.has_storage() ||
      tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return false;
  }
  const format::Dtype* dtype = dtype_of(tensor);
  return dtype != nullptr && lies_in_storage(tensor, *dtype);
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

TensorSpan to_span(const at::Tensor& tensor) {
  const format::Dtype* dtype = dtype_of(tensor);
  if (dtype == nullptr) {
    throw std::invalid_argument(std::string("the engine does not know tensors of ") +
                                c10::toString(tensor.scalar_type()));
  }
  const auto bytes = static_cast<std::uint64_t>(tensor.numel()) * dtype->item_bytes;
  TensorSpan span;
  span.owner = tensor;
  span.header.dtype = dtype;
  span.header.sizes = unsigned_of(tensor.sizes());
  span.header.storage_bytes = bytes;
  span.source.bytes = bytes;
  span.source.item_bytes = dtype->item_bytes;
  if (tensor.is_cuda()) span.source.device = tensor.get_device();

  const std::uint64_t storage_bytes = tensor.storage().nbytes();
  if (storage_bytes == bytes && !tensor.is_cuda()) {
    span.header.storage_offset = static_cast<std::uint64_t>(tensor.storage_offset());
    span.header.strides = unsigned_of(tensor.strides());
    span.header.conj = tensor.is_conj();
    span.header.neg = tensor.is_neg();
    span.source.address = static_cast<const std::byte*>(tensor.storage().data());
    return span;
  }
  if (tensor.is_cuda()) {
    if (!is_dense(tensor))
      throw std::invalid_argument("a CUDA tensor with gaps must be cloned first");
  } else if (tensor.is_conj() || tensor.is_neg() || tensor.numel() == 0) {
    return to_span(tensor.clone());
  }
  const std::vector<std::int64_t> strides =
      tensor.is_non_overlapping_and_dense()
          ? tensor.strides().vec()
          : at::infer_dense_strides(tensor.sizes(), tensor.strides());
  span.header.strides = unsigned_of(strides);
  span.source.address = static_cast<const std::byte*>(tensor.const_data_ptr());
  span.source.dims = gather_dims(tensor, strides, dtype->item_bytes);
  return span;
}

}  // namespace torch_ckpt::python
