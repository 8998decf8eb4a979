#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checked_math.h"
#include "engine/load_session.h"
#include "planning/region.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/options.h"
#include "python/tensors.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using Extents = std::vector<std::uint64_t>;

// One wanted region of one stored tensor, and the tensor that receives it.
struct Item {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  const format::Dtype* dtype = nullptr;
  at::ScalarType scalar_type = at::kByte;
  Extents sizes;
  Extents region_offsets;
  Extents region_lengths;
  at::Tensor target;
  std::string name;
};

struct Options {
  engine::LoadOptions engine;
  std::uint64_t max_inflight_bytes = 0;
  py::object progress;  // callable(bytes_done) or None
};

// Ends a load whose waiting was left by an exception: its threads write into tensors that would go.
class EndsLoad {
 public:
  explicit EndsLoad(engine::LoadSession& session) : session_(session) {}
  ~EndsLoad() {
    py::gil_scoped_release release;
    if (session_.wait_for(std::chrono::milliseconds(0))) return;
    session_.cancel();
    while (!session_.wait_for(std::chrono::hours(1))) {
    }
  }
  EndsLoad(const EndsLoad&) = delete;
  EndsLoad& operator=(const EndsLoad&) = delete;

 private:
  engine::LoadSession& session_;
};

// Waits with the GIL released; looks up now and then for Ctrl-C and to report progress.
void wait_for(engine::LoadSession& session, const Options& options, std::uint64_t done_before) {
  const EndsLoad guard(session);
  for (bool done = false; !done;) {
    {
      py::gil_scoped_release release;
      done = session.wait_for(std::chrono::milliseconds(100));
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!options.progress.is_none()) options.progress(done_before + session.bytes_done());
  }
}

std::shared_ptr<engine::LoadSession> run(const std::vector<std::string>& paths,
                                         std::vector<engine::ReadRequest> requests,
                                         const std::vector<std::string>& names,
                                         const Options& options, std::uint64_t temporary_bytes,
                                         std::uint64_t done_before) {
  engine::LoadOptions engine_options = options.engine;
  // Scratch memory gets what the temporary tensors leave of the limit.
  engine_options.max_scratch_bytes =
      std::max<std::uint64_t>(options.max_inflight_bytes - temporary_bytes, 1U << 20);
  Result<std::shared_ptr<engine::LoadSession>> started = [&] {
    py::gil_scoped_release release;
    return engine::LoadSession::start(paths, std::move(requests), engine_options);
  }();
  std::shared_ptr<engine::LoadSession> session = unwrap(std::move(started));
  wait_for(*session, options, done_before);
  if (auto failure = session->failure()) {
    raise(failure->error,
          failure->request < names.size() ? names[failure->request] : std::string());
  }
  return session;
}

std::vector<std::int64_t> signed_of(const Extents& values) {
  return {values.begin(), values.end()};
}

/// Whether the engine may write into the tensor's memory.
bool is_direct_target(const at::Tensor& target, const format::Dtype* dtype) {
  return is_plain(target) && target.is_cpu() && target.is_contiguous() && !target.is_conj() &&
         !target.is_neg() && dtype_of(target) == dtype;
}

std::uint64_t product(const Extents& values) {
  std::uint64_t result = 1;
  for (const std::uint64_t value : values) {
    const auto next = checked_mul(result, value);
    if (!next) throw py::value_error("a stored tensor's size overflows 64 bits");
    result = *next;
  }
  return result;
}

// The rows along the outermost dimension that cover an item's region: what is read when the region
// is not one run of bytes.
planning::Run covering_rows(const Item& item) {
  if (item.sizes.empty()) return {0, 1};
  std::uint64_t row = 1;
  for (std::size_t d = 1; d < item.sizes.size(); ++d) row *= item.sizes[d];
  return {item.region_offsets[0] * row, item.region_lengths[0] * row};
}

// What one item needs of the engine.
struct Step {
  std::size_t item = 0;
  engine::ReadRequest request;
  at::Tensor temporary;  // undefined where the target is read into directly
};

Step plan_step(const Item& item, std::size_t index) {
  Step step;
  step.item = index;
  step.request.kind = engine::ReadKind::tensor;
  step.request.file = item.file;
  step.request.offset = item.offset;
  step.request.length = item.length;
  step.request.dtype = item.dtype;
  step.request.sizes = item.sizes;
  const auto run = planning::contiguous_run(item.sizes, item.region_offsets, item.region_lengths);
  const bool direct = run && is_direct_target(item.target, item.dtype);
  const planning::Run wanted = direct ? *run : covering_rows(item);
  step.request.begin = wanted.begin * item.dtype->item_bytes;
  step.request.bytes = wanted.count * item.dtype->item_bytes;
  if (direct && step.request.bytes > 0) {
    step.request.destination = static_cast<std::byte*>(item.target.mutable_data_ptr());
  }
  return step;
}

bool needs_temporary(const Step& step) {
  return step.request.destination == nullptr && step.request.bytes > 0;
}

/// The tensor that lies in `bytes` (uint8) with the given geometry.
at::Tensor view_as(const at::Tensor& bytes, at::ScalarType dtype, const Extents& sizes,
                   const Extents& strides, std::uint64_t offset) {
  at::Tensor typed = at::empty({0}, at::TensorOptions().dtype(dtype));
  typed.set_(bytes.storage(), static_cast<std::int64_t>(offset), signed_of(sizes),
             signed_of(strides));
  return typed;
}

void copy_region(const Item& item, at::Tensor stored, bool outer_already_cut) {
  for (std::size_t d = 0; d < item.sizes.size(); ++d) {
    const std::uint64_t begin = d == 0 && outer_already_cut ? 0 : item.region_offsets[d];
    stored = stored.narrow(static_cast<std::int64_t>(d), static_cast<std::int64_t>(begin),
                           static_cast<std::int64_t>(item.region_lengths[d]));
  }
  item.target.copy_(stored);
}

void finish_temporary(const Item& item, const Step& step) {
  Extents sizes = item.sizes;
  if (!sizes.empty()) sizes[0] = item.region_lengths[0];
  Extents strides(sizes.size(), 1);
  for (std::size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
  copy_region(item, view_as(step.temporary, item.scalar_type, sizes, strides, 0), true);
}

at::Tensor temporary_bytes(std::uint64_t bytes) {
  return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
}

class TensorLoad {
 public:
  TensorLoad(std::vector<std::string> paths, std::vector<Item> items, Options options)
      : paths_(std::move(paths)), items_(std::move(items)), options_(std::move(options)) {}

  /// Returns the indices of the items that torch.load must read.
  std::vector<std::size_t> run_all() {
    std::vector<Step> wave;
    std::uint64_t held = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      Step step = plan_step(items_[i], i);
      if (needs_temporary(step)) {
        const std::uint64_t bytes = step.request.bytes;
        require_within_limit(items_[i], bytes);
        if (held + bytes > options_.max_inflight_bytes) {
          run_wave(std::move(wave), held);
          wave.clear();
          held = 0;
        }
        held += bytes;
      }
      wave.push_back(std::move(step));
    }
    run_wave(std::move(wave), held);
    return unknown_;
  }

 private:
  void require_within_limit(const Item& item, std::uint64_t bytes) const {
    if (bytes <= options_.max_inflight_bytes) return;
    throw py::value_error(item.name + ": reading it takes " + std::to_string(bytes) +
                          " bytes at once, more than max_inflight_bytes=" +
                          std::to_string(options_.max_inflight_bytes));
  }

  void run_wave(std::vector<Step> wave, std::uint64_t held) {
    if (wave.empty()) return;
    std::vector<engine::ReadRequest> requests;
    std::vector<std::string> names;
    requests.reserve(wave.size());
    names.reserve(wave.size());
    for (Step& step : wave) {
      if (needs_temporary(step)) {
        step.temporary = temporary_bytes(step.request.bytes);
        step.request.destination = static_cast<std::byte*>(step.temporary.mutable_data_ptr());
      }
      names.push_back(items_[step.item].name);
      requests.push_back(step.request);
    }
    const auto session = run(paths_, std::move(requests), names, options_, held, bytes_done_);
    bytes_done_ += session->bytes_done();
    for (std::size_t i = 0; i < wave.size(); ++i) {
      Step& step = wave[i];
      const Item& item = items_[step.item];
      const engine::ReadOutcome& outcome = session->outcomes()[i];
      switch (outcome.status) {
        case engine::ReadStatus::done:
          if (step.temporary.defined()) {
            finish_temporary(item, step);
          } else if (!item.target.is_inference()) {
            // Written behind autograd's back; the version tells it that the values changed.
            item.target.unsafeGetTensorImpl()->bump_version();
          }
          break;
        case engine::ReadStatus::other_layout:
          read_storage(item, *outcome.header);
          break;
        case engine::ReadStatus::unknown_record:
          unknown_.push_back(step.item);
          break;
        case engine::ReadStatus::pending:
          throw std::logic_error("a read ended without a result");
      }
      step.temporary = at::Tensor();
    }
  }

  // Tensors stored transposed, conjugated or otherwise not row-major: the whole storage is read and
  // viewed as the record says.
  void read_storage(const Item& item, const format::TensorHeader& header) {
    require_within_limit(item, header.storage_bytes);
    const at::Tensor bytes = temporary_bytes(header.storage_bytes);
    engine::ReadRequest request;
    request.kind = engine::ReadKind::storage;
    request.file = item.file;
    request.offset = item.offset;
    request.length = item.length;
    request.dtype = item.dtype;
    request.sizes = item.sizes;
    request.bytes = header.storage_bytes;
    request.destination = static_cast<std::byte*>(bytes.mutable_data_ptr());
    const auto session =
        run(paths_, {std::move(request)}, {item.name}, options_, header.storage_bytes, bytes_done_);
    bytes_done_ += session->bytes_done();
    at::Tensor stored =
        view_as(bytes, item.scalar_type, header.sizes, header.strides, header.storage_offset);
    if (header.conj) stored = stored.conj();
    if (header.neg) stored = stored._neg_view();
    copy_region(item, stored, false);
  }

  const std::vector<std::string> paths_;
  const std::vector<Item> items_;
  const Options options_;
  std::vector<std::size_t> unknown_;
  std::uint64_t bytes_done_ = 0;
};

Options make_options(std::size_t threads, std::uint64_t max_inflight_bytes,
                     const py::object& direct_io, bool verify, py::object progress) {
  Options options;
  options.engine.threads = threads;
  options.engine.direct_io = direct_io_option(direct_io);
  options.engine.verify = verify;
  options.max_inflight_bytes = max_inflight_bytes;
  options.progress = std::move(progress);
  return options;
}

Extents extents_of(const py::handle& tuple) {
  Extents values;
  const auto size = PySequence_Size(tuple.ptr());
  if (size < 0) throw py::error_already_set();
  values.reserve(static_cast<std::size_t>(size));
  for (const py::handle value : py::reinterpret_borrow<py::sequence>(tuple)) {
    const long long number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (number < 0) throw py::value_error("a size or offset in the metadata is negative");
    values.push_back(static_cast<std::uint64_t>(number));
  }
  return values;
}

/// An offset or length of the metadata, which may be damaged or mean harm.
std::uint64_t number_of(const py::handle& value, const std::string& name, const char* what) {
  const std::uint64_t number =
      PyLong_Check(value.ptr()) ? PyLong_AsUnsignedLongLong(value.ptr()) : std::uint64_t(-1);
  if (number == std::uint64_t(-1)) {
    PyErr_Clear();
    raise(format_error(Errc::range_past_end, std::string("the metadata gives an impossible ") +
                                                 what + ": " + py::repr(value).cast<std::string>()),
          name);
  }
  return number;
}

std::string describe(const Extents& values) {
  std::string text = "[";
  for (const std::uint64_t value : values) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  }
  return text + "]";
}

/// Row: (name, file, offset, length, dtype, sizes, region offsets, region lengths, target). Empty
/// region tuples mean the whole tensor.
Item item_of(const py::tuple& row) {
  Item item;
  item.name = row[0].cast<std::string>();
  item.file = row[1].cast<std::size_t>();
  item.offset = number_of(row[2], item.name, "offset");
  item.length = number_of(row[3], item.name, "length");
  const py::handle dtype = row[4];
  if (!THPDtype_Check(dtype.ptr())) throw py::type_error(item.name + ": not a torch.dtype");
  item.scalar_type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  item.dtype = format::find_dtype(reinterpret_cast<THPDtype*>(dtype.ptr())->name);
  item.sizes = extents_of(row[5]);
  item.region_offsets = extents_of(row[6]);
  item.region_lengths = extents_of(row[7]);
  if (item.region_lengths.empty() && !item.sizes.empty()) {
    item.region_offsets.assign(item.sizes.size(), 0);
    item.region_lengths = item.sizes;
  }
  item.target = THPVariable_Unpack(row[8].ptr());
  product(item.sizes);
  if (!planning::box_inside(item.sizes, item.region_offsets, item.region_lengths)) {
    throw py::value_error(item.name + ": the wanted region " + describe(item.region_lengths) +
                          " at " + describe(item.region_offsets) +
                          " does not lie within the stored " + describe(item.sizes));
  }
  const Extents target_sizes(item.target.sizes().begin(), item.target.sizes().end());
  if (target_sizes != item.region_lengths) {
    throw py::value_error(item.name + ": mismatch sizes: the target has " + describe(target_sizes) +
                          ", the wanted region " + describe(item.region_lengths));
  }
  return item;
}

std::vector<std::size_t> load_tensors(std::vector<std::string> paths, const py::list& rows,
                                      std::size_t threads, std::uint64_t max_inflight_bytes,
                                      const py::object& direct_io, bool verify,
                                      py::object progress) {
  std::vector<std::size_t> unknown;
  std::vector<std::size_t> positions;
  std::vector<Item> items;
  items.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Item item = item_of(py::reinterpret_borrow<py::tuple>(rows[i]));
    if (item.dtype == nullptr) {
      unknown.push_back(i);
      continue;
    }
    positions.push_back(i);
    items.push_back(std::move(item));
  }
  const Options options =
      make_options(threads, max_inflight_bytes, direct_io, verify, std::move(progress));
  // Inference tensors may only be changed inside inference mode, and the others may be there too.
  const bool inference = std::any_of(items.begin(), items.end(),
                                     [](const Item& item) { return item.target.is_inference(); });
  std::optional<c10::InferenceMode> guard;
  if (inference) guard.emplace(true);
  for (const std::size_t position :
       TensorLoad(std::move(paths), std::move(items), options).run_all()) {
    unknown.push_back(positions[position]);
  }
  return unknown;
}

/// Row: (name, file, offset, length). Returns the bytes of each.
py::list load_bytes(std::vector<std::string> paths, const py::list& rows, std::size_t threads,
                    std::uint64_t max_inflight_bytes, const py::object& direct_io, bool verify) {
  py::list values;
  std::vector<engine::ReadRequest> requests;
  std::vector<std::string> names;
  for (const py::handle handle : rows) {
    const auto row = py::reinterpret_borrow<py::tuple>(handle);
    engine::ReadRequest request;
    names.push_back(row[0].cast<std::string>());
    request.file = row[1].cast<std::size_t>();
    request.offset = number_of(row[2], names.back(), "offset");
    request.length = number_of(row[3], names.back(), "length");
    request.bytes = request.length;
    if (request.length > max_inflight_bytes) {
      throw py::value_error(
          names.back() + ": reading it takes " + std::to_string(request.length) +
          " bytes at once, more than max_inflight_bytes=" + std::to_string(max_inflight_bytes));
    }
    py::bytearray buffer(nullptr, 0);
    if (PyByteArray_Resize(buffer.ptr(), static_cast<Py_ssize_t>(request.length)) != 0) {
      throw py::error_already_set();
    }
    request.destination = reinterpret_cast<std::byte*>(PyByteArray_AS_STRING(buffer.ptr()));
    values.append(std::move(buffer));
    requests.push_back(std::move(request));
  }
  const Options options = make_options(threads, max_inflight_bytes, direct_io, verify, py::none());
  run(paths, std::move(requests), names, options, 0, 0);
  return values;
}

}  // namespace

void bind_load(py::module_& module) {
  module.def("load_tensors", &load_tensors, py::arg("paths"), py::arg("rows"), py::kw_only(),
             py::arg("threads"), py::arg("max_inflight_bytes"), py::arg("direct_io"),
             py::arg("verify"), py::arg("progress"));
  module.def("load_bytes", &load_bytes, py::arg("paths"), py::arg("rows"), py::kw_only(),
             py::arg("threads"), py::arg("max_inflight_bytes"), py::arg("direct_io"),
             py::arg("verify"));
}

}  // namespace torch_ckpt::python
