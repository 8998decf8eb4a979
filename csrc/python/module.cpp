#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <span>
#include <string>

#include "engine/context.h"
#include "format/crc32.h"
#include "format/metadata_pickle.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/memory.h"
#include "staging/device_copy.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

/// Where the program ends. `roles` are by "module name".
Result<std::size_t> check_metadata_pickle(std::span<const std::byte> data,
                                          const std::map<std::string, std::string>& roles) {
  format::Globals allowed;
  for (const auto& [name, word] : roles) {
    const auto role = format::role_named(word);
    if (!role) throw py::value_error(name + ": '" + word + "' is not a role");
    allowed.emplace(name, *role);
  }
  const ReleasedGil released;
  return format::check_metadata_pickle(data, allowed);
}

}  // namespace
}  // namespace torch_ckpt::python

PYBIND11_MODULE(_C, module) {
  using namespace torch_ckpt;
  python::bind_errors();
  python::bind_fault(module);
  python::bind_directory(module);
  python::bind_results(module);
  python::bind_save(module);
  python::bind_load(module);
  python::bind_verify(module);
  module.def("check_metadata_pickle", &python::check_metadata_pickle, py::arg("data"),
             py::arg("roles"));
  module.def(
      "crc32",
      [](std::span<const std::byte> data, std::uint32_t crc) { return format::crc32(crc, data); },
      py::arg("data"), py::arg("crc") = 0, python::NoGil());
  module.def(
      "join_executor", [] { engine::Context::process().executor.join(); }, python::NoGil());
  module.attr("has_cuda") = staging::device_support() != nullptr;
}
