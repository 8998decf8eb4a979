#include <pybind11/pybind11.h>

#include <string>

#include "engine/reserve.h"
#include "engine/save_session.h"
#include "os/file.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/options.h"
#include "staging/chunk_pool.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using engine::Context;

Result<std::size_t> grow_reserve(std::size_t most_bytes, int device, const Background& background) {
  const engine::PoolSpec spec = background.is_none() ? engine::PoolSpec{} : threads_of(background);
  const ReleasedGil released;
  return engine::grow_reserve(Context::process(), most_bytes, spec, device);
}

void set_reserve(std::size_t bytes, std::size_t chunk_bytes) {
  if (chunk_bytes == 0 || chunk_bytes % os::kDirectAlignment != 0) {
    throw py::value_error("chunk_bytes must be a positive multiple of " +
                          std::to_string(os::kDirectAlignment));
  }
  Context::process().chunks.set_reserve(bytes, chunk_bytes);
}

}  // namespace

void bind_pool(py::module_& module) {
  module.attr("host_chunk_bytes") = engine::kHostChunkBytes;
  module.attr("device_chunk_bytes") = engine::kDeviceChunkBytes;
  module.def("set_reserve", &set_reserve, "bytes"_a, "chunk_bytes"_a,
             "Sets the target of the reserve, in chunks of ``chunk_bytes``; never lowers it.");
  module.def(
      "grow_reserve", &grow_reserve, "most_bytes"_a, "device"_a, "background"_a,
      "Allocates memory until the reserve has ``most_bytes`` or is complete. Returns its bytes.\n\n"
      "Several threads allocate: the threads of saves with this background, or the ordinary ones. "
      "For a CUDA device (-1: none) the memory is page-locked in arenas of 64 MiB. Raises OSError "
      "if memory runs out.");
  module.def(
      "end_reserve", [] { Context::process().chunks.end_reserve(); },
      "Lowers the target of the reserve to its present size.");
  module.def(
      "pool_bytes", [] { return Context::process().chunks.idle_bytes(); },
      "Bytes of host memory that the chunk pool keeps between saves.");
  module.def(
      "reserve_bytes", [] { return Context::process().chunks.reserve_bytes(); },
      "Target of the reserve in bytes.");
  module.def(
      "reserved_bytes", [] { return Context::process().chunks.reserved_bytes(); },
      "Bytes of the reserve that are allocated, including chunks that saves use.");
  module.def(
      "trim_pool", [](std::size_t bytes) { Context::process().chunks.trim(bytes); }, "bytes"_a = 0,
      NoGil(),
      "Frees idle memory of the pool, including the reserve, until ``bytes`` bytes are left.");
}

}  // namespace torch_ckpt::python
