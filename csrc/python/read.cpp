#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planning/region.h"
#include "python/bindings.h"
#include "python/folder.h"
#include "python/gil.h"
#include "python/list.h"
#include "python/reads.h"
#include "python/waiting.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

/// Returns the records of objects, and adds the names of their files to `files`.
std::vector<planning::StoredRecord> records_of(const std::vector<const ObjectRead*>& reads,
                                               index::NameTable& files) {
  std::vector<planning::StoredRecord> records;
  for (const ObjectRead* read : reads) {
    records.push_back({read->name, files.add(read->file).first, read->offset, read->length});
  }
  return records;
}

py::typing::List<py::bytes> load_bytes(const std::vector<const ObjectRead*>& reads,
                                       engine::Folder directory, const Tables& tables,
                                       const ReadOptions& options) {
  index::NameTable names;
  const std::vector<planning::StoredRecord> records = records_of(reads, names);
  const std::vector<engine::LoadFile> files = files_with_tables(names, tables);
  engine::LoadOptions load = load_options(options);
  without_gil([&] { return engine::check_records_fit(directory, files, records, load); });
  std::vector<engine::RegionRead> complete;
  py::typing::List<py::bytes> values;
  for (const planning::StoredRecord& record : records) {
    // Use bytes objects, which io.BytesIO shares without a copy.
    const auto value = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(record.length)));
    if (!value) throw py::error_already_set();
    engine::RegionRead& read = complete.emplace_back();
    read.record = &record;
    read.region = planning::Region::of_bytes(0, record.length);
    read.target.address = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(value.ptr()));
    load.target_bytes += record.length;
    values.append(value);
  }
  const Progress no_progress = py::none();
  without_gil([&]() -> Result<> {
    auto session = engine::LoadSession::start(engine::Context::process(), std::move(directory),
                                              files, std::move(complete), load);
    if (!session) return session.error();
    wait_for(**session, no_progress);
    if (auto failure = (*session)->failure()) return std::move(*failure);
    return {};
  });
  return values;
}

}  // namespace

void bind_read(py::module_& module) {
  // Scratch memory in bytes that each thread of a load uses, if the budget permits.
  module.attr("load_chunk_bytes") = engine::LoadOptions{}.chunk_bytes;
  // Scratch memory in bytes that every load needs.
  module.attr("least_scratch_bytes") = engine::LoadOptions::kMinScratchBytes;
  py::class_<ObjectRead>(module, "ObjectRead",
                         "An object to read: its name, and the location of its record.\n\n"
                         "``target`` is for the caller: where the object belongs. Raises Corrupt "
                         "if the offset or the length is not a number of bytes.")
      .def(py::init([](const Name& name, const Name& file, const Number& offset,
                       const Number& length, Typed<"typing.Any"> target) {
             return ObjectRead{name, file, number_of(offset, name, "offset"),
                               number_of(length, name, "length"), std::move(target)};
           }),
           "name"_a, "file"_a, "offset"_a, "length"_a, "target"_a = py::none())
      .def_property_readonly("name", text_getter(&ObjectRead::name))
      .def_property_readonly("file", text_getter(&ObjectRead::file))
      .def_readonly("offset", &ObjectRead::offset)
      .def_readonly("length", &ObjectRead::length)
      .def_readonly("target", &ObjectRead::target);
  module.def("load_bytes", &load_bytes, "reads"_a, py::kw_only(), "directory"_a, "tables"_a,
             "options"_a,
             "Reads the records of objects. ``tables`` has the checksum table of each file.");
}

}  // namespace torch_ckpt::python
