#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/errors.h"
#include "python/gil.h"
#include "python/memory.h"
#include "python/options.h"
#include "python/results.h"
#include "torch/tensor_checks.h"
#include "torch/tensor_save.h"
#include "torch/tensor_source.h"
#include "torch_python/bindings.h"
#include "torch_python/casters.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using engine::Context;
using tensors::Tensor;
using tensors::TensorSave;

// `background` is a torch_ckpt.saving.background.EngineOptions.
void add_background(engine::SaveOptions& options, const py::object& background) {
  const py::object writers = background.attr("writers");
  options.snapshot = background.attr("snapshot").cast<bool>();
  options.writers = threads_of(writers);
  if (background.attr("quiet_stagers").cast<bool>()) options.stagers = options.writers;
  options.max_bytes_per_second = writers.attr("max_bytes_per_second").cast<std::uint64_t>();
  options.ready = ready_events(background.attr("ready").cast<Events>());
  options.trace = background.attr("trace").cast<bool>();
  options.children = channel_of(background.attr("children"));
}

std::unique_ptr<TensorSave> start_save(const os::Directory& directory, const std::string& prefix,
                                       tensors::SaveSources& sources, std::size_t buckets,
                                       std::uint64_t bytes_per_bucket, bool file_per_item,
                                       const std::string& separation_hint, std::size_t chunk_bytes,
                                       std::size_t max_host_bytes, const py::object& direct_io,
                                       bool sync, const py::object& background) {
  const engine::NamingOptions naming{
      prefix, {buckets, bytes_per_bucket}, file_per_item, separation_hint};
  engine::SaveOptions options;
  options.parallel_files = buckets;
  options.chunk_bytes = chunk_bytes;
  options.max_host_bytes = max_host_bytes;
  options.direct_io = direct_io_option(direct_io);
  options.sync = sync;
  if (!background.is_none()) add_background(options, background);
  auto save = without_gil([&] {
    return std::make_unique<TensorSave>(Context::process(), directory, sources, naming, options);
  });
  pass_on_warnings();
  return save;
}

template <Result<bool> (TensorSave::*kEvent)(double)>
bool wait_by(TensorSave& save, double seconds) {
  const auto done = [&] {
    const ReleasedGil released;
    return (save.*kEvent)(seconds);
  }();
  if (!done || *done) pass_on_warnings();
  return unwrap(done);
}

bool is_plain(const py::handle& value) {
  return Tensor::is_exact(value.ptr()) && tensors::is_plain(Tensor::of(value.ptr()));
}

bool is_dense(const py::handle& value) {
  return Tensor::is_tensor(value.ptr()) && tensors::is_dense(Tensor::of(value.ptr()));
}

}  // namespace

void bind_save(py::module_& module) {
  module.def("is_plain", &is_plain, py::arg("value"));
  module.def("is_dense", &is_dense, py::arg("tensor"));
  module.def(
      "copy_to_pool",
      [](const std::vector<Tensor>& given) {
        return without_gil([&] { return tensors::copies_in_pool(Context::process(), given); });
      },
      py::arg("tensors"));
  module.def("start_save", &start_save, py::arg("directory"), py::arg("prefix"), py::arg("sources"),
             py::kw_only(), py::arg("buckets"), py::arg("bytes_per_bucket") = 0,
             py::arg("file_per_item"), py::arg("separation_hint"), py::arg("chunk_bytes") = 0,
             py::arg("max_host_bytes"), py::arg("direct_io"), py::arg("sync"),
             py::arg("background"));
  py::class_<TensorSave>(module, "Save")
      .def("wait", &wait_by<&TensorSave::wait>, py::arg("seconds"))
      .def("wait_staged", &wait_by<&TensorSave::wait_staged>, py::arg("seconds"))
      .def("wait_submitted", &wait_by<&TensorSave::wait_submitted>, py::arg("seconds"))
      .def("make_stream_wait", &TensorSave::make_stream_wait, py::arg("device"), py::arg("stream"))
      .def("release_sources", &TensorSave::release_sources)
      .def("elapsed", &TensorSave::elapsed)
      .def("timing", &TensorSave::timing)
      .def("trace", &TensorSave::trace)
      .def("progress", &TensorSave::progress)
      .def("unfinished", &TensorSave::unfinished)
      .def("cancel", &TensorSave::cancel)
      .def("results",
           [](const TensorSave& save) {
             return WrittenFiles(without_gil([&] { return save.results(); }));
           })
      .def_property_readonly("file_names", &TensorSave::file_names);
}

}  // namespace torch_ckpt::python
