#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "engine/executor.h"
#include "format/crc32.h"
#include "format/metadata_pickle.h"
#include "python/bindings.h"
#include "python/buffer.h"
#include "python/errors.h"
#include "python/gil.h"
#include "staging/device_copy.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

std::uint32_t crc32(const py::buffer& data, std::uint32_t crc) {
  const Memory memory(data);
  const ReleasedGil released;
  return format::crc32(crc, memory.bytes());
}

/// Where the program ends. `roles` are by "module name".
std::size_t check_metadata_pickle(const py::buffer& data,
                                  const std::map<std::string, std::string>& roles) {
  format::Globals allowed;
  for (const auto& [name, word] : roles) {
    const auto role = format::role_named(word);
    if (!role) throw py::value_error(name + ": '" + word + "' is not a role");
    allowed.emplace(name, *role);
  }
  const Memory memory(data);
  return without_gil([&] { return format::check_metadata_pickle(memory.bytes(), allowed); });
}

}  // namespace
}  // namespace torch_ckpt::python

PYBIND11_MODULE(_C, module) {
  using namespace torch_ckpt;
  python::bind_fault(module);
  python::bind_directory(module);
  python::bind_results(module);
  python::bind_save(module);
  python::bind_load(module);
  python::bind_verify(module);
  module.def("check_metadata_pickle", &python::check_metadata_pickle, py::arg("data"),
             py::arg("roles"));
  module.def("crc32", &python::crc32, py::arg("data"), py::arg("crc") = 0);
  module.def(
      "join_executor",
      [] {
        const python::ReleasedGil released;
        engine::join_executor();
      },
      "Ends the engine's threads after the work they have; for interpreter exit.");
  module.attr("has_cuda") = staging::device_support() != nullptr;
}
