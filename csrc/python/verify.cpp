#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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

// File, offset, length, dtype name, sizes. The last two are None for objects.
using RecordRow = std::tuple<std::size_t, std::uint64_t, std::uint64_t, std::optional<std::string>,
                             std::optional<std::vector<std::uint64_t>>>;
// File, row or None, offset or None, damaged bytes, message, errno or 0.
using FindingRow = std::tuple<std::size_t, std::optional<std::size_t>, std::optional<std::uint64_t>,
                              std::uint64_t, std::string, int>;

FindingRow row_of(engine::Finding& finding) {
  std::optional<std::size_t> row;
  if (finding.record != engine::Finding::kWholeFile) row = finding.record;
  std::optional<std::uint64_t> offset;
  if (finding.error.offset != Error::kNoOffset) offset = finding.error.offset;
  // Omit file and offset from the message, because they have their own fields.
  finding.error.path = {};
  finding.error.offset = Error::kNoOffset;
  return {finding.file,           row, offset, finding.bytes, finding.error.message(),
          finding.error.sys_errno};
}

/// Returns the findings, and the rows with bytes that have no checksum.
std::pair<std::vector<FindingRow>, std::vector<std::size_t>> verify_records(
    FileRows file_rows, const std::vector<RecordRow>& rows, const os::Directory& directory,
    std::size_t threads, std::uint64_t max_inflight_bytes, const py::object& direct_io,
    const py::object& progress) {
  std::vector<engine::LoadFile> files = files_of(file_rows);
  std::vector<engine::NamedRecord> records;
  records.reserve(rows.size());
  for (const auto& [file, offset, length, dtype, sizes] : rows) {
    check_file(file, files);
    engine::NamedRecord& record = records.emplace_back();
    record.file = file;
    record.offset = offset;
    record.length = length;
    record.tensor = sizes.has_value();
    if (dtype) record.dtype = format::find_dtype(*dtype);
    if (sizes) record.sizes = *sizes;
  }
  engine::VerifyOptions options;
  options.threads = threads;
  options.max_scratch_bytes = max_inflight_bytes;
  options.direct_io = direct_io_option(direct_io);
  const auto session = without_gil([&] {
    auto started =
        engine::VerifySession::start(engine::Context::process(), unwrap(directory.duplicate()),
                                     std::move(files), std::move(records), options);
    if (started) wait_for(**started, progress);
    return started;
  });
  if (auto failure = session->failure()) throw Failure(*failure);
  std::vector<FindingRow> findings;
  for (engine::Finding& finding : session->findings()) findings.push_back(row_of(finding));
  return {std::move(findings), session->unverifiable()};
}

}  // namespace

void bind_verify(py::module_& module) {
  module.def("verify_records", &verify_records, py::arg("files"), py::arg("rows"), py::kw_only(),
             py::arg("directory"), py::arg("threads"), py::arg("max_inflight_bytes"),
             py::arg("direct_io"), py::arg("progress"));
}

}  // namespace torch_ckpt::python
