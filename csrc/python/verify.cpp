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
#include "python/text.h"
#include "python/waiting.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using engine::CheckpointFault;
using engine::CheckpointVerification;

void add(CheckpointVerification& verification, const index::CheckpointIndex& index) {
  Interrupts interrupts;
  interrupts.run([&] { return verification.add(index, interrupts.check()); });
}

/// options: a torch_ckpt.ReadOptions.
void run(CheckpointVerification& verification, const py::object& options,
         const py::object& progress) {
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
  module.def("is_file_damage", &engine::is_file_damage, py::arg("error_number"));
  py::enum_<CheckpointFault::Kind>(module, "FaultKind")
      .value("DAMAGED", CheckpointFault::Kind::damaged)
      .value("UNREAD", CheckpointFault::Kind::unread)
      .value("INCOMPLETE", CheckpointFault::Kind::incomplete);
  py::class_<CheckpointFault>(module, "CheckpointFault")
      .def_readonly("kind", &CheckpointFault::kind)
      .def_property_readonly("name", [](const CheckpointFault& self) { return text_of(self.name); })
      .def_property_readonly("file", [](const CheckpointFault& self) { return text_of(self.file); })
      .def_readonly("offset", &CheckpointFault::offset)
      .def_readonly("bytes", &CheckpointFault::bytes)
      .def_property_readonly("what",
                             [](const CheckpointFault& self) { return os_text(self.what); });
  py::class_<CheckpointVerification>(module, "CheckpointVerification")
      .def(py::init([](const py::object& directory) {
             return std::make_unique<CheckpointVerification>(folder_of(directory));
           }),
           py::arg("directory"))
      .def("add", &add, py::arg("index"))
      .def("run", &run, py::arg("options"), py::arg("progress"))
      .def("names_file", [](const CheckpointVerification& self,
                            const py::str& name) { return self.names_file(bytes_of(name)); })
      .def_property_readonly("records", &CheckpointVerification::records)
      .def_property_readonly("bytes", &CheckpointVerification::bytes)
      .def_property_readonly("faults", &CheckpointVerification::faults)
      .def_property_readonly("missing",
                             [](const CheckpointVerification& self) {
                               return list_of(self.missing(), [](const auto& file) {
                                 return py::make_tuple(text_of(file.first),
                                                       list_of(file.second, text_of));
                               });
                             })
      .def_property_readonly("unverifiable", [](const CheckpointVerification& self) {
        return list_of(self.unverifiable(), text_of);
      });
}

}  // namespace torch_ckpt::python
