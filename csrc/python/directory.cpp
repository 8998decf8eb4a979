#include "os/directory.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using os::Directory;

// As an argument it is what os.fsencode makes of it.
using Path = std::filesystem::path;

constexpr std::chrono::milliseconds kLookAgain{5};

bool share(Directory& directory, double patience) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(patience);
  while (!unwrap(directory.try_share())) {
    if (Clock::now() >= until) return false;
    {
      const ReleasedGil released;
      std::this_thread::sleep_for(kLookAgain);
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  return true;
}

py::list names(const Directory& directory) {
  py::list found;
  for (const std::string& name : without_gil([&] { return directory.names(); })) {
    found.append(os_text(name));
  }
  return found;
}

py::tuple identity(const Directory& directory) {
  const os::FileIdentity found = without_gil([&] { return directory.identity(); });
  return py::make_tuple(found.device, found.number, found.born_s, found.born_ns);
}

std::uint64_t length_of(const Directory& directory, const Path& name) {
  return without_gil([&]() -> Result<std::uint64_t> {
    auto file = directory.open_for_read(name.native());
    if (!file) return file.error();
    return file->size();
  });
}

// To be the opener of io.open: no bytecode runs between here and the file that owns the descriptor,
// and so no signal handler.
int open_for_read(const Directory& directory, const Path& name, int) {
  return without_gil([&] { return directory.open_for_read(name.native()); }).release();
}

}  // namespace

void bind_directory(py::module_& module) {
  py::class_<Directory>(module, "Directory")
      .def(py::init([](const Path& path) {
             return std::make_unique<Directory>(
                 without_gil([&] { return Directory::open(path.native()); }));
           }),
           py::arg("path"))
      .def_property_readonly("path", [](const Directory& self) { return os_text(self.path()); })
      .def_property_readonly("fd", &Directory::fd)
      .def("reopen",
           [](const Directory& self) { return without_gil([&] { return self.reopen(); }); })
      .def("share", &share, py::arg("patience") = 10.0)
      .def("try_lock_exclusive", [](Directory& self) { return unwrap(self.try_lock_exclusive()); })
      .def("identity", &identity)
      .def("is_at_path",
           [](const Directory& self) { return without_gil([&] { return self.is_at_path(); }); })
      .def("names", &names)
      .def("length_of", &length_of, py::arg("name"))
      .def("open_for_read", &open_for_read, py::arg("name"), py::arg("flags") = 0)
      .def(
          "remove",
          [](const Directory& self, const Path& name) {
            without_gil([&] { return self.remove(name.native()); });
          },
          py::arg("name"))
      .def(
          "rename",
          [](const Directory& self, const Path& source, const Path& target) {
            without_gil([&] { return self.rename(source.native(), target.native()); });
          },
          py::arg("source"), py::arg("target"))
      .def("sync", [](const Directory& self) { without_gil([&] { return self.sync(); }); })
      .def("close", &Directory::close);
  module.def("names_file_beneath", &os::names_file_beneath, py::arg("name"));
  module.def(
      "make_directories",
      [](const Path& path) { without_gil([&] { return os::make_directories(path.native()); }); },
      py::arg("path"));
  module.def(
      "sync_directory",
      [](const Path& path) { without_gil([&] { return os::sync_directory(path.native()); }); },
      py::arg("path"));
}

}  // namespace torch_ckpt::python
