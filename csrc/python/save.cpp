#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/bulk_copy.h"
#include "engine/reserve.h"
#include "engine/save_plan.h"
#include "engine/save_session.h"
#include "format/crc32.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/options.h"
#include "python/results.h"
#include "python/tensors.h"
#include "staging/chunk_pool.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

// A save under way, with all that keeps its sources alive.
class Save {
 public:
  Save(std::vector<at::Tensor> tensors, std::vector<c10::Storage> storages,
       std::vector<py::buffer_info> buffers, engine::SavePlan plan)
      : tensors_(std::move(tensors)),
        storages_(std::move(storages)),
        buffers_(std::move(buffers)),
        file_names_(std::move(plan.file_names)) {}

  // The engine reads the sources until the session has ended, so dropping an unfinished save ends
  // it first.
  ~Save() {
    if (session_ == nullptr) return;
    const ReleasedGil released;
    if (session_->wait_for(std::chrono::milliseconds(0))) return;
    session_->cancel();
    while (!session_->wait_for(std::chrono::hours(1))) {
    }
  }
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  void start(const os::Directory& directory, std::vector<engine::FileJob> files,
             const engine::SaveOptions& options) {
    session_ = without_gil([&]() -> Result<std::shared_ptr<engine::SaveSession>> {
      auto own = directory.duplicate();
      if (!own) return own.error();
      return engine::SaveSession::start(std::move(*own), std::move(files), options);
    });
  }

  bool wait(double seconds) { return wait_by(&engine::SaveSession::wait_for, seconds); }
  bool wait_staged(double seconds) { return wait_by(&engine::SaveSession::wait_staged, seconds); }
  bool wait_submitted(double seconds) {
    return wait_by(&engine::SaveSession::wait_submitted, seconds);
  }

  void make_stream_wait(int device, std::uintptr_t stream) {
    unwrap(session_->make_stream_wait(device, reinterpret_cast<void*>(stream)));
  }

  void release_sources() {
    tensors_.clear();
    storages_.clear();
    buffers_.clear();
  }

  double elapsed() const { return static_cast<double>(session_->timing().now_ns()) * 1e-9; }

  py::tuple timing() const {
    const engine::Timing& timing = session_->timing();
    const auto busy = [&](engine::Activity activity) {
      return static_cast<double>(timing.busy_ns(activity)) * 1e-9;
    };
    return py::make_tuple(static_cast<double>(timing.staged_ns) * 1e-9,
                          static_cast<double>(timing.ended_ns) * 1e-9,
                          busy(engine::Activity::stage), busy(engine::Activity::checksum),
                          busy(engine::Activity::write), busy(engine::Activity::fsync));
  }

  py::list trace() const {
    py::list events;
    for (const engine::TraceEvent& event : session_->timing().events()) {
      events.append(py::make_tuple(kActivityNames[static_cast<std::size_t>(event.activity)],
                                   event.file, static_cast<double>(event.begin_ns) * 1e-9,
                                   static_cast<double>(event.end_ns) * 1e-9));
    }
    return events;
  }

  py::tuple progress() const {
    const engine::SaveProgress now = session_->progress();
    return py::make_tuple(now.bytes_planned, now.bytes_staged, now.bytes_written, now.files_planned,
                          now.files_done);
  }

  /// (file name, phase, bytes written, bytes) of each file that has not sent its result.
  py::list unfinished() const {
    py::list rows;
    for (const engine::FileProgress& file : session_->unfinished()) {
      rows.append(py::make_tuple(file_names_[file.file],
                                 kPhaseNames[static_cast<std::size_t>(file.phase)],
                                 file.bytes_written, file.bytes));
    }
    return rows;
  }

  void cancel() { session_->cancel(); }

  py::tuple results() const {
    return to_python(without_gil([&] { return session_->results(); }));
  }

  const std::vector<std::string>& file_names() const { return file_names_; }

 private:
  static constexpr const char* kActivityNames[engine::kActivities] = {"stage", "checksum", "write",
                                                                      "fsync"};
  static constexpr const char* kPhaseNames[] = {"waiting", "staging", "writing", "fsync"};

  bool wait_by(bool (engine::SaveSession::*event)(std::chrono::milliseconds), double seconds) {
    bool done = false;
    {
      const ReleasedGil released;
      // Bounded, since the clock's arithmetic overflows where somebody waits for ever.
      constexpr double kLongest = 1e9;
      done = ((*session_).*event)(std::chrono::milliseconds(
          static_cast<std::int64_t>(std::min(seconds, kLongest) * 1000.0)));
    }
    if (!done) return false;
    pass_on_warnings();
    if (auto outcome = session_->outcome(); !outcome) raise(outcome.error());
    return true;
  }

  std::vector<at::Tensor> tensors_;
  std::vector<c10::Storage> storages_;
  std::vector<py::buffer_info> buffers_;
  std::vector<std::string> file_names_;
  std::shared_ptr<engine::SaveSession> session_;
};

engine::Threads threads_of(const py::handle& background) {
  engine::Threads threads;
  threads.priority.nice = background.attr("nice").cast<int>();
  threads.priority.idle_io = background.attr("idle_io").cast<bool>();
  threads.count = background.attr("threads").cast<std::size_t>();
  return threads;
}

// From a torch_ckpt.saving.background.EngineOptions.
void add_background(engine::SaveOptions& options, const py::object& background) {
  options.snapshot = background.attr("snapshot").cast<bool>();
  options.writers = threads_of(background.attr("writers"));
  if (background.attr("quiet_stagers").cast<bool>()) options.stagers = options.writers;
  options.max_bytes_per_second =
      background.attr("writers").attr("max_bytes_per_second").cast<std::uint64_t>();
  for (const py::handle event_of : background.attr("ready")) {
    const auto [device, event] = event_of.cast<std::pair<int, std::uintptr_t>>();
    options.ready.push_back({device, reinterpret_cast<void*>(event)});
  }
  options.trace = background.attr("trace").cast<bool>();
  options.children = channel_of(background.attr("children"));
}

std::unique_ptr<Save> start_save(const os::Directory& directory, const std::string& prefix,
                                 const py::list& names, const py::list& values, std::size_t buckets,
                                 bool file_per_item, const std::string& separation_hint,
                                 std::size_t chunk_bytes, std::size_t max_host_bytes,
                                 const py::object& direct_io, bool sync,
                                 const py::object& background) {
  if (names.size() != values.size()) throw py::value_error("one name for each value");
  std::vector<at::Tensor> tensors;
  std::vector<c10::Storage> storages;
  std::vector<py::buffer_info> buffers;
  std::vector<engine::SaveItem> items;
  items.reserve(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    engine::SaveItem item;
    if (!separation_hint.empty()) item.name = names[i].cast<std::string>();
    const py::handle value = values[i];
    if (THPVariable_Check(value.ptr())) {
      TensorSpan span = to_span(THPVariable_Unpack(value.ptr()));
      item.source = std::move(span.source);
      item.tensor = std::move(span.header);
      // Of its own, since somebody may give the tensor another one (`tensor.data = ...`).
      storages.push_back(span.owner.storage());
      tensors.push_back(std::move(span.owner));
    } else {
      py::buffer_info bytes = py::reinterpret_borrow<py::buffer>(value).request();
      if (PyBuffer_IsContiguous(bytes.view(), 'C') == 0) {
        throw py::value_error(py::str(names[i]).cast<std::string>() +
                              ": the bytes do not lie one behind the other in memory");
      }
      item.source.address = static_cast<const std::byte*>(bytes.ptr);
      item.source.bytes = static_cast<std::uint64_t>(bytes.size * bytes.itemsize);
      buffers.push_back(std::move(bytes));
    }
    items.push_back(std::move(item));
  }
  engine::NamingOptions naming;
  naming.prefix = prefix;
  naming.buckets = buckets;
  naming.file_per_item = file_per_item;
  naming.separation_hint = separation_hint;
  engine::SavePlan plan = without_gil([&] { return engine::plan_save(std::move(items), naming); });
  engine::SaveOptions options;
  options.parallel_files = buckets;
  options.chunk_bytes = chunk_bytes;
  options.max_host_bytes = max_host_bytes;
  options.direct_io = direct_io_option(direct_io);
  options.sync = sync;
  if (!background.is_none()) add_background(options, background);
  std::vector<engine::FileJob> files = std::move(plan.files);
  auto save = std::make_unique<Save>(std::move(tensors), std::move(storages), std::move(buffers),
                                     std::move(plan));
  save->start(directory, std::move(files), options);
  pass_on_warnings();
  return save;
}

std::size_t grow_reserve(std::size_t most_bytes, int device, const py::object& background) {
  const engine::Threads threads = background.is_none() ? engine::Threads{} : threads_of(background);
  return without_gil([&] { return engine::grow_reserve(most_bytes, threads, device); });
}

/// Dense CPU tensors; the copies have the same strides.
py::list copy_to_pool(const py::list& values) {
  std::vector<at::Tensor> tensors;
  std::vector<staging::Source> sources;
  for (const py::handle value : values) {
    const at::Tensor& tensor = tensors.emplace_back(THPVariable_Unpack(value.ptr()));
    staging::Source source;
    source.address = static_cast<const std::byte*>(tensor.const_data_ptr());
    source.bytes = tensor.nbytes();
    sources.push_back(std::move(source));
  }
  std::vector<engine::PooledCopy> placed =
      without_gil([&] { return engine::copy_to_pool(sources); });
  py::list copied(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const at::Tensor copy = at::from_blob(
        placed[i].address, tensor.sizes(), tensor.strides(),
        [memory = std::move(placed[i].memory)](void*) {}, tensor.options());
    copied[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(copy));
  }
  return copied;
}

bool is_plain_object(const py::handle& value) {
  return THPVariable_CheckExact(value.ptr()) && is_plain(THPVariable_Unpack(value.ptr()));
}

bool is_dense_object(const py::handle& value) {
  return THPVariable_Check(value.ptr()) && is_dense(THPVariable_Unpack(value.ptr()));
}

// Of each tensor that lies in the host's memory as one piece the checksum of a sample; else None.
py::list checksums_of_samples(const py::list& tensors, std::uint64_t most_bytes,
                              std::uint64_t stripes) {
  py::list found(tensors.size());
  std::vector<std::size_t> numbers;
  std::vector<at::Tensor> sampled;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    found[i] = py::none();
    if (!is_plain_object(tensors[i])) continue;
    const at::Tensor& tensor = THPVariable_Unpack(py::handle(tensors[i]).ptr());
    if (!tensor.is_cpu() || !tensor.is_contiguous() || !is_dense(tensor)) continue;
    numbers.push_back(i);
    sampled.push_back(tensor);
  }
  std::vector<std::uint32_t> checksums;
  checksums.reserve(sampled.size());
  {
    const ReleasedGil released;
    for (const at::Tensor& tensor : sampled) {
      const auto* memory = static_cast<const std::byte*>(tensor.const_data_ptr());
      checksums.push_back(format::crc32_of_sample({memory, tensor.nbytes()},
                                                  {tensor.itemsize(), most_bytes, stripes}));
    }
  }
  for (std::size_t i = 0; i < numbers.size(); ++i) found[numbers[i]] = checksums[i];
  return found;
}

}  // namespace

void bind_save(py::module_& module) {
  module.def("checksums_of_samples", &checksums_of_samples, py::arg("tensors"),
             py::arg("most_bytes"), py::arg("stripes"));
  module.def("is_plain", &is_plain_object, py::arg("value"));
  module.def("is_dense", &is_dense_object, py::arg("tensor"));
  module.def("pool_bytes", [] { return staging::ChunkPool::instance().kept_bytes(); });
  module.def(
      "trim_pool",
      [](std::size_t bytes) {
        const ReleasedGil released;
        staging::ChunkPool::instance().trim(bytes);
      },
      py::arg("bytes") = 0);
  module.def(
      "set_reserve",
      [](std::size_t bytes, std::size_t chunk_bytes) {
        if (chunk_bytes == 0 || chunk_bytes % os::kDirectAlignment != 0) {
          throw py::value_error("chunk_bytes must be a positive multiple of " +
                                std::to_string(os::kDirectAlignment));
        }
        staging::ChunkPool::instance().set_reserve(bytes, chunk_bytes);
      },
      py::arg("bytes"), py::arg("chunk_bytes"));
  module.def("grow_reserve", &grow_reserve, py::arg("most_bytes"), py::arg("device"),
             py::arg("background"));
  module.def("end_reserve", [] { staging::ChunkPool::instance().end_reserve(); });
  module.def("reserve_bytes", [] { return staging::ChunkPool::instance().reserve_bytes(); });
  module.def("reserved_bytes", [] { return staging::ChunkPool::instance().reserved_bytes(); });
  module.def("copy_to_pool", &copy_to_pool, py::arg("tensors"));
  module.def("start_save", &start_save, py::arg("directory"), py::arg("prefix"), py::arg("names"),
             py::arg("values"), py::kw_only(), py::arg("buckets"), py::arg("file_per_item"),
             py::arg("separation_hint"), py::arg("chunk_bytes"), py::arg("max_host_bytes"),
             py::arg("direct_io"), py::arg("sync"), py::arg("background"));
  py::class_<Save>(module, "Save")
      .def("wait", &Save::wait, py::arg("seconds"))
      .def("wait_staged", &Save::wait_staged, py::arg("seconds"))
      .def("wait_submitted", &Save::wait_submitted, py::arg("seconds"))
      .def("make_stream_wait", &Save::make_stream_wait, py::arg("device"), py::arg("stream"))
      .def("release_sources", &Save::release_sources)
      .def("elapsed", &Save::elapsed)
      .def("timing", &Save::timing)
      .def("trace", &Save::trace)
      .def("progress", &Save::progress)
      .def("unfinished", &Save::unfinished)
      .def("cancel", &Save::cancel)
      .def("results", &Save::results)
      .def_property_readonly("file_names", &Save::file_names);
}

}  // namespace torch_ckpt::python
