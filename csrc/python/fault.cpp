#include "python/fault.h"

#include <pybind11/pybind11.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "os/fault.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/types.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using os::ScopedFaultHook;

using Hook = py::typing::Callable<int(py::str, py::str)>;

/// A Python hook that stays installed while a `with` block runs.
class FaultHook {
 public:
  explicit FaultHook(Hook hook) : hook_(std::move(hook)) {}

  FaultHook& enter() {
    installed_.emplace([this](std::string_view operation, std::string_view path) {
      const py::gil_scoped_acquire gil;
      return hook_(py::str(operation), os_text(std::string(path))).template cast<int>();
    });
    return *this;
  }

  void exit(const py::Args<py::object>&) {
    // The destructor waits for running hooks, which need the GIL.
    const ReleasedGil released;
    installed_.reset();
  }

 private:
  Hook hook_;
  std::optional<ScopedFaultHook> installed_;
};

}  // namespace

void bind_fault(py::module_& module) {
  py::class_<FaultHook>(
      module, "FaultHook",
      "Calls ``hook`` at each fault point (csrc/os/fault.h) while a ``with`` block runs.\n\n"
      "``hook(operation, path)`` returns 0, or an errno to make the call fail. It may be called "
      "from several threads at once, and must not raise. A process can have one hook at a time.")
      .def(py::init<Hook>(), "hook"_a)
      .def("__enter__", &FaultHook::enter, py::return_value_policy::reference)
      .def("__exit__", &FaultHook::exit);
  module.def(
      "fault_point",
      [](const std::string& operation, const std::filesystem::path& path) {
        fault_point(operation, path.native());
      },
      "operation"_a, "path"_a = "",
      "Reaches a fault point of Python code. Raises OSError if the hook returns an errno.\n\n"
      "``operation`` names the next call, or describes the moment.");
}

}  // namespace torch_ckpt::python
