#include "torch/math_bits.h"

#include <cstddef>
#include <cstdint>

namespace torch_ckpt::tensors {
namespace {

using libtorch::LibraryHandle;
using libtorch::ListHandle;
using libtorch::TensorHandle;

constexpr const char* kNamespace = "torch_ckpt";
constexpr const char* kName = "has_math_bits";

// A kernel. It must not throw.
template <bool kAnswer>
void answer(std::uint64_t* stack, std::uint64_t /*arguments*/, std::uint64_t /*results*/) {
  const auto list = reinterpret_cast<ListHandle>(stack[0]);
  std::size_t size = 0;
  libtorch::list_size(list, &size);
  for (std::size_t i = 0; i < size; ++i) {
    std::uint64_t item = 0;
    libtorch::list_item(list, i, &item);
    libtorch::delete_tensor(reinterpret_cast<TensorHandle>(item));
  }
  libtorch::delete_list(list);
  stack[0] = kAnswer ? 1 : 0;
}

void add_kernel(const char* key, libtorch::Kernel* kernel) {
  LibraryHandle library = nullptr;  // lives until the process ends
  libtorch::check(libtorch::new_kernels(kNamespace, key, __FILE__, __LINE__, &library));
  libtorch::check(libtorch::implement(library, kName, kernel, libtorch::kVersion2_11));
}

}  // namespace

void load_math_bits() {
  LibraryHandle library = nullptr;  // lives until the process ends
  libtorch::check(libtorch::new_library(kNamespace, __FILE__, __LINE__, &library));
  libtorch::check(libtorch::define(library, "has_math_bits(Tensor[] tensors) -> bool"));
  add_kernel("CompositeExplicitAutograd", &answer<false>);
  add_kernel("Conjugate", &answer<true>);
  add_kernel("Negative", &answer<true>);
}

bool have_math_bits(std::span<const TensorHandle> tensors) {
  ListHandle list = nullptr;
  libtorch::check(libtorch::new_list(tensors.size(), &list));
  for (const TensorHandle tensor : tensors) {
    TensorHandle argument = nullptr;
    libtorch::check(libtorch::new_handle(tensor, &argument));
    libtorch::check(libtorch::push_back(list, reinterpret_cast<std::uint64_t>(argument)));
  }
  auto stack = reinterpret_cast<std::uint64_t>(list);
  const int status =
      libtorch::call_dispatcher("torch_ckpt::has_math_bits", "", &stack, libtorch::kVersion2_11);
  return status != 0 || stack != 0;
}

}  // namespace torch_ckpt::tensors
