#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

#include "python/list.h"
#include "python/types.h"
#include "torch/scalar_type.h"
#include "torch/tensor.h"

// Conversions between the classes of csrc/torch and torch's Python classes.

template <>
struct pybind11::detail::type_caster<torch_ckpt::tensors::Tensor> {
  PYBIND11_TYPE_CASTER(torch_ckpt::tensors::Tensor, const_name("torch.Tensor"));

  bool load(handle object, bool) {
    if (!torch_ckpt::tensors::Tensor::is_tensor(object.ptr())) return false;
    value = torch_ckpt::tensors::Tensor::of(object.ptr());
    return true;
  }
  static handle cast(const torch_ckpt::tensors::Tensor& tensor, return_value_policy, handle) {
    return tensor.to_python();
  }
};

template <>
struct pybind11::detail::type_caster<torch_ckpt::tensors::ScalarType> {
  template <class>
  using cast_op_type = torch_ckpt::tensors::ScalarType;
  static constexpr auto name = const_name("torch.dtype");

  bool load(handle object, bool) {
    value = torch_ckpt::tensors::ScalarType::of(object.ptr());
    return value.has_value();
  }
  operator torch_ckpt::tensors::ScalarType() const { return *value; }
  static handle cast(torch_ckpt::tensors::ScalarType dtype, return_value_policy, handle) {
    return handle(dtype.object()).inc_ref();
  }

  std::optional<torch_ckpt::tensors::ScalarType> value;
};

namespace torch_ckpt::python {

/// Returns a list of torch.device for the numbers of CUDA devices.
inline auto devices_of(const std::vector<int>& numbers) {
  const pybind11::object device = pybind11::module_::import("torch").attr("device");
  return list_of(
      numbers, [&](int number) -> Typed<"torch.device"> {
        return pybind11::object(device("cuda", number));
      });
}

using AnyObject = Typed<"typing.Any">;
/// Returns this rank's shards of a DTensor, as ChunkStorageMetadata.
using LocalChunks = Typed<"collections.abc.Callable[[typing.Any], list[typing.Any]]">;

}  // namespace torch_ckpt::python
