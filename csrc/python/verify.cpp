#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/verify_session.h"
#include "format/dtype.h"
#include "os/directory.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/options.h"
#include "python/waiting.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

/// Row: (file, offset, length, dtype, sizes); dtype and sizes are None for bytes.
engine::NamedRecord record_of(const py::tuple& row) {
  engine::NamedRecord record;
  record.file = row[0].cast<std::size_t>();
  record.offset = row[1].cast<std::uint64_t>();
  record.length = row[2].cast<std::uint64_t>();
  if (row[4].is_none()) return record;
  record.tensor = true;
  record.sizes = row[4].cast<std::vector<std::uint64_t>>();
  const py::handle dtype = row[3];
  if (!THPDtype_Check(dtype.ptr())) throw py::type_error("not a torch.dtype");
  record.dtype = format::find_dtype(reinterpret_cast<THPDtype*>(dtype.ptr())->name);
  return record;
}

/// (file, row or None, offset or None, damaged bytes, what, errno or 0) of each finding; rows
/// without checksums.
py::tuple verify_records(const std::vector<std::pair<std::string, std::string>>& files,
                         const py::list& rows, const os::Directory& directory, std::size_t threads,
                         std::uint64_t max_inflight_bytes, const py::object& direct_io,
                         const py::object& progress) {
  std::vector<engine::LoadFile> named;
  for (const auto& [name, table] : files) named.push_back({name, table});
  std::vector<engine::NamedRecord> records;
  records.reserve(rows.size());
  for (const py::handle row : rows) {
    records.push_back(record_of(py::reinterpret_borrow<py::tuple>(row)));
    if (records.back().file >= named.size()) throw py::index_error("no file of that number");
  }
  engine::VerifyOptions options;
  options.threads = threads;
  options.max_scratch_bytes = max_inflight_bytes;
  options.direct_io = direct_io_option(direct_io);

  const auto session = without_gil([&]() -> Result<std::shared_ptr<engine::VerifySession>> {
    auto own = directory.duplicate();
    if (!own) return own.error();
    return engine::VerifySession::start(std::move(*own), std::move(named), std::move(records),
                                        options);
  });
  wait_for(*session, progress);
  pass_on_warnings();
  if (auto failure = session->failure()) raise(*failure);

  py::list findings;
  for (engine::Finding& finding : session->findings()) {
    std::optional<std::size_t> row;
    if (finding.record != engine::Finding::kWholeFile) row = finding.record;
    std::optional<std::uint64_t> offset;
    if (finding.error.offset != Error::kNoOffset) offset = finding.error.offset;
    // What is left of the message: file and offset are told beside it.
    finding.error.path.clear();
    finding.error.offset = Error::kNoOffset;
    findings.append(py::make_tuple(finding.file, row, offset, finding.bytes,
                                   finding.error.message(), finding.error.sys_errno));
  }
  return py::make_tuple(findings, session->unverifiable());
}

}  // namespace

void bind_verify(py::module_& module) {
  module.def("verify_records", &verify_records, py::arg("files"), py::arg("rows"), py::kw_only(),
             py::arg("directory"), py::arg("threads"), py::arg("max_inflight_bytes"),
             py::arg("direct_io"), py::arg("progress"));
}

}  // namespace torch_ckpt::python
