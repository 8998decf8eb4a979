#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/limited_loads.h"
#include "os/directory.h"
#include "planning/region.h"
#include "python/bindings.h"
#include "python/gil.h"
#include "python/options.h"
#include "python/reads.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

// Name, file, offset, length.
using ByteRow = std::tuple<std::string, std::size_t, py::object, py::object>;

/// Reads the bytes of each row.
py::list load_bytes(FileRows file_rows, const std::vector<ByteRow>& rows,
                    const os::Directory& directory, std::size_t threads,
                    std::uint64_t max_inflight_bytes, const py::object& direct_io, bool verify) {
  std::vector<engine::LoadFile> files = files_of(file_rows);
  std::vector<engine::ReadRequest> requests;
  std::vector<std::string> names;
  std::uint64_t held = 0;
  for (const auto& [name, file, offset, length] : rows) {
    check_file(file, files);
    engine::ReadRequest& request = requests.emplace_back();
    names.push_back(name);
    request.file = file;
    request.offset = number_of(offset, name, "offset");
    request.length = number_of(length, name, "length");
    request.region = planning::Region::of_bytes(0, request.length);
    held += request.length;
  }
  const py::none no_progress;
  engine::LimitedLoads loads = loads_of(directory, std::move(files), threads, max_inflight_bytes,
                                        direct_io, verify, no_progress, {});
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
  module.def("load_bytes", &load_bytes, py::arg("files"), py::arg("rows"), py::kw_only(),
             py::arg("directory"), py::arg("threads"), py::arg("max_inflight_bytes"),
             py::arg("direct_io"), py::arg("verify"));
}

}  // namespace torch_ckpt::python
