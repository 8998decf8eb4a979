#include "os/directory.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "directory/file_names.h"
#include "directory/lease.h"
#include "directory/publish.h"
#include "directory/root_lock.h"
#include "directory/step.h"
#include "engine/new_file.h"
#include "file_name.h"
#include "index/encoded_metadata.h"
#include "os/process.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/interrupts.h"
#include "python/list.h"
#include "python/memory.h"
#include "python/options.h"
#include "python/publishing.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using directory::LeaseBytes;
using os::Directory;

// pybind11 converts arguments of this type like os.fsencode.
using Path = std::filesystem::path;

std::vector<std::string> native(const std::vector<Path>& paths) {
  std::vector<std::string> names;
  names.reserve(paths.size());
  for (const Path& path : paths) names.push_back(path.native());
  return names;
}

py::list texts(const std::vector<std::string>& names) {
  return list_of(names, [](const std::string& name) { return os_text(name); });
}

bool share(Directory& directory, double patience) {
  Interrupts interrupts;
  return interrupts.run([&] { return directory::share(directory, patience, interrupts.check()); });
}

py::tuple identity(const Directory& directory) {
  const os::FileIdentity found = without_gil([&] { return directory.identity(); });
  return py::make_tuple(found.device, found.number, found.born_s, found.born_ns);
}

Result<std::uint64_t> length_of(const Directory& directory, const Path& name) {
  auto file = directory.open_for_read(name.native());
  if (!file) return file.error();
  return file->size();
}

// An `opener` for io.open. No bytecode runs before the file object owns the descriptor, so no
// signal handler can leak it.
Result<int> open_for_read(const Directory& directory, const Path& name, int) {
  auto file = directory.open_for_read(name.native());
  if (!file) return file.error();
  return std::move(*file).release();
}

directory::DirectoryLease take_lease(const Directory& opened, std::optional<int> rank,
                                     double patience) {
  Interrupts interrupts;
  return interrupts.run(
      [&] { return directory::DirectoryLease::take(opened, rank, patience, interrupts.check()); });
}

std::string_view chars_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void commit(directory::DirectoryLease& lease, const index::EncodedMetadata& metadata,
            const std::vector<Path>& files, bool sync, bool replace) {
  const auto names = native(files);
  directory::Warnings warnings;
  const auto outcome = without_gil([&] {
    return lease.commit(metadata.pieces(), {names.begin(), names.end()},
                        {.sync = sync, .replace = replace}, directory::named_files, warnings);
  });
  warn(warnings);
  if (outcome.state != directory::PublishState::published) raise(outcome);
}

std::optional<py::list> remove_leftovers(Directory& opened) {
  const auto removed =
      without_gil([&] { return directory::remove_leftovers(opened, directory::named_files); });
  return removed ? std::optional(texts(*removed)) : std::nullopt;
}

void publish(const Directory& opened, const Path& temporary, const Path& name,
             const std::optional<Path>& aside, const Directory* renamed, bool sync, bool replace) {
  directory::Publication publication{
      temporary.native(), name.native(), aside ? aside->native() : std::string(), {}};
  if (renamed != nullptr) publication.identity = without_gil([&] { return renamed->identity(); });
  raise_unpublished(without_gil(
      [&] { return directory::publish(opened, publication, {.sync = sync, .replace = replace}); }));
}

void publish_contents(const Directory& opened, const Path& name,
                      std::span<const std::byte> contents, bool replace) {
  const std::string_view piece = chars_of(contents);
  raise_unpublished(without_gil([&] {
    return directory::publish_contents(opened, name.native(), {&piece, 1}, {.replace = replace});
  }));
}

/// Returns the names of the removed leftovers, and a message for each that could not be removed.
std::pair<py::list, py::list> sweep(const directory::StepRoot& steps, bool deleted_only,
                                    const std::string& attempt, const LeaseBytes& lease,
                                    const std::vector<Path>& superseded) {
  const auto names = native(superseded);
  const auto swept = without_gil([&] {
    return steps.sweep(deleted_only, attempt, lease, {names.begin(), names.end()});
  });
  return {texts(swept.removed),
          list_of(swept.failures, [](const Error& error) { return os_text(error.message()); })};
}

py::list find_missing(const directory::StepSave& save, const std::vector<Path>& files,
                      double patience) {
  const auto names = native(files);
  Interrupts interrupts;
  return texts(interrupts.run([&] {
    return save.find_missing({names.begin(), names.end()}, patience, interrupts.check());
  }));
}

void publish_step(directory::StepSave& save, std::span<const std::byte> marker, bool may_replace,
                  bool sync, const LeaseBytes& lease) {
  raise_unpublished(
      without_gil([&] { return save.publish(chars_of(marker), may_replace, sync, lease); }));
}

// os/process.h identifies this process among all processes of all hosts.
py::dict own_process() {
  const os::ProcessSpace space = os::own_process_space();
  const os::ProcessId process = os::own_process();
  py::dict fields;
  fields["host"] = os_text(space.host);
  fields["boot"] = os_text(space.boot);
  fields["pids"] = os_text(space.pids);
  fields["pid"] = process.number;
  fields["start"] = std::to_string(process.start);
  return fields;
}

}  // namespace

void bind_directory(py::module_& module) {
  module.attr("MARKER_NAME") = std::string(directory::kMarkerName);
  module.attr("PINNED_NAME") = std::string(directory::kPinnedName);
  module.attr("LOCK_NAME") = std::string(os::kLockName);
  module.attr("LEASE_NAME") = std::string(directory::kLeaseName);
  py::class_<Directory>(module, "Directory")
      .def(py::init([](const Path& path) { return unwrap(Directory::open(path.native())); }),
           py::arg("path"), NoGil())
      .def_property_readonly("path", [](const Directory& self) { return os_text(self.path()); })
      .def_property_readonly("fd", &Directory::fd)
      .def("share", &share, py::arg("patience") = 10.0)
      .def("try_lock_exclusive", &Directory::try_lock_exclusive, NoGil())
      .def_property_readonly("has_locks", &Directory::has_locks)
      .def_property_readonly("is_local", &Directory::is_local)
      .def("identity", &identity)
      .def("is_at_path", &Directory::is_at_path, NoGil())
      .def("names",
           [](const Directory& self) { return texts(without_gil([&] { return self.names(); })); })
      .def(
          "contains",
          [](const Directory& self, const Path& name) {
            const auto found = self.contains(name.native());
            return found && *found;
          },
          py::arg("name"), NoGil())
      .def(
          "refresh", [](const Directory& self, const Path& name) { self.refresh(name.native()); },
          py::arg("name"), NoGil())
      .def("length_of", &length_of, py::arg("name"), NoGil())
      .def(
          "open_directory",
          [](const Directory& self, const Path& name) {
            return self.open_directory(name.native());
          },
          py::arg("name"), NoGil())
      .def("open_for_read", &open_for_read, py::arg("name"), py::arg("flags") = 0, NoGil())
      .def(
          "remove",
          [](const Directory& self, const Path& name) { return self.remove(name.native()); },
          py::arg("name"), NoGil())
      .def("remove_lock_file", &Directory::remove_lock_file, NoGil())
      .def("sync", &Directory::sync, NoGil())
      .def("bytes", &Directory::bytes, NoGil())
      .def("close", &Directory::close);
  py::class_<engine::NewFile>(module, "NewFile")
      .def(py::init([](const Directory& directory, const Path& name, std::uint64_t bytes,
                       const py::object& direct_io) {
             const engine::DirectIo chosen = direct_io_option(direct_io);
             return without_gil(
                 [&] { return engine::NewFile::create(directory, name.native(), bytes, chosen); });
           }),
           py::arg("directory"), py::arg("name"), py::arg("bytes"), py::arg("direct_io") = "auto")
      .def("write", &engine::NewFile::write, py::arg("data"), NoGil())
      .def(
          "finish", [](engine::NewFile& self, bool sync) { return std::move(self).finish(sync); },
          py::arg("sync"), NoGil());
  py::class_<directory::DirectoryLease>(module, "DirectoryLease")
      .def(py::init(&take_lease), py::arg("directory"), py::arg("rank"), py::arg("patience"))
      .def_property_readonly("tag", &directory::DirectoryLease::tag)
      .def("commit", &commit, py::arg("metadata"), py::arg("files"), py::arg("sync"),
           py::arg("replace"))
      .def("discard",
           [](directory::DirectoryLease& self) {
             run_and_warn([&](directory::Warnings& warnings) {
               self.discard(directory::named_files, warnings);
             });
           })
      .def(
          "remove",
          [](const directory::DirectoryLease& self, const std::vector<Path>& names) {
            run_and_warn([&](directory::Warnings& warnings) {
              directory::remove_files(self.directory(), native(names), warnings);
            });
          },
          py::arg("names"))
      .def("close", &directory::DirectoryLease::close);
  module.def("metadata_name", &directory::metadata_name, py::arg("rank"));
  module.def("choose_prefix", &directory::choose_prefix, py::arg("directory"), py::arg("prefix"),
             py::arg("taken") = std::set<std::string>(), NoGil());
  module.def(
      "remove_files",
      [](const Directory& opened, const std::vector<Path>& names) {
        run_and_warn([&](directory::Warnings& warnings) {
          directory::remove_files(opened, native(names), warnings);
        });
      },
      py::arg("directory"), py::arg("names"));
  module.def(
      "remove_own",
      [](const Directory& opened, const std::vector<Path>& names) {
        run_and_warn([&](directory::Warnings& warnings) {
          const auto own = native(names);
          directory::remove_own(opened, {own.begin(), own.end()}, directory::named_files, warnings);
        });
      },
      py::arg("directory"), py::arg("names"));
  module.def("remove_leftovers", &remove_leftovers, py::arg("directory"));
  module.def("publish", &publish, py::arg("directory"), py::arg("temporary"), py::arg("name"),
             py::arg("aside") = py::none(), py::kw_only(), py::arg("renamed") = nullptr,
             py::arg("sync") = true, py::arg("replace") = true);
  module.def("publish_contents", &publish_contents, py::arg("directory"), py::arg("name"),
             py::arg("contents"), py::kw_only(), py::arg("replace") = true);
  py::class_<directory::StepRoot>(module, "StepRoot")
      .def(py::init([](const Path& path) { return std::make_unique<directory::StepRoot>(path); }),
           py::arg("path"))
      .def("remove", &directory::StepRoot::remove, py::arg("name"), py::arg("lease") = py::none(),
           NoGil())
      .def("sweep", &sweep, py::arg("deleted_only"), py::arg("attempt"),
           py::arg("lease") = py::none(), py::arg("superseded") = std::vector<Path>());
  py::class_<directory::StepSave>(module, "StepSave")
      .def(py::init([](directory::StepRoot& steps, const Directory& unfinished,
                       const std::string& digits) {
             return unwrap(directory::StepSave::begin(steps, unfinished, digits));
           }),
           py::arg("steps"), py::arg("unfinished"), py::arg("digits"), py::keep_alive<1, 2>(),
           NoGil())
      .def("find_missing", &find_missing, py::arg("files"), py::arg("patience"))
      .def("size", &directory::StepSave::bytes, NoGil())
      .def("publish", &publish_step, py::arg("marker"), py::kw_only(), py::arg("replace"),
           py::arg("sync"), py::arg("lease") = py::none())
      .def_property_readonly("is_published", &directory::StepSave::is_published)
      .def_property_readonly("replaced", &directory::StepSave::replaced)
      .def("discard", &directory::StepSave::discard, NoGil());
  py::enum_<directory::StepKind>(module, "StepKind")
      .value("STEP", directory::StepKind::step)
      .value("UNFINISHED", directory::StepKind::unfinished)
      .value("DELETED", directory::StepKind::deleted);
  module.def(
      "parse_step_name",
      [](const Path& name) {
        const auto parsed = directory::parse_step_name(name.native());
        return parsed ? std::optional(std::pair(std::string(parsed->digits), parsed->kind))
                      : std::nullopt;
      },
      py::arg("name"));
  module.def("unfinished_step_name", &directory::unfinished_name, py::arg("digits"),
             py::arg("attempt"));
  module.def("pin_step", &directory::pin, py::arg("step"), NoGil());
  py::class_<directory::RootLock>(module, "RootLock")
      .def(py::init([](const Directory& root, double patience) {
             const std::chrono::duration<double> seconds(patience);
             return unwrap(directory::RootLock::take(
                 root, std::chrono::duration_cast<std::chrono::milliseconds>(seconds)));
           }),
           py::arg("root"), py::arg("patience"), NoGil())
      .def_property_readonly("is_held", &directory::RootLock::is_held)
      .def("release", &directory::RootLock::release);
  module.def("own_process", &own_process);
  module.def(
      "is_alive",
      [](std::int64_t pid, std::uint64_t start) {
        return os::is_alive({pid, start});
      },
      py::arg("pid"), py::arg("start"), NoGil());
  module.def("names_file_beneath", &names_file_beneath, py::arg("name"));
  module.def(
      "make_directories", [](const Path& path) { return os::make_directories(path.native()); },
      py::arg("path"), NoGil());
}

}  // namespace torch_ckpt::python
