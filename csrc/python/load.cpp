#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/limited_loads.h"
#include "os/directory.h"
#include "planning/region.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/options.h"
#include "python/waiting.h"
#include "torch/load_match.h"
#include "torch/load_waves.h"
#include "torch/tensor_target.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using Extents = std::vector<std::int64_t>;
// Name, file, offset, length, dtype, sizes, region offsets, region lengths, target.
using TensorRow = std::tuple<std::string, std::size_t, py::object, py::object, at::ScalarType,
                             Extents, Extents, Extents, at::Tensor>;
// Name, file, offset, length.
using ByteRow = std::tuple<std::string, std::size_t, py::object, py::object>;

/// An offset or length of the metadata, which may be damaged or mean harm.
std::uint64_t number_of(const py::object& value, const std::string& name, const char* what) {
  const std::uint64_t number =
      PyLong_Check(value.ptr()) ? PyLong_AsUnsignedLongLong(value.ptr()) : std::uint64_t(-1);
  if (number != std::uint64_t(-1)) return number;
  PyErr_Clear();
  throw Failure(format_error(Errc::range_past_end, name + ": the metadata gives an impossible " +
                                                       what + ": " +
                                                       py::repr(value).cast<std::string>()));
}

engine::LimitedLoads loads_of(const os::Directory& directory, std::vector<engine::LoadFile> files,
                              std::size_t threads, std::uint64_t max_inflight_bytes,
                              const py::object& direct_io, bool verify, const py::object& progress,
                              const Events& ready) {
  engine::LoadOptions options;
  options.threads = threads;
  options.max_scratch_bytes = max_inflight_bytes;
  options.direct_io = direct_io_option(direct_io);
  options.verify = verify;
  options.ready = ready_events(ready);
  return unwrap(engine::LimitedLoads::make(
      engine::Context::process(), directory, std::move(files), options,
      [&progress](engine::LoadSession& session, std::uint64_t done_before) {
        wait_for(session, progress, done_before);
      }));
}

std::vector<std::size_t> load_tensors(FileRows file_rows, const std::vector<TensorRow>& rows,
                                      const os::Directory& directory, std::size_t threads,
                                      std::uint64_t max_inflight_bytes, const py::object& direct_io,
                                      bool verify, const py::object& progress,
                                      const Events& ready) {
  std::vector<engine::LoadFile> files = files_of(file_rows);
  std::vector<tensors::TensorTarget> targets;
  targets.reserve(rows.size());
  for (const auto& [name, file, offset, length, dtype, sizes, offsets, lengths, tensor] : rows) {
    check_file(file, files);
    targets.push_back(tensors::make_target(name, file, number_of(offset, name, "offset"),
                                           number_of(length, name, "length"), dtype, sizes, offsets,
                                           lengths, tensor));
  }
  engine::LimitedLoads loads = loads_of(directory, std::move(files), threads, max_inflight_bytes,
                                        direct_io, verify, progress, ready);
  return without_gil([&] { return tensors::LoadWaves(loads, targets).run(); });
}

/// Fills what a match has planned. The numbers of the targets that torch.load must read.
std::vector<std::size_t> load_matched(const tensors::LoadMatch& match,
                                      const os::Directory& directory, std::size_t threads,
                                      std::uint64_t max_inflight_bytes, const py::object& direct_io,
                                      bool verify, const py::object& progress,
                                      const Events& ready) {
  const index::CheckpointIndex& index = match.index();
  std::vector<engine::LoadFile> files;
  for (const std::uint32_t file : match.files()) {
    files.push_back({std::string(index.text(index.files()[file])),
                     std::string(index.text(index.tables()[file]))});
  }
  engine::LimitedLoads loads = loads_of(directory, std::move(files), threads, max_inflight_bytes,
                                        direct_io, verify, progress, ready);
  return without_gil([&] { return tensors::LoadWaves(loads, match.targets()).run(); });
}

/// The bytes of each row.
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
  without_gil([&] { return loads.check_room(requests, names); });
  py::list values;
  for (engine::ReadRequest& request : requests) {
    // bytes, which io.BytesIO shares with whoever reads them.
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

void bind_load(py::module_& module) {
  module.attr("load_chunk_bytes") = engine::LoadOptions{}.chunk_bytes;
  module.attr("least_scratch_bytes") = engine::LimitedLoads::kLeastScratchBytes;
  module.def("load_tensors", &load_tensors, py::arg("files"), py::arg("rows"), py::kw_only(),
             py::arg("directory"), py::arg("threads"), py::arg("max_inflight_bytes"),
             py::arg("direct_io"), py::arg("verify"), py::arg("progress"), py::arg("ready"));
  module.def("load_matched", &load_matched, py::arg("match"), py::kw_only(), py::arg("directory"),
             py::arg("threads"), py::arg("max_inflight_bytes"), py::arg("direct_io"),
             py::arg("verify"), py::arg("progress"), py::arg("ready"));
  module.def("load_bytes", &load_bytes, py::arg("files"), py::arg("rows"), py::kw_only(),
             py::arg("directory"), py::arg("threads"), py::arg("max_inflight_bytes"),
             py::arg("direct_io"), py::arg("verify"));
}

}  // namespace torch_ckpt::python
