#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/fetch_plan.h"
#include "planning/region.h"
#include "python/bindings.h"
#include "python/gil.h"
#include "python/list.h"
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

/// Plans to fetch the complete records of objects.
std::unique_ptr<engine::FetchPlan> fetch_plan(const std::vector<const ObjectRead*>& reads) {
  index::NameTable names;
  std::vector<engine::ReadRequest> requests;
  for (const ObjectRead* read : reads) {
    const std::size_t file = names.add(read->file).first;
    requests.push_back(
        engine::fetch_request(file, read->offset, read->length, nullptr, {}, {}, {}));
  }
  return std::make_unique<engine::FetchPlan>(files_with_tables(names, py::dict()),
                                             std::move(requests), false);
}

/// Returns file name, begin and end of each range.
py::list ranges_of(const engine::FetchPlan& plan, const std::vector<engine::FileRange>& ranges) {
  return list_of(ranges, [&](const engine::FileRange& range) {
    return py::make_tuple(text_of(plan.file_name(range.file)), range.bytes.begin, range.bytes.end);
  });
}

/// Returns the numbers of the reads and the ranges of each wave.
py::list waves_of(const engine::FetchPlan& plan, const os::Directory& copies,
                  std::uint64_t max_bytes) {
  const auto waves = without_gil([&] { return plan.waves(copies, max_bytes); });
  return list_of(waves, [&](const engine::FetchPlan::Wave& wave) {
    return py::make_tuple(wave.requests, ranges_of(plan, wave.ranges));
  });
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
  py::class_<engine::FetchPlan>(module, "FetchPlan")
      .def(py::init(&fetch_plan), py::arg("reads"))
      .def("ends", [](const engine::FetchPlan& plan) { return ranges_of(plan, plan.ends()); })
      .def("waves", &waves_of, py::arg("copies"), py::arg("max_bytes"));
}

}  // namespace torch_ckpt::python
