#include "torch/filled_memory.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace torch_ckpt::tensors {
namespace {

/// Returns the address range that contains the tensor's elements.
std::pair<std::uintptr_t, std::uintptr_t> extent_of(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.is_strided()) return {0, 0};
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  std::int64_t last = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data());
  return {begin, begin + (static_cast<std::uintptr_t>(last) + 1) * tensor.item_bytes()};
}

}  // namespace

bool FilledMemory::add(const std::string& name, const Tensor& tensor) {
  auto [begin, end] = extent_of(tensor);
  if (begin == end) return true;
  auto next = spans_.lower_bound(begin);
  if (next != spans_.begin() && std::prev(next)->second.end > begin) --next;
  auto last = next;
  for (; last != spans_.end() && last->first < end; ++last) {
    if (last->second.name != name) return false;
  }
  // Ranges with the same name may overlap, because the parts of a tensor may be interleaved.
  for (auto span = next; span != last; ++span) {
    begin = std::min(begin, span->first);
    end = std::max(end, span->second.end);
  }
  spans_.erase(next, last);
  spans_.emplace(begin, Span{end, name});
  return true;
}

}  // namespace torch_ckpt::tensors
