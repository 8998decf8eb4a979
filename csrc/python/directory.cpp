#include "os/directory.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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
#include "python/types.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using directory::LeaseBytes;
using os::Directory;

// pybind11 converts arguments of this type like os.fsencode.
using Path = std::filesystem::path;
using FileNames = std::vector<FileName>;

bool share(Directory& directory, double patience) {
  Interrupts interrupts;
  return interrupts.run([&] { return directory::share(directory, patience, interrupts.check()); });
}

auto identity(const Directory& directory) {
  const os::FileIdentity found = without_gil([&] { return directory.identity(); });
  return py::make_tuple(found.device, found.number, found.born_s, found.born_ns);
}

Result<std::uint64_t> length_of(const Directory& directory, const FileName& name) {
  auto file = directory.open_for_read(name);
  if (!file) return file.error();
  return file->size();
}

// An `opener` for io.open. No bytecode runs before the file object owns the descriptor, so no
// signal handler can leak it.
Result<int> open_for_read(const Directory& directory, const FileName& name, int) {
  auto file = directory.open_for_read(name);
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
            const FileNames& files, bool sync, bool replace) {
  directory::Warnings warnings;
  const auto outcome = without_gil([&] {
    return lease.commit(metadata.pieces(), {files.begin(), files.end()},
                        {.sync = sync, .replace = replace}, directory::named_files, warnings);
  });
  warn(warnings);
  if (outcome.state != directory::PublishState::published) raise(outcome);
}

std::optional<py::typing::List<py::str>> remove_leftovers(Directory& opened) {
  const auto removed =
      without_gil([&] { return directory::remove_leftovers(opened, directory::named_files); });
  return removed ? std::optional(list_of(*removed, os_text)) : std::nullopt;
}

void publish(const Directory& opened, const FileName& temporary, const FileName& name,
             const std::optional<FileName>& aside, const Directory* renamed, bool sync,
             bool replace) {
  directory::Publication publication{temporary, name, aside.value_or(FileName()), {}};
  if (renamed != nullptr) publication.identity = without_gil([&] { return renamed->identity(); });
  raise_unpublished(without_gil(
      [&] { return directory::publish(opened, publication, {.sync = sync, .replace = replace}); }));
}

void publish_contents(const Directory& opened, const FileName& name,
                      std::span<const std::byte> contents, bool replace) {
  const std::string_view piece = chars_of(contents);
  raise_unpublished(without_gil([&] {
    return directory::publish_contents(opened, name, {&piece, 1}, {.replace = replace});
  }));
}

auto sweep(const directory::StepRoot& steps, bool deleted_only, const std::string& attempt,
           const std::optional<Bytes>& lease, const FileNames& superseded) {
  const auto swept = without_gil([&] {
    return steps.sweep(deleted_only, attempt, lease, {superseded.begin(), superseded.end()});
  });
  return std::pair(list_of(swept.removed, os_text), list_of(swept.failures, [](const Error& error) {
                     return os_text(error.message());
                   }));
}

auto find_missing(const directory::StepSave& save, const FileNames& files, double patience) {
  Interrupts interrupts;
  const auto missing = interrupts.run([&] {
    return save.find_missing({files.begin(), files.end()}, patience, interrupts.check());
  });
  return list_of(missing, os_text);
}

void publish_step(directory::StepSave& save, std::span<const std::byte> marker, bool may_replace,
                  bool sync, const std::optional<Bytes>& lease) {
  raise_unpublished(
      without_gil([&] { return save.publish(chars_of(marker), may_replace, sync, lease); }));
}

// os/process.h identifies this process among all processes of all hosts.
Typed<"dict[str, typing.Any]"> own_process() {
  const os::ProcessSpace space = os::own_process_space();
  const os::ProcessId process = os::own_process();
  py::dict fields;
  fields["host"] = os_text(space.host);
  fields["boot"] = os_text(space.boot);
  fields["pids"] = os_text(space.pids);
  fields["pid"] = process.number;
  fields["start"] = std::to_string(process.start);
  return py::object(fields);
}

}  // namespace

void bind_directory(py::module_& module) {
  module.attr("MARKER_NAME") = std::string(directory::kMarkerName);
  module.attr("PINNED_NAME") = std::string(directory::kPinnedName);
  module.attr("LOCK_NAME") = std::string(os::kLockName);
  module.attr("LEASE_NAME") = std::string(directory::kLeaseName);
  py::class_<Directory>(
      module, "Directory",
      "An open directory; see csrc/os/directory.h. Dropping it closes it.\n\n"
      "Every call may raise OSError with the path of the directory or file as ``filename``.")
      .def(py::init([](const Path& path) { return unwrap(Directory::open(path.native())); }),
           "path"_a, NoGil(), "Follows links in the path, because the caller chose it.")
      .def_property_readonly("path", [](const Directory& self) { return os_text(self.path()); })
      .def_property_readonly("fd", &Directory::fd, "The descriptor; -1 after ``close``.")
      .def("share", &share, "patience"_a = 10.0,
           "Takes the shared lock, so that no other process removes files.\n\n"
           "Another process has the exclusive lock for milliseconds only, unless it is stopped. "
           "Returns False, without a lock, if it keeps the lock for ``patience`` seconds.")
      .def("try_lock_exclusive", &Directory::try_lock_exclusive, NoGil(),
           "Takes the exclusive lock if no other descriptor has a lock; releases the shared "
           "lock.\n\n"
           "Returns False on a file system without locks.")
      .def_property_readonly(
          "has_locks", &Directory::has_locks,
          "False if the last attempt to lock found that the file system has no locks.")
      .def_property_readonly(
          "is_local", &Directory::is_local,
          "True if no other host can change the directory, by the type of its file system.")
      .def("identity", &identity,
           "Device, inode, and seconds and nanoseconds of creation, or 0 if they are not stored.")
      .def("is_at_path", &Directory::is_at_path, NoGil(),
           "True if the path leads to this directory now.")
      .def(
          "names",
          [](const Directory& self) {
            return list_of(without_gil([&] { return self.names(); }), os_text);
          },
          "Names of all entries, in no particular order.")
      .def(
          "contains",
          [](const Directory& self, const FileName& name) {
            const auto found = self.contains(name);
            return found && *found;
          },
          "name"_a, NoGil(),
          "True if there is an entry of this name. False also if the system does not report it.")
      .def(
          "refresh", [](const Directory& self, const FileName& name) { self.refresh(name); },
          "name"_a, NoGil(),
          "Makes the client of a network file system look a name up again.\n\n"
          "Does nothing if the directory is local.")
      .def("length_of", &length_of, "name"_a, NoGil(),
           "The length in bytes of a regular file in the directory.\n\n"
           "Raises ValueError for another kind of file, Unsafe for a link.")
      .def(
          "open_directory",
          [](const Directory& self, const FileName& name) { return self.open_directory(name); },
          "name"_a, NoGil(), "Opens a directory in this one. Does not follow a link.")
      .def("open_for_read", &open_for_read, "name"_a, "flags"_a = 0, NoGil(),
           "Opens a regular file beneath the directory. Pass it to ``open`` as its opener.\n\n"
           "Returns a descriptor. Raises ValueError for another kind of file, Unsafe for a link. "
           "``flags`` are ignored.")
      .def(
          "remove", [](const Directory& self, const FileName& name) { return self.remove(name); },
          "name"_a, NoGil(), "Removes a file. A missing file is not an error.")
      .def("remove_lock_file", &Directory::remove_lock_file, NoGil(),
           "Closes and removes the file of the lock, so that the directory can be removed.")
      .def("sync", &Directory::sync, NoGil())
      .def("bytes", &Directory::bytes, NoGil(), "Total size of the files, without subdirectories.")
      .def("close", &Directory::close,
           "Closes the descriptor and releases the lock. Further calls do nothing.");
  py::class_<engine::NewFile>(
      module, "NewFile",
      "A file that is written from its beginning to its end; see csrc/engine/new_file.h.\n\n"
      "``bytes`` are reserved on the disk. ``direct_io`` is the option of WriteOptions. Every call "
      "may raise OSError; then the caller removes the file. Dropping the object closes the file.")
      .def(py::init([](const Directory& directory, const FileName& name, std::uint64_t bytes,
                       engine::DirectIo direct_io) {
             return unwrap(engine::NewFile::create(directory, name, bytes, direct_io));
           }),
           "directory"_a, "name"_a, "bytes"_a, "direct_io"_a = "auto", NoGil(),
           "Raises ValueError if ``direct_io`` is True and the file system does not support it.")
      .def("write", &engine::NewFile::write, "data"_a, NoGil())
      .def(
          "finish", [](engine::NewFile& self, bool sync) { return std::move(self).finish(sync); },
          "sync"_a, NoGil(), "Fsyncs the file if ``sync`` is true, and closes it.");
  py::class_<directory::DirectoryLease>(
      module, "DirectoryLease",
      "A save's hold on a checkpoint's directory; csrc/directory/lease.h has the protocol.\n\n"
      "If a metadata file cannot be read, no file is removed, with a warning. A file that cannot "
      "be removed is a warning, too.")
      .def(py::init(&take_lease), "directory"_a, "rank"_a, "patience"_a,
           "Takes the shared lock and chooses a tag.\n\n"
           "``rank`` is the rank whose metadata the save writes; None: the metadata of all ranks. "
           "Raises OSError, and CheckpointError if another process holds the exclusive lock for "
           "``patience`` seconds.")
      .def_property_readonly("tag", &directory::DirectoryLease::tag)
      .def("commit", &commit, "metadata"_a, "files"_a, "sync"_a, "replace"_a,
           "Publishes the metadata, removes files that no metadata names, and ends the lease.\n\n"
           "Raises NotCommitted and DurabilityUncertain.")
      .def(
          "discard",
          [](directory::DirectoryLease& self) {
            run_and_warn([&](directory::Warnings& warnings) {
              self.discard(directory::named_files, warnings);
            });
          },
          "Removes the save's files and ends the lease.")
      .def(
          "remove",
          [](const directory::DirectoryLease& self, const FileNames& names) {
            run_and_warn([&](directory::Warnings& warnings) {
              directory::remove_files(self.directory(), {names.begin(), names.end()}, warnings);
            });
          },
          "names"_a)
      .def("close", &directory::DirectoryLease::close, "Ends the lease and removes nothing.");
  module.def("metadata_name", &directory::metadata_name, "rank"_a);
  module.def(
      "choose_prefix", &directory::choose_prefix, "directory"_a, "prefix"_a,
      "taken"_a = std::set<std::string>(), NoGil(),
      "Chooses the prefix of one rank's data files: ``prefix``, or the same with a new tag if the "
      "directory has any metadata, or data files of the rank, or if ``taken`` contains "
      "``prefix``.\n\n"
      "``prefix`` is ``__{rank}_`` or ``__{rank}_{tag}_``. ``taken`` has the prefixes of other "
      "saves of this process, which may not have created their files yet. Raises OSError.");
  module.def(
      "remove_files",
      [](const Directory& opened, const FileNames& names) {
        run_and_warn([&](directory::Warnings& warnings) {
          directory::remove_files(opened, {names.begin(), names.end()}, warnings);
        });
      },
      "directory"_a, "names"_a,
      "Removes files that no metadata names, which the caller has checked. Warns if that fails.");
  module.def(
      "remove_own",
      [](const Directory& opened, const FileNames& names) {
        run_and_warn([&](directory::Warnings& warnings) {
          directory::remove_own(opened, {names.begin(), names.end()}, directory::named_files,
                                warnings);
        });
      },
      "directory"_a, "names"_a,
      "Removes a failed save's files if no other process holds a lock. Warns if that fails.");
  module.def("remove_leftovers", &remove_leftovers, "directory"_a,
             "Removes the files of interrupted saves, and returns the names of these files.\n\n"
             "Returns None if a save or a load holds the directory's lock. Raises OSError, and "
             "Unsafe or Corrupt if a metadata file cannot be decoded.");
  module.def("publish", &publish, "directory"_a, "temporary"_a, "name"_a, "aside"_a = std::nullopt,
             py::kw_only(), "renamed"_a = nullptr, "sync"_a = true, "replace"_a = true,
             "Renames a durable file or directory to its name, in one step; see "
             "csrc/directory/publish.h.\n\n"
             "A directory that has the name is first renamed to ``aside``. ``renamed`` is the "
             "directory that ``temporary`` must be.\n\n"
             "Raises OSError, CheckpointError if a directory on the path or ``temporary`` was "
             "moved, and DurabilityUncertain.");
  module.def("publish_contents", &publish_contents, "directory"_a, "name"_a, "contents"_a,
             py::kw_only(), "replace"_a = true,
             "Writes a file and publishes it as ``publish`` does.");
  py::class_<directory::StepRoot>(
      module, "StepRoot", "The root of a run's steps; csrc/directory/step.h has the protocol.")
      .def(py::init([](const Path& path) { return std::make_unique<directory::StepRoot>(path); }),
           "path"_a)
      .def(
          "remove",
          [](const directory::StepRoot& self, const std::string& name,
             const std::optional<Bytes>& lease) { return self.remove(name, lease); },
          "name"_a, "lease"_a = py::none(), NoGil(),
          "Removes a step or leftover.\n\n"
          "Returns False if a process is using it. Raises OSError: it does not exist or cannot be "
          "removed, or the root's path refers to a different directory than at the last save. "
          "Raises RootInUse if ``lease`` is given and the lease on the root has other bytes.")
      .def("sweep", &sweep, "deleted_only"_a, "attempt"_a, "lease"_a = py::none(),
           "superseded"_a = py::list(),
           "Finishes interrupted work. Spares the unfinished steps of ``attempt``, and completes "
           "none of the directories ``superseded``.\n\n"
           "Returns the names of the removed leftovers, and a message for each that could not be "
           "removed. Raises OSError if the root cannot be listed, and RootInUse as ``remove`` "
           "does.");
  py::class_<directory::StepSave>(
      module, "StepSave",
      "The coordinator's part of the save of a step, after all ranks have written their files.\n\n"
      "``unfinished`` is the directory in which the save has written, ``digits`` the step's name.")
      .def(py::init([](directory::StepRoot& steps, const Directory& unfinished,
                       const std::string& digits) {
             return unwrap(directory::StepSave::begin(steps, unfinished, digits));
           }),
           "steps"_a, "unfinished"_a, "digits"_a, py::keep_alive<1, 2>(), NoGil())
      .def("find_missing", &find_missing, "files"_a, "patience"_a,
           "Waits until the directory contains the files. Returns those that are missing after "
           "``patience`` seconds.")
      .def("size", &directory::StepSave::bytes, NoGil(), "Total size of the files.")
      .def("publish", &publish_step, "marker"_a, py::kw_only(), "replace"_a, "sync"_a,
           "lease"_a = py::none(),
           "Completes the step after the metadata was committed. Removes the files if that "
           "fails.\n\n"
           "Raises OSError, CheckpointError if the root or the directory was moved, "
           "DurabilityUncertain, and RootInUse as ``StepRoot.remove`` does.")
      .def_property_readonly(
          "is_published", &directory::StepSave::is_published,
          "True once ``publish`` has renamed the directory, or may have done so.")
      .def_property_readonly("replaced", &directory::StepSave::replaced,
                             "The new name of the step that was replaced; empty if there was none.")
      .def("discard", &directory::StepSave::discard, NoGil(),
           "Removes the files of a save that has failed before ``publish``.");
  py::enum_<directory::StepKind>(module, "StepKind",
                                 "Kinds of directories beneath a root, distinguished by name.")
      .value("STEP", directory::StepKind::step)
      .value("UNFINISHED", directory::StepKind::unfinished)
      .value("DELETED", directory::StepKind::deleted);
  module.def(
      "parse_step_name",
      [](const FileName& name) {
        const auto parsed = directory::parse_step_name(name);
        return parsed ? std::optional(std::pair(std::string(parsed->digits), parsed->kind))
                      : std::nullopt;
      },
      "name"_a, "The ten digits and the kind of a step or leftover; None for any other name.");
  module.def(
      "unfinished_step_name", &directory::unfinished_name, "digits"_a, "attempt"_a,
      "The name of the directory into which a step is written. ``attempt`` is 8 hex digits.");
  module.def("pin_step", &directory::pin, "step"_a, NoGil(),
             "Pins a step, and makes the pin durable.");
  py::class_<directory::RootLock>(
      module, "RootLock",
      "The lock on a root; csrc/directory/root_lock.h. Waits for it for ``patience`` seconds.")
      .def(py::init([](const Directory& root, double patience) {
             const std::chrono::duration<double> seconds(patience);
             return unwrap(directory::RootLock::take(
                 root, std::chrono::duration_cast<std::chrono::milliseconds>(seconds)));
           }),
           "root"_a, "patience"_a, NoGil())
      .def_property_readonly("is_held", &directory::RootLock::is_held,
                             "False if another thread or process holds the lock.")
      .def("release", &directory::RootLock::release);
  module.def(
      "own_process", &own_process,
      "This process: ``host``, ``boot``, ``pids``, ``pid`` and ``start``; see csrc/os/process.h.");
  module.def(
      "is_alive",
      [](std::int64_t pid, std::uint64_t start) {
        return os::is_alive({pid, start});
      },
      "pid"_a, "start"_a, NoGil(),
      "Returns False if a process of this host has ended. 0 is an unknown start time.");
  module.def("names_file_beneath", &names_file_beneath, "name"_a,
             "False if the text of the name shows that it cannot name a file beneath a directory.");
  module.def(
      "make_directories", [](const Path& path) { return os::make_directories(path.native()); },
      "path"_a, NoGil());
}

}  // namespace torch_ckpt::python
