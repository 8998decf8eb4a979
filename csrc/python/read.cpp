#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "planning/region.h"
#include "python/bindings.h"
#include "python/gil.h"
#include "python/reads.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

/// Returns the bytes of each object.
py::list load_bytes(const std::vector<const ObjectRead*>& reads, const os::Directory& directory,
                    const py::object& tables, const py::object& options) {
  index::NameTable file_names;
  std::vector<engine::ReadRequest> requests;
  std::vector<std::string> names;
  std::uint64_t held = 0;
  for (const ObjectRead* read : reads) {
    names.push_back(read->name);
    engine::ReadRequest& request = requests.emplace_back();
    request.file = file_names.add(read->file).first;
    request.offset = read->offset;
    request.length = read->length;
    request.region = planning::Region::of_bytes(0, request.length);
    held += request.length;
  }
  const py::none no_progress;
  engine::LimitedLoads loads =
      loads_of(directory, files_with_tables(file_names, tables), options, no_progress, {});
  without_gil([&] { return loads.check_records_fit(requests, names); });
  py::list values;
  for (engine::ReadRequest& request : requests) {
    // Use bytes objects, which io.BytesIO shares without a copy.
    const auto value = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(request.length)));
    if (!value) throw py::error_already_set();
    request.target.address = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(value.ptr()));
    values.append(value);
  }
  without_gil([&] { return loads.run(std::move(requests), names, held, 0); });
  return values;
}

}  // namespace

void bind_read(py::module_& module) {
  module.attr("load_chunk_bytes") = engine::LoadOptions{}.chunk_bytes;
  module.attr("least_scratch_bytes") = engine::LimitedLoads::kMinScratchBytes;
  py::class_<ObjectRead>(module, "ObjectRead")
      .def(py::init([](const py::str& name, const py::str& file, const py::object& offset,
                       const py::object& length, py::object target) {
             const std::string text = bytes_of(name);
             return ObjectRead{text, bytes_of(file), number_of(offset, text, "offset"),
                               number_of(length, text, "length"), std::move(target)};
           }),
           py::arg("name"), py::arg("file"), py::arg("offset"), py::arg("length"),
           py::arg("target") = py::none())
      .def_property_readonly("name", [](const ObjectRead& read) { return text_of(read.name); })
      .def_property_readonly("file", [](const ObjectRead& read) { return text_of(read.file); })
      .def_readonly("offset", &ObjectRead::offset)
      .def_readonly("length", &ObjectRead::length)
      .def_readonly("target", &ObjectRead::target);
  module.def("load_bytes", &load_bytes, py::arg("reads"), py::kw_only(), py::arg("directory"),
             py::arg("tables"), py::arg("options"));
}

}  // namespace torch_ckpt::python
