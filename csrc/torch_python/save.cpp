#include <pybind11/stl.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/errors.h"
#include "python/folder.h"
#include "python/gil.h"
#include "python/list.h"
#include "python/memory.h"
#include "python/options.h"
#include "python/results.h"
#include "python/types.h"
#include "torch/tensor_checks.h"
#include "torch/tensor_save.h"
#include "torch/tensor_source.h"
#include "torch_python/bindings.h"
#include "torch_python/casters.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using engine::Context;
using tensors::Save;
using tensors::Tensor;

void add_background(engine::SaveOptions& options, const Background& background,
                    bool low_priority_copies) {
  options.writers = threads_of(background);
  if (low_priority_copies) options.stagers = options.writers;
  options.max_bytes_per_second = background.attr("max_bytes_per_second").cast<std::uint64_t>();
}

void start(Save& save, engine::Folder directory, const std::string& prefix,
           tensors::SaveSources& sources, std::size_t buckets, std::uint64_t bytes_per_bucket,
           bool file_per_item, const std::string& separation_hint, std::size_t chunk_bytes,
           std::size_t max_host_bytes, engine::DirectIo direct_io, bool sync, bool snapshot,
           const Background& background, bool low_priority_copies, const Events& ready,
           std::shared_ptr<engine::ProcessChannel> children) {
  const engine::NamingOptions naming{
      prefix, {buckets, bytes_per_bucket}, file_per_item, separation_hint};
  engine::SaveOptions options;
  options.parallel_files = buckets;
  options.chunk_bytes = chunk_bytes;
  options.max_host_bytes = max_host_bytes;
  options.direct_io = direct_io;
  options.sync = sync;
  options.snapshot = snapshot;
  options.ready = ready_events(ready);
  options.children = std::move(children);
  if (!background.is_none()) add_background(options, background, low_priority_copies);
  save.start(Context::process(), std::move(directory), sources, naming, options);
  pass_on_warnings();
}

using Callback = Typed<"collections.abc.Callable[[], object] | None">;

/// Converts a Python function, or None to an empty function.
std::function<void()> callback_of(const Callback& function) {
  if (function.is_none()) return {};
  return [function] { function(); };
}

/// Returns names, which may contain surrogates.
auto texts_of(const std::vector<std::string>& names) {
  return list_of(names, [](const std::string& name) { return text_of(name); });
}

auto run(Save& save, const Callback& on_staged, const Callback& on_wait, double seconds) {
  std::vector<std::string> changed;
  try {
    changed = save.run({callback_of(on_staged), callback_of(on_wait)}, seconds);
  } catch (...) {
    pass_on_warnings();
    throw;
  }
  pass_on_warnings();
  return texts_of(changed);
}

bool is_plain(const py::object& value) {
  return Tensor::is_exact(value.ptr()) && tensors::is_plain(Tensor::of(value.ptr()));
}

bool is_dense(const py::object& value) {
  return Tensor::is_tensor(value.ptr()) && tensors::is_dense(Tensor::of(value.ptr()));
}

}  // namespace

void bind_save(py::module_& module) {
  module.def("is_plain", &is_plain, "value"_a,
             "True if the engine can write the value: a plain strided tensor.");
  module.def("is_dense", &is_dense, "tensor"_a,
             "True if a tensor has no gaps, no overlap and no pending conjugation or negation.");
  module.def(
      "copy_to_pool",
      [](const std::vector<Tensor>& given) {
        return without_gil([&] { return tensors::copies_in_pool(Context::process(), given); });
      },
      "tensors"_a,
      "Copies dense CPU tensors into memory that returns to the pool with the last of the copies.");
  py::class_<Save>(module, "Save",
                   "The write of one rank's files in a save (csrc/torch/tensor_save.h).\n\n"
                   "``watch`` detects writes to the sources of a snapshot; without it, no source "
                   "changes before the end. One thread calls ``start``, ``run``, "
                   "``cancel_and_wait`` and ``finish``; any thread may call the other methods.")
      .def(py::init<std::shared_ptr<tensors::SourceWatch>>(), "watch"_a = nullptr)
      .def("start", &start, "directory"_a, "prefix"_a, "sources"_a, py::kw_only(), "buckets"_a,
           "bytes_per_bucket"_a = 0, "file_per_item"_a = false, "separation_hint"_a = "",
           "chunk_bytes"_a = 0, "max_host_bytes"_a, "direct_io"_a, "sync"_a, "snapshot"_a = false,
           "background"_a = py::none(), "low_priority_copies"_a = true, "ready"_a = Events(),
           "children"_a = py::none())
      .def("run", &run, "on_staged"_a = py::none(), "on_wait"_a = py::none(), "seconds"_a = 1.0,
           "Waits for the end. Returns the names of sources that were written to too early.\n\n"
           "``on_staged`` is called once, when the sources may change. ``on_wait`` is called every "
           "``seconds``. Raises the error of the save.")
      .def(
          "cancel_and_wait", [](Save& save) { return texts_of(save.cancel_and_wait()); },
          "Cancels the save, and waits for its end. Returns the names of files that exist "
          "nevertheless.")
      .def(
          "finish", [](Save& save) { return WrittenFiles(save.finish()); },
          "Releases all memory of a save that has ended or will not start. Returns the files.")
      .def("cancel", &Save::cancel)
      .def(
          "make_streams_wait",
          [](Save& save, const std::vector<std::pair<int, std::uintptr_t>>& streams,
             double seconds) { return save.make_streams_wait(streams, seconds); },
          "streams"_a, "seconds"_a,
          "Makes streams of devices wait for the copies. Returns None if the copies were not "
          "submitted in time; then call it again.")
      .def("timing", &Save::timing,
           "Seconds until staged and until ended; thread seconds of staging, checksums, writes and "
           "fsyncs.")
      .def("progress", &Save::progress,
           "Bytes planned, staged and written, files planned and done.")
      .def("unfinished", &Save::unfinished,
           "Name, phase, bytes written and total bytes of each unfinished file.")
      .def_property_readonly("file_names", &Save::file_names);
}

}  // namespace torch_ckpt::python
