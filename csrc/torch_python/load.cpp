#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/limited_loads.h"
#include "os/directory.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/options.h"
#include "python/reads.h"
#include "torch/load_match.h"
#include "torch/load_waves.h"
#include "torch/tensor_target.h"
#include "torch_python/bindings.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using Extents = std::vector<std::int64_t>;
// Name, file, offset, length, dtype, sizes, region offsets, region lengths, target.
using TensorRow = std::tuple<std::string, std::size_t, py::object, py::object, at::ScalarType,
                             Extents, Extents, Extents, at::Tensor>;

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

/// Fills the targets of a match. Returns the numbers of those that torch.load must read.
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

}  // namespace

void bind_load(py::module_& module) {
  module.def("load_tensors", &load_tensors, py::arg("files"), py::arg("rows"), py::kw_only(),
             py::arg("directory"), py::arg("threads"), py::arg("max_inflight_bytes"),
             py::arg("direct_io"), py::arg("verify"), py::arg("progress"), py::arg("ready"));
  module.def("load_matched", &load_matched, py::arg("match"), py::kw_only(), py::arg("directory"),
             py::arg("threads"), py::arg("max_inflight_bytes"), py::arg("direct_io"),
             py::arg("verify"), py::arg("progress"), py::arg("ready"));
}

}  // namespace torch_ckpt::python
