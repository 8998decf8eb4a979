#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <span>

#include "engine/context.h"
#include "format/crc32.h"
#include "os/call_time.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/memory.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
  using namespace torch_ckpt;
  python::bind_errors();
  python::bind_fault(module);
  python::bind_directory(module);
  python::bind_results(module);
  python::bind_index(module);
  python::bind_read(module);
  python::bind_plan(module);
  python::bind_model(module);
  python::bind_pool(module);
  python::bind_verify(module);
  python::bind_store(module);
  module.def(
      "crc32",
      [](std::span<const std::byte> data, std::uint32_t crc) { return format::crc32(crc, data); },
      py::arg("data"), py::arg("crc") = 0, python::NoGil());
  module.def(
      "join_executor",
      [] {
        engine::Context& context = engine::Context::process();
        context.join();
        // Saves that ended meanwhile may have started to refill the chunk pool.
        context.join();
      },
      python::NoGil());
  module.def("seconds_without_gil", &os::CallTime::seconds);
}
