#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>

#include "engine/checkpoint_verification.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/folder.h"
#include "python/gil.h"
#include "python/interrupts.h"
#include "python/list.h"
#include "python/options.h"
#include "python/types.h"
#include "python/waiting.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using engine::CheckpointFault;
using engine::CheckpointVerification;

void add(CheckpointVerification& verification, const index::CheckpointIndex& index) {
  Interrupts interrupts;
  interrupts.run([&] { return verification.add(index, interrupts.check()); });
}

void run(CheckpointVerification& verification, const ReadOptions& options,
         const Progress& progress) {
  const auto verify = read_options<engine::VerifyOptions>(options);
  without_gil([&]() -> Result<> {
    auto session = verification.start(engine::Context::process(), verify);
    if (!session) return session.error();
    wait_for(**session, progress);
    return verification.finish(**session);
  });
}

}  // namespace

void bind_verify(py::module_& module) {
  module.def("is_file_damage", &engine::is_file_damage, "error_number"_a,
             "True if an errno indicates a damaged file rather than a failing machine.");
  py::enum_<CheckpointFault::Kind>(module, "FaultKind", "Kinds of faults of a checkpoint.")
      .value("DAMAGED", CheckpointFault::Kind::damaged)
      .value("UNREAD", CheckpointFault::Kind::unread)
      .value("INCOMPLETE", CheckpointFault::Kind::incomplete);
  py::class_<CheckpointFault>(
      module, "CheckpointFault",
      "A fault that a verification has found; see csrc/engine/checkpoint_verification.h.")
      .def_readonly("kind", &CheckpointFault::kind)
      .def_property_readonly("name", text_getter(&CheckpointFault::name),
                             "The tensor or object; empty: the file itself.")
      .def_property_readonly("file", text_getter(&CheckpointFault::file))
      .def_readonly("offset", &CheckpointFault::offset)
      .def_readonly("bytes", &CheckpointFault::bytes)
      .def_property_readonly("what",
                             [](const CheckpointFault& self) { return os_text(self.what); });
  py::class_<CheckpointVerification>(
      module, "CheckpointVerification",
      "Verifies a checkpoint: first ``add`` for each metadata file, then ``run``.")
      .def(py::init<engine::Folder>(), "directory"_a)
      .def("add", &add, "index"_a, "Checks one metadata file and collects its records.")
      .def("run", &run, "options"_a, "progress"_a,
           "Reads and checks the records. Raises ValueError and OSError.")
      .def(
          "names_file",
          [](const CheckpointVerification& self, const Name& name) {
            return self.names_file(name);
          },
          "name"_a, "True if the metadata names this file.")
      .def_property_readonly("records", &CheckpointVerification::records)
      .def_property_readonly("bytes", &CheckpointVerification::bytes)
      .def_property_readonly("faults", &CheckpointVerification::faults)
      .def_property_readonly(
          "missing",
          [](const CheckpointVerification& self) {
            return list_of(self.missing(), [](const auto& file) {
              return py::make_tuple(text_of(file.first), list_of(file.second, text_of));
            });
          },
          "Each file that does not exist, and the names stored in it.")
      .def_property_readonly("unverifiable", [](const CheckpointVerification& self) {
        return list_of(self.unverifiable(), text_of);
      });
}

}  // namespace torch_ckpt::python
