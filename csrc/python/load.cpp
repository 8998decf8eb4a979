#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <chrono>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checked_math.h"
#include "engine/load_session.h"
#include "os/directory.h"
#include "os/file.h"
#include "os/pages.h"
#include "planning/region.h"
#include "python/bindings.h"
#include "python/conversion.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/options.h"
#include "python/tensors.h"
#include "python/waiting.h"
#include "staging/device_copy.h"

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

// What a load never does without.
constexpr std::uint64_t kLeastScratchBytes = std::uint64_t{64} << 10;

std::shared_ptr<engine::LoadSession> run(const os::Directory& directory,
                                         const std::vector<engine::LoadFile>& files,
                                         std::vector<engine::ReadRequest> requests,
                                         const std::vector<std::string>& names,
                                         const Options& options, std::uint64_t held_bytes,
                                         std::uint64_t done_before) {
  engine::LoadOptions engine_options = options.engine;
  // Scratch memory gets what the rest of the load leaves of the limit.
  engine_options.max_scratch_bytes = options.max_inflight_bytes - held_bytes;
  for (const engine::ReadRequest& request : requests) {
    if (request.file >= files.size()) throw py::index_error("no file of that number");
  }
  auto session = without_gil([&]() -> Result<std::shared_ptr<engine::LoadSession>> {
    auto own = directory.duplicate();
    if (!own) return own.error();
    return engine::LoadSession::start(std::move(*own), files, std::move(requests), engine_options);
  });
  wait_for(*session, options.progress, done_before);
  pass_on_warnings();
  if (auto failure = session->failure()) {
    raise(failure->error,
          failure->request < names.size() ? names[failure->request] : std::string());
  }
  return session;
}

void require_within_limit(const std::string& name, std::uint64_t bytes, std::uint64_t limit) {
  if (bytes <= limit - kLeastScratchBytes) return;
  throw py::value_error(name + ": reading it takes " + std::to_string(bytes) +
                        " bytes at once, and max_inflight_bytes=" + std::to_string(limit) +
                        " leaves " + std::to_string(limit - kLeastScratchBytes));
}

std::vector<std::int64_t> signed_of(const Extents& values) {
  return {values.begin(), values.end()};
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

/// Whether the engine may write into the tensor's memory.
bool is_engine_target(const at::Tensor& target) {
  if (!is_plain(target) || target.is_conj() || target.is_neg()) return false;
  if (target.is_cuda()) return target.is_contiguous();
  // "Too hard" is every view with gaps. What surely overlaps copy_ refuses, by way of a copy.
  return at::has_internal_overlap(target) != at::MemOverlap::Yes;
}

/// An uninitialised tensor of `bytes` whose memory goes back to the system with it. Of malloc's the
/// heap keeps what is freed between other blocks, beyond every limit.
at::Tensor mapped_tensor(const Extents& sizes, at::ScalarType dtype, std::uint64_t bytes) {
  auto pages = std::make_shared<os::Pages>(
      unwrap(os::Pages::allocate(align_up(bytes, std::uint64_t{os::kDirectAlignment}))));
  std::byte* const address = pages->bytes().data();
  return at::from_blob(
      address, signed_of(sizes), [pages = std::move(pages)](void*) {},
      at::TensorOptions().dtype(dtype));
}

/// The tensor that lies in `bytes` (uint8) with the given geometry.
at::Tensor view_as(const at::Tensor& bytes, at::ScalarType dtype, const Extents& sizes,
                   const Extents& strides, std::uint64_t offset) {
  at::Tensor typed = at::empty({0}, at::TensorOptions().dtype(dtype));
  typed.set_(bytes.storage(), static_cast<std::int64_t>(offset), signed_of(sizes),
             signed_of(strides));
  return typed;
}

at::Tensor region_of(const Item& item, at::Tensor stored) {
  for (std::size_t d = 0; d < item.sizes.size(); ++d) {
    stored = stored.narrow(static_cast<std::int64_t>(d),
                           static_cast<std::int64_t>(item.region_offsets[d]),
                           static_cast<std::int64_t>(item.region_lengths[d]));
  }
  return stored;
}

// One reading of the engine for an item, or for some of its rows.
struct Step {
  std::size_t item = 0;
  engine::ReadRequest request;
  at::Tensor target;     // of the caller
  at::Tensor temporary;  // undefined where the engine writes into the target itself

  const at::Tensor& written() const { return temporary.defined() ? temporary : target; }
};

/// The memory that a tensor's elements lie in, by address.
std::pair<std::uintptr_t, std::uintptr_t> extent_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.has_storage()) return {0, 0};
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.unsafeGetTensorImpl()->data());
  return {begin, begin + (static_cast<std::uintptr_t>(last) + 1) * tensor.itemsize()};
}

// Which memory the names of a wave fill. Of two names that fill the same memory the later one wins,
// as in torch; read at once they would be mixed, and checksums of the one be those of the other.
class FilledMemory {
 public:
  /// False, and nothing is noted, where another name fills some of it.
  bool add(const std::string& name, const at::Tensor& target) {
    auto [begin, end] = extent_of(target);
    if (begin == end) return true;
    auto next = spans_.lower_bound(begin);
    if (next != spans_.begin() && std::prev(next)->second.end > begin) --next;
    auto last = next;
    for (; last != spans_.end() && last->first < end; ++last) {
      if (last->second.name != name) return false;
    }
    // Parts of one tensor may lie interleaved.
    for (auto span = next; span != last; ++span) {
      begin = std::min(begin, span->first);
      end = std::max(end, span->second.end);
    }
    spans_.erase(next, last);
    spans_.emplace(begin, Span{end, name});
    return true;
  }
  void clear() { spans_.clear(); }

 private:
  struct Span {
    std::uintptr_t end = 0;
    std::string name;
  };
  std::map<std::uintptr_t, Span> spans_;  // by begin; apart from each other
};

// Of copies that are spread on the device.
constexpr std::uint64_t kMostOnDevice = std::uint64_t{256} << 20;

class TensorLoad {
 public:
  TensorLoad(const os::Directory& directory, std::vector<engine::LoadFile> files,
             std::vector<Item> items, Options options)
      : directory_(directory),
        files_(std::move(files)),
        items_(std::move(items)),
        options_(std::move(options)) {}

  /// Returns the indices of the items that torch.load must read.
  std::vector<std::size_t> run_all() {
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (!filled_.add(items_[i].name, items_[i].target)) {
        run_all_waves();
        filled_.add(items_[i].name, items_[i].target);
      }
      if (!add(i, nullptr)) {
        throw py::value_error(items_[i].name + ": the stored tensor's size overflows 64 bits");
      }
    }
    run_all_waves();
    return unknown_;
  }

 private:
  using Layout = std::shared_ptr<const format::TensorHeader>;

  void run_all_waves() {
    run_wave();
    // Tensors that are stored transposed, conjugated or otherwise not row-major.
    for (const auto& [item, header] : std::exchange(layouts_, {})) {
      if (add(item, header)) continue;
      run_wave();
      read_storage(items_[item], *header);
    }
    run_wave();
    if (!layouts_.empty()) throw std::logic_error("a record has changed while it was read");
    filled_.clear();
  }

  // False where the stored elements overlap.
  bool add(std::size_t index, const Layout& layout) {
    const Item& item = items_[index];
    // On a device elements arrive in the order in which they are stored.
    const bool direct =
        is_engine_target(item.target) && (layout == nullptr || item.target.is_cpu());
    if (direct) return add_rows(index, layout, 0, 0, item.target, at::Tensor());
    if (item.target.is_cuda() && staging::device_support() != nullptr && layout == nullptr &&
        dtype_of(item.target) != nullptr) {
      // The device spreads the elements itself.
      return add_with_temporary(index, layout, true);
    }
    return add_with_temporary(index, layout, false);
  }

  // In so many parts that each of them stays within the limit.
  bool add_with_temporary(std::size_t index, const Layout& layout, bool on_device) {
    const Item& item = items_[index];
    const std::uint64_t rows = item.sizes.empty() ? 1 : item.region_lengths[0];
    const std::uint64_t item_bytes = on_device ? item.target.itemsize() : item.dtype->item_bytes;
    const std::uint64_t bytes = product(item.region_lengths) * item_bytes;
    if (bytes == 0) return true;
    const std::uint64_t row_bytes = bytes / rows;
    if (!on_device) require_within_limit(item.name, row_bytes, options_.max_inflight_bytes);
    const std::uint64_t most = on_device ? kMostOnDevice : options_.max_inflight_bytes / 2;
    std::uint64_t& held = on_device ? held_on_device_ : held_;
    const std::uint64_t part = std::max<std::uint64_t>(1, most / row_bytes);
    for (std::uint64_t begin = 0; begin < rows; begin += part) {
      const std::uint64_t count = std::min(part, rows - begin);
      if (held > 0 && held + count * row_bytes > most) run_wave();
      Extents lengths = item.region_lengths;
      at::Tensor target = item.target;
      if (!lengths.empty()) {
        lengths[0] = count;
        target =
            target.narrow(0, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(count));
      }
      const at::Tensor temporary =
          on_device ? at::empty(signed_of(lengths), item.target.options())
                    : mapped_tensor(lengths, item.scalar_type, count * row_bytes);
      held += count * row_bytes;
      if (!add_rows(index, layout, begin, count, target, temporary)) return false;
    }
    return true;
  }

  // Some rows of an item's region; all of them where `count` is 0.
  bool add_rows(std::size_t index, const Layout& layout, std::uint64_t begin, std::uint64_t count,
                const at::Tensor& target, const at::Tensor& temporary) {
    const Item& item = items_[index];
    Step step;
    step.item = index;
    step.target = target;
    step.temporary = temporary;
    const at::Tensor& written = step.written();
    Extents offsets = item.region_offsets;
    Extents lengths = item.region_lengths;
    engine::ReadRequest& request = step.request;
    if (count > 0 && !lengths.empty()) {
      // Only the archive's checksum of the whole may be known, and no later part sees all of it.
      request.whole = begin == 0 && count < lengths[0] && lengths == item.sizes;
      offsets[0] += begin;
      lengths[0] = count;
    }
    request.kind = engine::ReadKind::tensor;
    request.file = item.file;
    request.offset = item.offset;
    request.length = item.length;
    request.dtype = item.dtype;
    request.sizes = item.sizes;
    request.layout = layout;
    const std::vector<std::int64_t> strides = written.strides().vec();
    auto region = planning::Region::of_box(
        item.sizes, layout == nullptr ? Extents{} : layout->strides, offsets, lengths, strides,
        item.dtype->item_bytes, written.itemsize());
    if (!region || (layout != nullptr && layout->storage_offset != 0)) return false;
    request.region = std::move(*region);
    request.target.convert = conversion(item, written.scalar_type(), layout.get());
    if (written.is_cuda()) request.target.device = written.get_device();
    if (written.numel() > 0) {
      request.target.address = static_cast<std::byte*>(written.mutable_data_ptr());
    }
    wave_.push_back(std::move(step));
    return true;
  }

  staging::Convert conversion(const Item& item, at::ScalarType to,
                              const format::TensorHeader* layout) {
    const bool conj = layout != nullptr && layout->conj;
    const bool neg = layout != nullptr && layout->neg;
    if (to == item.scalar_type && !conj && !neg) return {};
    return conversion_between(item.name, item.scalar_type, to, conj, neg);
  }

  void run_wave() {
    if (wave_.empty()) return;
    std::vector<Step> wave = std::move(wave_);
    wave_.clear();
    const std::uint64_t held = std::exchange(held_, 0);
    const bool spread_on_device = std::exchange(held_on_device_, 0) > 0;
    std::vector<engine::ReadRequest> requests;
    std::vector<std::string> names;
    requests.reserve(wave.size());
    names.reserve(wave.size());
    for (Step& step : wave) {
      names.push_back(items_[step.item].name);
      requests.push_back(std::move(step.request));
    }
    const auto session =
        run(directory_, files_, std::move(requests), names, options_, held, bytes_done_);
    bytes_done_ += session->bytes_done();
    for (std::size_t i = 0; i < wave.size(); ++i) {
      const engine::ReadOutcome& outcome = session->outcomes()[i];
      switch (outcome.status) {
        case engine::ReadStatus::done:
          finish(wave[i]);
          break;
        case engine::ReadStatus::other_layout:
          // Once for all the parts that an item was read in.
          if (layouts_.empty() || layouts_.back().first != wave[i].item) {
            layouts_.emplace_back(wave[i].item,
                                  std::make_shared<format::TensorHeader>(*outcome.header));
          }
          break;
        case engine::ReadStatus::unknown_record:
          if (unknown_.empty() || unknown_.back() != wave[i].item) unknown_.push_back(wave[i].item);
          break;
        case engine::ReadStatus::pending:
          throw std::logic_error("a read ended without a result");
      }
    }
    if (spread_on_device) wait_for_device(wave);
  }

  // Until the copies have been spread their memory must not be that of others, which the next
  // wave's streams write to without waiting for this one.
  static void wait_for_device(const std::vector<Step>& wave) {
    const py::object cuda = py::module_::import("torch").attr("cuda");
    std::set<int> devices;
    for (const Step& step : wave) {
      if (step.target.is_cuda()) devices.insert(step.target.get_device());
    }
    for (const int device : devices) cuda.attr("current_stream")(device).attr("synchronize")();
  }

  static void finish(Step& step) {
    if (step.temporary.defined()) {
      step.target.copy_(step.temporary);
      step.temporary = at::Tensor();
    } else if (!step.target.is_inference()) {
      // Written behind autograd's back; the version tells it that the values changed.
      step.target.unsafeGetTensorImpl()->bump_version();
    }
  }

  // Elements that overlap: the whole storage is read and viewed as the record says.
  void read_storage(const Item& item, const format::TensorHeader& header) {
    require_within_limit(item.name, header.storage_bytes, options_.max_inflight_bytes);
    const at::Tensor bytes = mapped_tensor({header.storage_bytes}, at::kByte,
                                           std::max<std::uint64_t>(header.storage_bytes, 1));
    engine::ReadRequest request;
    request.kind = engine::ReadKind::storage;
    request.file = item.file;
    request.offset = item.offset;
    request.length = item.length;
    request.dtype = item.dtype;
    request.sizes = item.sizes;
    request.region = planning::Region::of_bytes(0, header.storage_bytes);
    request.target.address = static_cast<std::byte*>(bytes.mutable_data_ptr());
    const auto session = run(directory_, files_, {std::move(request)}, {item.name}, options_,
                             header.storage_bytes, bytes_done_);
    if (session->outcomes()[0].status != engine::ReadStatus::done) {
      throw std::logic_error("a record has changed while it was read");
    }
    bytes_done_ += product(item.region_lengths) * item.dtype->item_bytes;
    at::Tensor stored =
        view_as(bytes, item.scalar_type, header.sizes, header.strides, header.storage_offset);
    if (header.conj) stored = stored.conj();
    if (header.neg) stored = stored._neg_view();
    item.target.copy_(region_of(item, stored));
  }

  const os::Directory& directory_;
  const std::vector<engine::LoadFile> files_;
  const std::vector<Item> items_;
  const Options options_;
  std::vector<Step> wave_;
  FilledMemory filled_;     // by this wave and those before, since the last time it was cleared
  std::uint64_t held_ = 0;  // by the temporaries of the wave
  std::uint64_t held_on_device_ = 0;
  std::vector<std::pair<std::size_t, Layout>> layouts_;
  std::vector<std::size_t> unknown_;
  std::uint64_t bytes_done_ = 0;
};

Options make_options(std::size_t threads, std::uint64_t max_inflight_bytes,
                     const py::object& direct_io, bool verify, py::object progress,
                     const py::iterable& ready) {
  if (max_inflight_bytes < kLeastScratchBytes) {
    throw py::value_error("max_inflight_bytes must be at least " +
                          std::to_string(kLeastScratchBytes));
  }
  Options options;
  options.engine.threads = threads;
  options.engine.direct_io = direct_io_option(direct_io);
  options.engine.verify = verify;
  options.max_inflight_bytes = max_inflight_bytes;
  options.progress = std::move(progress);
  for (const py::handle event_of : ready) {
    const auto [device, event] = event_of.cast<std::pair<int, std::uintptr_t>>();
    options.engine.ready.push_back({device, reinterpret_cast<void*>(event)});
  }
  return options;
}

/// (name, checksum table) of each file.
std::vector<engine::LoadFile> files_of(const py::list& rows) {
  std::vector<engine::LoadFile> files;
  for (const py::handle row : rows) {
    auto [name, table] = row.cast<std::pair<std::string, std::string>>();
    files.push_back({std::move(name), std::move(table)});
  }
  return files;
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
  if (!THPVariable_Check(py::handle(row[8]).ptr())) {
    throw py::type_error(item.name + ": the target is not a tensor");
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

std::vector<std::size_t> load_tensors(const py::list& files, const py::list& rows,
                                      const os::Directory& directory, std::size_t threads,
                                      std::uint64_t max_inflight_bytes, const py::object& direct_io,
                                      bool verify, py::object progress, const py::iterable& ready) {
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
      make_options(threads, max_inflight_bytes, direct_io, verify, std::move(progress), ready);
  // Inference tensors may only be changed inside inference mode, and the others may be there too.
  const bool inference = std::any_of(items.begin(), items.end(),
                                     [](const Item& item) { return item.target.is_inference(); });
  std::optional<c10::InferenceMode> guard;
  if (inference) guard.emplace(true);
  for (const std::size_t position :
       TensorLoad(directory, files_of(files), std::move(items), options).run_all()) {
    unknown.push_back(positions[position]);
  }
  return unknown;
}

/// Before room is made for a record: the metadata may make up a length.
void require_in_file(const std::string& name, const os::Directory& directory,
                     const std::string& file_name, const engine::ReadRequest& request) {
  const os::File file = unwrap(directory.open_for_read(file_name), name);
  const std::uint64_t bytes = unwrap(file.size(), name);
  if (inside(request.offset, request.length, bytes)) return;
  Error error = format_error(Errc::range_past_end,
                             "the metadata gives a record of " + std::to_string(request.length) +
                                 " bytes, but the file has " + std::to_string(bytes),
                             request.offset);
  error.path = file.path();
  raise(error, name);
}

/// Row: (name, file, offset, length). Returns the bytes of each.
py::list load_bytes(const py::list& files, const py::list& rows, const os::Directory& directory,
                    std::size_t threads, std::uint64_t max_inflight_bytes,
                    const py::object& direct_io, bool verify) {
  const Options options =
      make_options(threads, max_inflight_bytes, direct_io, verify, py::none(), py::list());
  const std::vector<engine::LoadFile> named = files_of(files);
  py::list values;
  std::vector<engine::ReadRequest> requests;
  std::vector<std::string> names;
  std::uint64_t held = 0;
  for (const py::handle handle : rows) {
    const auto row = py::reinterpret_borrow<py::tuple>(handle);
    engine::ReadRequest request;
    names.push_back(row[0].cast<std::string>());
    request.file = row[1].cast<std::size_t>();
    request.offset = number_of(row[2], names.back(), "offset");
    request.length = number_of(row[3], names.back(), "length");
    request.region = planning::Region::of_bytes(0, request.length);
    require_in_file(names.back(), directory, named.at(request.file).name, request);
    require_within_limit(names.back(), request.length, max_inflight_bytes);
    held += request.length;
    require_within_limit(names.back(), held, max_inflight_bytes);
    // bytes, which io.BytesIO shares with whoever reads them.
    auto value = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(request.length)));
    if (!value) throw py::error_already_set();
    request.target.address = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(value.ptr()));
    values.append(std::move(value));
    requests.push_back(std::move(request));
  }
  run(directory, named, std::move(requests), names, options, held, 0);
  return values;
}

}  // namespace

void bind_load(py::module_& module) {
  module.attr("load_chunk_bytes") = engine::LoadOptions{}.chunk_bytes;
  module.attr("least_scratch_bytes") = kLeastScratchBytes;
  module.def("load_tensors", &load_tensors, py::arg("files"), py::arg("rows"), py::kw_only(),
             py::arg("directory"), py::arg("threads"), py::arg("max_inflight_bytes"),
             py::arg("direct_io"), py::arg("verify"), py::arg("progress"), py::arg("ready"));
  module.def("load_bytes", &load_bytes, py::arg("files"), py::arg("rows"), py::kw_only(),
             py::arg("directory"), py::arg("threads"), py::arg("max_inflight_bytes"),
             py::arg("direct_io"), py::arg("verify"));
}

}  // namespace torch_ckpt::python
