#include "torch/tensor_checks.h"

#include <algorithm>
#include <stdexcept>

#include "planning/strides.h"
#include "staging/device_copy.h"

namespace torch_ckpt::tensors {
namespace {

// Returns true if the storage contains all elements that the sizes and strides address. It does not
// after storage().resize_(0), for example.
bool lies_in_storage(const Tensor& tensor, const format::Dtype& dtype) {
  if (tensor.numel() == 0) return true;
  std::int64_t last = tensor.storage_offset();
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  return (static_cast<std::uint64_t>(last) + 1) * dtype.item_bytes <= tensor.storage_bytes() &&
         tensor.data() != nullptr;
}

bool is_reachable(const Tensor& tensor) {
  return tensor.is_cpu() || (tensor.is_cuda() && staging::device_support() != nullptr);
}

}  // namespace

bool is_plain(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_strided() || !is_reachable(tensor)) return false;
  const format::Dtype* const dtype = tensor.dtype().known();
  try {
    return dtype != nullptr && lies_in_storage(tensor, *dtype);
  } catch (const std::runtime_error&) {
    return false;  // the tensors of torch.func have no storage
  }
}

bool is_dense(const Tensor& tensor) {
  return planning::is_dense(tensor.sizes(), tensor.strides()) && !tensor.is_conj() &&
         !tensor.is_neg();
}

void add_cuda_device(std::vector<int>& devices, int device) {
  if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
}

void add_cuda_device(std::vector<int>& devices, const Tensor& tensor) {
  if (tensor.is_cuda()) add_cuda_device(devices, tensor.device_index());
}

bool can_be_filled(const Tensor& tensor) {
  if (!is_plain(tensor) || tensor.is_conj() || tensor.is_neg()) return false;
  if (tensor.is_cuda()) return tensor.is_contiguous();
  // If elements overlap, the load uses a temporary, and torch refuses to copy to the target.
  return !planning::is_repeated(tensor.sizes(), tensor.strides());
}

}  // namespace torch_ckpt::tensors
