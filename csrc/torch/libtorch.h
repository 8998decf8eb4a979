#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "os/function_table.h"

// LibTorch's stable functions, as torch/csrc/inductor/aoti_torch/c/shim.h and
// torch/csrc/stable/c/shim.h declare them. Releases of torch add functions and change none, so one
// build of this library works with all releases since 2.11.
//
//   1. `import torch` loads LibTorch. This library does not link LibTorch.
//   2. load() looks up each function below in the loaded LibTorch. It throws if a function is
//      missing that is not optional.
//   3. Most functions return 0, or another number if they have caught an exception. check() then
//      throws.
//
// The caller owns a TensorHandle that a function returns, and must delete it.
namespace torch_ckpt::tensors::libtorch {

struct OpaqueTensor;
using TensorHandle = OpaqueTensor*;

/// Looks up the functions. Throws std::runtime_error with a sentence for the user.
void load();

/// Throws std::runtime_error with the text of torch's exception, unless `status` is 0.
void check(int status);

inline os::FunctionTable functions;
inline os::FunctionTable cuda_functions;  // of LibTorch's library for CUDA, which may be missing

template <class Signature>
using Function = os::Function<Signature>;
template <class Value>
using Getter = Function<int(TensorHandle, Value*)>;
using Constant = Function<std::int32_t()>;

inline const Constant cpu(functions, "aoti_torch_device_type_cpu");
inline const Constant cuda(functions, "aoti_torch_device_type_cuda");
inline const Constant meta(functions, "aoti_torch_device_type_meta");
inline const Constant strided(functions, "aoti_torch_layout_strided");

inline const Getter<std::int64_t> get_dim(functions, "aoti_torch_get_dim");
inline const Getter<std::int64_t*> get_sizes(functions, "aoti_torch_get_sizes");
inline const Getter<std::int64_t*> get_strides(functions, "aoti_torch_get_strides");
inline const Getter<std::int64_t> get_storage_offset(functions, "aoti_torch_get_storage_offset");
inline const Getter<std::int64_t> get_storage_size(functions, "aoti_torch_get_storage_size");
inline const Getter<std::int32_t> get_dtype(functions, "aoti_torch_get_dtype");
inline const Getter<std::int32_t> get_layout(functions, "aoti_torch_get_layout");
inline const Getter<std::int32_t> get_device_type(functions, "aoti_torch_get_device_type");
inline const Getter<std::int32_t> get_device_index(functions, "aoti_torch_get_device_index");
inline const Getter<const void*> get_const_data_ptr(functions, "torch_get_const_data_ptr");
inline const Getter<void*> get_mutable_data_ptr(functions, "torch_get_mutable_data_ptr");

inline const Function<int(TensorHandle)> delete_tensor(functions,
                                                       "aoti_torch_delete_tensor_object");
inline const Getter<TensorHandle> new_handle(functions, "aoti_torch_new_tensor_handle");
inline const Getter<TensorHandle> clone(functions, "aoti_torch_clone");
inline const Function<int(TensorHandle to, TensorHandle from, std::int32_t non_blocking)> copy(
    functions, "aoti_torch_copy_");
/// Returns another tensor on the same storage, without autograd. `offset` is added to the storage
/// offset of the given tensor.
inline const Function<int(TensorHandle, std::int64_t dims, const std::int64_t* sizes,
                          const std::int64_t* strides, std::int64_t offset, TensorHandle*)>
    reinterpret(functions, "aoti_torch__reinterpret_tensor");
inline const Function<int(std::int64_t dims, const std::int64_t* sizes, const std::int64_t* strides,
                          std::int32_t dtype, std::int32_t device_type, std::int32_t device_index,
                          TensorHandle*)>
    empty_strided(functions, "aoti_torch_empty_strided");
inline const Function<
    int(void* data, std::int64_t dims, const std::int64_t* sizes, const std::int64_t* strides,
        std::int64_t storage_offset, std::int32_t dtype, std::int32_t device_type,
        std::int32_t device_index, TensorHandle*, std::int32_t layout, const std::uint8_t* metadata,
        std::int64_t metadata_size, void (*deleter)(void* data, void* context), void* context)>
    from_blob(functions, "torch_from_blob");

/// Calls an operator. `stack` has the arguments, then the results: a tensor is its handle, a list
/// is its ListHandle, and a bool is 0 or 1. Arguments are deleted. `version`: the version of torch
/// whose schemas and representations are assumed.
inline const Function<int(const char* name, const char* overload, std::uint64_t* stack,
                          std::uint64_t version)>
    call_dispatcher(functions, "torch_call_dispatcher");
inline constexpr std::uint64_t kVersion2_11 = (std::uint64_t{2} << 56) | (std::uint64_t{11} << 48);

struct OpaqueList;
using ListHandle = OpaqueList*;
inline const Function<int(std::size_t capacity, ListHandle*)> new_list(
    functions, "torch_new_list_reserve_size");
inline const Function<int(ListHandle, std::size_t*)> list_size(functions, "torch_list_size");
inline const Function<int(ListHandle, std::size_t, std::uint64_t*)> list_item(
    functions, "torch_list_get_item");
inline const Function<int(ListHandle, std::uint64_t)> push_back(functions, "torch_list_push_back");
/// Does not delete the tensors of the list.
inline const Function<int(ListHandle)> delete_list(functions, "torch_delete_list");

struct OpaqueLibrary;
using LibraryHandle = OpaqueLibrary*;
/// Receives the arguments, which it must delete, and stores the results.
using Kernel = void(std::uint64_t* stack, std::uint64_t arguments, std::uint64_t results);
/// The library of the operators of a namespace. Deleting it would remove the operators.
inline const Function<int(const char* ns, const char* file, std::uint32_t line, LibraryHandle*)>
    new_library(functions, "aoti_torch_library_init_def");
inline const Function<int(LibraryHandle, const char* schema)> define(functions,
                                                                     "aoti_torch_library_def");
/// The library of the kernels for a dispatch key.
inline const Function<int(const char* ns, const char* key, const char* file, std::uint32_t line,
                          LibraryHandle*)>
    new_kernels(functions, "aoti_torch_library_init_impl");
inline const Function<int(LibraryHandle, const char* name, Kernel*, std::uint64_t version)>
    implement(functions, "torch_library_impl");

inline const Function<bool()> grad_mode_is_enabled(functions, "aoti_torch_grad_mode_is_enabled");
inline const Function<void(bool)> grad_mode_set_enabled(functions,
                                                        "aoti_torch_grad_mode_set_enabled");

inline const Function<const char*()> exception_text(functions,
                                                    "torch_exception_get_what_without_backtrace",
                                                    os::Presence::optional);  // since 2.13
// Since 2.14. The objects are PyObjects, and the GIL must be held.
inline const Function<int(void* object, TensorHandle*)> tensor_from_pyobject(
    functions, "torch_tensor_from_pyobject", os::Presence::optional);
inline const Function<int(TensorHandle, void* type, void** object)> tensor_to_pyobject(
    functions, "torch_tensor_to_pyobject", os::Presence::optional);

inline const Function<int(std::int32_t device, void** stream)> get_current_cuda_stream(
    cuda_functions, "aoti_torch_get_current_cuda_stream");

struct Deleter {
  void operator()(TensorHandle handle) const { delete_tensor(handle); }
};
using OwnedTensor = std::unique_ptr<OpaqueTensor, Deleter>;

}  // namespace torch_ckpt::tensors::libtorch
