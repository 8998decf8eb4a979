#include <torch/csrc/autograd/python_variable.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/save_plan.h"
#include "engine/save_session.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/options.h"
#include "python/tensors.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

// A save under way, with all that keeps its sources alive.
class Save {
 public:
  Save(std::vector<at::Tensor> tensors, std::vector<py::buffer_info> buffers, engine::SavePlan plan)
      : tensors_(std::move(tensors)),
        buffers_(std::move(buffers)),
        file_names_(std::move(plan.file_names)),
        places_(std::move(plan.places)) {}

  // The engine reads the sources until the session has ended, so dropping an unfinished save ends
  // it first.
  ~Save() {
    if (session_ == nullptr) return;
    py::gil_scoped_release release;
    if (session_->wait_for(std::chrono::milliseconds(0))) return;
    session_->cancel();
    while (!session_->wait_for(std::chrono::hours(1))) {
    }
  }
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  void start(const std::string& directory, std::vector<engine::FileJob> files,
             const engine::SaveOptions& options) {
    Result<std::shared_ptr<engine::SaveSession>> session = [&] {
      py::gil_scoped_release release;
      return engine::SaveSession::start(directory, std::move(files), options);
    }();
    session_ = unwrap(std::move(session));
  }

  bool wait(double seconds) {
    bool done = false;
    {
      py::gil_scoped_release release;
      done = session_->wait_for(
          std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000.0)));
    }
    if (!done) return false;
    if (auto outcome = session_->outcome(); !outcome) raise(outcome.error());
    return true;
  }

  py::tuple progress() const {
    const engine::SaveProgress now = session_->progress();
    return py::make_tuple(now.bytes_planned, now.bytes_staged, now.bytes_written, now.files_planned,
                          now.files_done);
  }

  void cancel() { session_->cancel(); }

  /// (file name, offset, length, payload CRC-32) of each item, in the order given.
  py::list results() const {
    std::vector<py::str> names;
    for (const std::string& name : file_names_) names.emplace_back(name);
    py::list rows(places_.size());
    for (std::size_t i = 0; i < places_.size(); ++i) {
      const auto [file, index] = places_[i];
      const engine::ImageItem& item = session_->image(file).items()[index];
      rows[i] =
          py::make_tuple(names[file], item.offset, item.bytes, session_->checksums(file)[index]);
    }
    return rows;
  }

  const std::vector<std::string>& file_names() const { return file_names_; }

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<py::buffer_info> buffers_;
  std::vector<std::string> file_names_;
  std::vector<engine::ItemPlace> places_;
  std::shared_ptr<engine::SaveSession> session_;
};

std::unique_ptr<Save> start_save(const std::string& directory, const std::string& prefix,
                                 const py::list& names, const py::list& values, std::size_t buckets,
                                 bool file_per_item, const std::string& separation_hint,
                                 std::size_t chunk_bytes, std::size_t max_host_bytes,
                                 const py::object& direct_io, bool sync) {
  if (names.size() != values.size()) throw py::value_error("one name for each value");
  std::vector<at::Tensor> tensors;
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
      tensors.push_back(std::move(span.owner));
    } else {
      py::buffer_info bytes = py::reinterpret_borrow<py::buffer>(value).request();
      item.source.address = static_cast<const std::byte*>(bytes.ptr);
      item.source.bytes = static_cast<std::uint64_t>(bytes.size * bytes.itemsize);
      buffers.push_back(std::move(bytes));
    }
    items.push_back(std::move(item));
  }
  engine::NamingOptions naming;
  naming.directory = directory;
  naming.prefix = prefix;
  naming.buckets = buckets;
  naming.file_per_item = file_per_item;
  naming.separation_hint = separation_hint;
  engine::SavePlan plan = unwrap(engine::plan_save(std::move(items), naming));
  engine::SaveOptions options;
  options.parallel_files = buckets;
  options.chunk_bytes = chunk_bytes;
  options.max_host_bytes = max_host_bytes;
  options.direct_io = direct_io_option(direct_io);
  options.sync = sync;
  std::vector<engine::FileJob> files = std::move(plan.files);
  auto save = std::make_unique<Save>(std::move(tensors), std::move(buffers), std::move(plan));
  save->start(directory, std::move(files), options);
  return save;
}

bool is_plain_object(const py::handle& value) {
  return THPVariable_CheckExact(value.ptr()) && is_plain(THPVariable_Unpack(value.ptr()));
}

bool is_dense_object(const py::handle& value) {
  return THPVariable_Check(value.ptr()) && is_dense(THPVariable_Unpack(value.ptr()));
}

}  // namespace

void bind_save(py::module_& module) {
  module.def("is_plain", &is_plain_object, py::arg("value"));
  module.def("is_dense", &is_dense_object, py::arg("tensor"));
  module.def("start_save", &start_save, py::arg("directory"), py::arg("prefix"), py::arg("names"),
             py::arg("values"), py::kw_only(), py::arg("buckets"), py::arg("file_per_item"),
             py::arg("separation_hint"), py::arg("chunk_bytes"), py::arg("max_host_bytes"),
             py::arg("direct_io"), py::arg("sync"));
  py::class_<Save>(module, "Save")
      .def("wait", &Save::wait, py::arg("seconds"))
      .def("progress", &Save::progress)
      .def("cancel", &Save::cancel)
      .def("results", &Save::results)
      .def_property_readonly("file_names", &Save::file_names);
}

}  // namespace torch_ckpt::python
