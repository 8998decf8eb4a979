#pragma once

#include <array>
#include <cstddef>

#include "os/function_table.h"

// Functions of the CUDA runtime, as cuda_runtime_api.h declares them. torch loads the runtime, so
// this library needs no CUDA toolkit to be built and works with each major version of CUDA that has
// the required functions.
namespace torch_ckpt::staging::cuda {

inline os::FunctionTable functions;

template <class Signature>
using Function = os::Function<Signature>;

using Code = int;  // cudaError_t
inline constexpr Code kSuccess = 0;
inline constexpr Code kNotReady = 600;
inline const Function<const char*(Code)> get_error_string(functions, "cudaGetErrorString");
inline const Function<Code()> get_last_error(functions, "cudaGetLastError");
inline const Function<Code()> peek_at_last_error(functions, "cudaPeekAtLastError");

inline const Function<Code(int* device)> get_device(functions, "cudaGetDevice");
inline const Function<Code(int device)> set_device(functions, "cudaSetDevice");

inline constexpr unsigned long long kEnableDefault = 0;
inline constexpr int kEntryPointFound = 0;
/// Since CUDA 12.5.
inline const Function<Code(const char* symbol, void** function, unsigned int version,
                           unsigned long long flags, int* found)>
    get_driver_entry_point_by_version(functions, "cudaGetDriverEntryPointByVersion",
                                      os::Presence::optional);
/// Deprecated in CUDA 13. CUDA 11 has it without the last parameter.
inline const Function<Code(const char* symbol, void** function, unsigned long long flags,
                           int* found)>
    get_driver_entry_point(functions, "cudaGetDriverEntryPoint", os::Presence::optional);

struct OpaqueStream;
using Stream = OpaqueStream*;
inline constexpr unsigned int kNonBlocking = 1;
inline const Function<Code(Stream*, unsigned int flags)> stream_create(functions,
                                                                       "cudaStreamCreateWithFlags");
inline const Function<Code(Stream)> stream_destroy(functions, "cudaStreamDestroy");
inline const Function<Code(Stream)> stream_synchronize(functions, "cudaStreamSynchronize");

struct OpaqueEvent;
using Event = OpaqueEvent*;
inline constexpr unsigned int kBlockingSync = 1;
inline constexpr unsigned int kDisableTiming = 2;
inline const Function<Code(Event*, unsigned int flags)> event_create(functions,
                                                                     "cudaEventCreateWithFlags");
inline const Function<Code(Event)> event_destroy(functions, "cudaEventDestroy");
inline const Function<Code(Event, Stream)> event_record(functions, "cudaEventRecord");
inline const Function<Code(Event)> event_query(functions, "cudaEventQuery");
inline const Function<Code(Event)> event_synchronize(functions, "cudaEventSynchronize");
inline const Function<Code(Stream, Event, unsigned int flags)> stream_wait_event(
    functions, "cudaStreamWaitEvent");

inline constexpr int kNotCapturing = 0;
inline constexpr int kCaptureRelaxed = 2;
inline const Function<Code(Stream, int* status)> stream_is_capturing(functions,
                                                                     "cudaStreamIsCapturing");
inline const Function<Code(int* mode)> exchange_capture_mode(functions,
                                                             "cudaThreadExchangeStreamCaptureMode");

inline constexpr unsigned int kPortable = 1;
inline const Function<Code(void*, std::size_t bytes, unsigned int flags)> host_register(
    functions, "cudaHostRegister");
inline const Function<Code(void*)> host_unregister(functions, "cudaHostUnregister");

inline constexpr int kHostToDevice = 1;
inline constexpr int kDeviceToHost = 2;
inline const Function<Code(void* to, const void* from, std::size_t bytes, int kind, Stream)>
    memcpy_async(functions, "cudaMemcpyAsync");

struct Location {
  int type = 0;
  int id = 0;
};
inline constexpr int kDeviceLocation = 1;
inline constexpr int kHostLocation = 2;
struct CopyAttributes {
  int source_access_order = 0;
  Location source;
  Location target;
  unsigned int flags = 0;
};
inline constexpr int kStreamOrder = 1;
inline constexpr unsigned int kPreferOverlapWithCompute = 1;
/// Has another signature in CUDA 12, so it may be called only in CUDA 13.
inline const Function<Code(void* const* to, const void* const* from, const std::size_t* bytes,
                           std::size_t count, CopyAttributes*, std::size_t* first_of_attributes,
                           std::size_t attributes, Stream)>
    memcpy_batch_async(functions, "cudaMemcpyBatchAsync", os::Presence::optional);
inline constexpr int kMajorWithBatches = 13;

}  // namespace torch_ckpt::staging::cuda
