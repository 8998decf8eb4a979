#include "torch/tensor_checks.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>
#include <array>
#include <utility>

#include "staging/device_copy.h"

namespace torch_ckpt::tensors {
namespace {

// Returns true if the storage contains all elements that the sizes and strides address. It does not
// after storage().resize_(0), for example.
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

std::string name_of(at::ScalarType type) { return torch::getTHPDtype(type)->name; }

const format::Dtype* dtype_of(at::ScalarType type) {
  // Look dtypes up by torch's names, to avoid a second list of dtypes here. Cache the results,
  // because a load asks for the same few dtypes many times.
  thread_local std::array<std::pair<bool, const format::Dtype*>,
                          static_cast<std::size_t>(at::ScalarType::NumOptions)>
      known{};
  auto& [looked_up, dtype] = known[static_cast<std::size_t>(type)];
  if (!looked_up) {
    dtype = format::find_dtype(name_of(type));
    looked_up = true;
  }
  return dtype;
}

bool is_plain(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_nested() ||
      tensor.is_quantized() || !is_reachable(tensor) || at::isTensorSubclassLike(tensor) ||
      tensor._is_zerotensor() || !tensor.has_storage() ||
      tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return false;
  }
  const format::Dtype* dtype = dtype_of(tensor.scalar_type());
  return dtype != nullptr && lies_in_storage(tensor, *dtype);
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

void add_cuda_device(std::vector<at::Device>& devices, const at::Tensor& tensor) {
  if (tensor.is_cuda() && std::ranges::find(devices, tensor.device()) == devices.end()) {
    devices.push_back(tensor.device());
  }
}

bool can_be_filled(const at::Tensor& tensor) {
  if (!is_plain(tensor) || tensor.is_conj() || tensor.is_neg()) return false;
  if (tensor.is_cuda()) return tensor.is_contiguous();
  // Accept TooHard, which ATen returns for every view with gaps. If the elements overlap, the load
  // uses a temporary, and copy_ rejects the target.
  return at::has_internal_overlap(tensor) != at::MemOverlap::Yes;
}

}  // namespace torch_ckpt::tensors
