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
using namespace py::literals;

PYBIND11_MODULE(_core, module) {
  using namespace torch_ckpt;
  module.doc() =
      "The part of the engine that needs no torch; see csrc/python. It makes no decisions.\n\n"
      "Importing it takes milliseconds. ``torch_ckpt._C`` accepts and returns its classes.";
  python::bind_errors();
  python::bind_fault(module);
  python::bind_index(module);
  python::bind_directory(module);
  python::bind_results(module);
  python::bind_read(module);
  python::bind_plan(module);
  python::bind_model(module);
  python::bind_pool(module);
  python::bind_verify(module);
  python::bind_store(module);
  module.def(
      "crc32",
      [](std::span<const std::byte> data, std::uint32_t crc) { return format::crc32(crc, data); },
      "data"_a, "crc"_a = 0, python::NoGil(),
      "Returns the same as ``zlib.crc32``, at memory speed. ``data`` is a contiguous buffer.");
  module.def(
      "join_executor",
      [] {
        engine::Context& context = engine::Context::process();
        context.join();
        // Saves that ended meanwhile may have started to refill the chunk pool.
        context.join();
      },
      python::NoGil(),
      "Ends the engine's threads after their queued work. For the exit of the interpreter.");
  module.def("seconds_without_gil", &os::CallTime::seconds,
             "Processor time in seconds that this thread spent in engine calls without the GIL.");
}
