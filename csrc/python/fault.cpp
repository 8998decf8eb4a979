#include "python/fault.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "os/fault.h"
#include "python/bindings.h"
#include "python/errors.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using os::ScopedFaultHook;

/// A Python hook that stays installed while a `with` block runs.
class FaultHook {
 public:
  explicit FaultHook(py::function hook) : hook_(std::move(hook)) {}

  FaultHook& enter() {
    installed_.emplace([this](std::string_view operation, std::string_view path) {
      const py::gil_scoped_acquire gil;
      return hook_(py::str(operation), os_text(std::string(path))).template cast<int>();
    });
    return *this;
  }

  void exit(const py::args&) {
    // The destructor waits for running hooks, which need the GIL.
    const ReleasedGil released;
    installed_.reset();
  }

 private:
  py::function hook_;
  std::optional<ScopedFaultHook> installed_;
};

}  // namespace

void bind_fault(py::module_& module) {
  py::class_<FaultHook>(module, "FaultHook")
      .def(py::init<py::function>(), py::arg("hook"))
      .def("__enter__", &FaultHook::enter, py::return_value_policy::reference)
      .def("__exit__", &FaultHook::exit);
  module.def(
      "fault_point",
      [](const std::string& operation, const std::filesystem::path& path) {
        fault_point(operation, path.native());
      },
      py::arg("operation"), py::arg("path") = "");
}

}  // namespace torch_ckpt::python
