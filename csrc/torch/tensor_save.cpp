#include "torch/tensor_save.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/end_session.h"
#include "python/fault.h"
#include "python/released_gil.h"
#include "torch/conversion.h"
#include "torch/tensor_checks.h"
#include "torch/tensor_source.h"

namespace torch_ckpt::tensors {
namespace {

constexpr const char* kPhaseNames[] = {"waiting", "staging", "writing", "fsync"};

double seconds_of(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

}  // namespace

void SaveSources::keep(const Tensor& tensor) {
  if (PythonRef storage = tensor.shared_storage()) {
    storages_.push_back(std::move(storage));
  } else {
    tensors_.push_back(tensor);
  }
}

void SaveSources::add(std::string name, const Tensor& tensor) {
  TensorSource found = source_of(tensor);
  keep(found.owner);
  engine::SaveItem& item = items_.emplace_back();
  item.name = std::move(name);
  item.source = std::move(found.source);
  item.tensor =
      *headers_.insert(std::make_shared<const format::TensorHeader>(std::move(found.header))).first;
}

void SaveSources::add(std::string name, std::span<const std::byte> bytes,
                      std::shared_ptr<const void> owner) {
  engine::SaveItem& item = items_.emplace_back();
  item.name = std::move(name);
  item.source.address = bytes.data();
  item.source.bytes = bytes.size();
  owners_.push_back(std::move(owner));
}

void SaveSources::add_part(const std::string& name, const Tensor& tensor, const Extents& sizes,
                           const Extents& offsets, ScalarType stored) {
  if (parts_.size() >= places_.places.size()) throw_misplaced(parts_.size() + 1);
  const auto& [file, begin] = places_.places[parts_.size()];
  engine::SavePart part;
  part.file = file;
  part.place.tensor = begin;
  part.place.item_bytes = stored.item_bytes();
  auto runs =
      planning::BoxRuns::of(sizes, offsets, unsigned_of(tensor.sizes()), part.place.item_bytes);
  if (!runs) {
    Error error = format_error(Errc::internal, "the rank's part does not lie within the tensor");
    error.subject = name;
    throw Failure(error);
  }
  part.place.runs = std::move(*runs);
  // The source has no math bits.
  TensorSource found = row_major_source_of(tensor);
  keep(found.owner);
  part.source = std::move(found.source);
  if (tensor.dtype() != stored) {
    part.place.convert = conversion_between(name, tensor.dtype(), stored, false, false);
  }
  parts_.push_back(std::move(part));
}

void SaveSources::throw_misplaced(std::size_t parts) const {
  throw Failure(format_error(Errc::internal,
                             "the coordinator has sent " + std::to_string(places_.places.size()) +
                                 " places for " + std::to_string(parts) + " parts"));
}

engine::SaveLayout SaveSources::lay_out(const engine::NamingOptions& naming) {
  if (parts_.size() != places_.places.size()) throw_misplaced(parts_.size());
  if (!parts_.empty()) return engine::lay_out_parts(std::exchange(parts_, {}), shared_files());
  headers_.clear();
  return engine::lay_out_save(std::exchange(items_, {}), naming).value();
}

std::vector<engine::SharedFile> SaveSources::shared_files() const {
  std::shared_ptr<engine::CollectiveBuffer> buffer;
  if (places_.collective != nullptr) {
    buffer = engine::CollectiveBuffer::open(*places_.collective).value();
  }
  std::vector<engine::SharedFile> files;
  for (const auto& [name, bytes, head] : places_.files) {
    files.push_back(
        {name, bytes, buffer, static_cast<std::uint32_t>(files.size()), places_.are_packed, head});
  }
  return files;
}

template <class Visit>
void SaveSources::for_each(const Visit& visit) const {
  for (const engine::SaveItem& item : items_) visit(item.source);
  for (const engine::SavePart& part : parts_) visit(part.source);
}

std::uint64_t SaveSources::bytes() const {
  std::uint64_t bytes = 0;
  for_each([&](const staging::Source& source) { bytes += source.bytes; });
  return bytes;
}

std::vector<int> SaveSources::devices() const {
  std::vector<int> found;
  for_each([&](const staging::Source& source) {
    if (source.device != staging::Source::kHost) add_cuda_device(found, source.device);
  });
  return found;
}

namespace {

std::chrono::milliseconds milliseconds_of(double seconds) {
  // Clamp the time, because the clock's arithmetic overflows for an infinite wait.
  constexpr double kLongest = 1e9;
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::min(seconds, kLongest) * 1000.0));
}

/// Calls `wait` without the GIL, and raises the exception of a signal handler, such as
/// KeyboardInterrupt, afterwards.
template <class Wait>
auto wait_without_gil(const Wait& wait) {
  auto done = [&] {
    const python::ReleasedGil released;
    return wait();
  }();
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  return done;
}

}  // namespace

void Save::start(engine::Context& context, const engine::Folder& folder, SaveSources& sources,
                 const engine::NamingOptions& naming, const engine::SaveOptions& options) {
  {
    const python::ReleasedGil released;
    engine::SaveLayout layout = sources.lay_out(naming);
    file_names_ = std::move(layout.file_names);
    path_ = folder.path();
    auto session = engine::SaveSession::start(context, folder.duplicate().value(),
                                              std::move(layout.files), options);
    session_ = std::move(session).value();
    std::swap(sources_, sources);
    const os::MutexLock lock(mutex_);
    has_session_ = true;
    is_settled_.notify_all();
  }
  if (is_cancelled_) session_->cancel();
}

Save::~Save() {
  if (session_ == nullptr) return;
  const python::ReleasedGil released;
  engine::end_session(*session_);
}

std::vector<std::string> Save::run(const Callbacks& callbacks, double seconds) {
  if (watch_) {
    wait_until(&engine::SaveSession::wait_staged, callbacks, seconds);
    sources_.clear();
    python::fault_point("sources are copied", path_);
    if (!changed_) changed_ = watch_->changed();
    watch_->release();
    if (!changed_->empty()) return *changed_;
  }
  if (callbacks.on_staged) callbacks.on_staged();
  // The release of thousands of tensors takes long: do it while the engine writes.
  wait_until(&engine::SaveSession::wait_staged, callbacks, seconds);
  sources_.clear();
  wait_until(&engine::SaveSession::wait_for, callbacks, seconds);
  return {};
}

void Save::wait_until(Event event, const Callbacks& callbacks, double seconds) {
  // Keep the session alive: a callback may end this object's part.
  const std::shared_ptr<engine::SaveSession> session = session_;
  for (bool done = false; !done;) {
    done = wait_without_gil([&] { return ((*session).*event)(milliseconds_of(seconds)); });
    if (callbacks.on_wait) callbacks.on_wait();
  }
  session->outcome().value();
}

std::vector<std::string> Save::cancel_and_wait() {
  if (session_ == nullptr) return {};
  {
    const python::ReleasedGil released;
    engine::end_session(*session_);
  }
  return session_->outcome() ? file_names_ : std::vector<std::string>();
}

std::vector<format::FileResult> Save::finish() {
  std::vector<format::FileResult> results;
  if (session_ != nullptr) {
    timing_ = timing();
    progress_ = progress();
    if (session_->outcome()) results = session_->results().value();
    session_.reset();
  }
  sources_.clear();
  if (watch_) watch_->release();
  const os::MutexLock lock(mutex_);
  is_finished_ = true;
  is_settled_.notify_all();
  return results;
}

void Save::cancel() {
  is_cancelled_ = true;
  if (session_ != nullptr) session_->cancel();
}

std::optional<bool> Save::make_streams_wait(std::span<const std::pair<int, std::uintptr_t>> streams,
                                            double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + milliseconds_of(seconds);
  const bool is_settled = wait_without_gil([&] {
    const os::MutexLock lock(mutex_);
    while (!has_session_ && !is_finished_) {
      if (!is_settled_.wait_until(mutex_, deadline)) return has_session_ || is_finished_;
    }
    return true;
  });
  if (!is_settled) return std::nullopt;
  const std::shared_ptr<engine::SaveSession> session = session_;
  if (session == nullptr) return true;
  if (!wait_without_gil([&] { return session->wait_submitted(milliseconds_of(seconds)); })) {
    return std::nullopt;
  }
  // The save itself reports its errors.
  if (!session->outcome()) return true;
  for (const auto& [device, stream] : streams) {
    session->make_stream_wait(device, reinterpret_cast<void*>(stream)).value();
  }
  // The device runs all later work of the streams after the copies.
  if (!changed_ && watch_) changed_ = watch_->changed();
  return true;
}

std::array<double, 6> Save::timing() const {
  if (session_ == nullptr) return timing_;
  const engine::Timing& timing = session_->timing();
  const auto busy = [&](engine::Activity activity) { return seconds_of(timing.busy_ns(activity)); };
  return {seconds_of(timing.staged_ns),  seconds_of(timing.ended_ns),
          busy(engine::Activity::stage), busy(engine::Activity::checksum),
          busy(engine::Activity::write), busy(engine::Activity::fsync)};
}

std::array<std::uint64_t, 5> Save::progress() const {
  if (session_ == nullptr) return progress_;
  const engine::SaveProgress now = session_->progress();
  return {now.bytes_planned, now.bytes_staged, now.bytes_written, now.files_planned,
          now.files_done};
}

std::vector<std::tuple<std::string, const char*, std::uint64_t, std::uint64_t>> Save::unfinished()
    const {
  std::vector<std::tuple<std::string, const char*, std::uint64_t, std::uint64_t>> found;
  if (session_ == nullptr) return found;
  for (const engine::FileProgress& file : session_->unfinished()) {
    found.emplace_back(file_names_[file.file], kPhaseNames[static_cast<std::size_t>(file.phase)],
                       file.bytes_written, file.bytes);
  }
  return found;
}

}  // namespace torch_ckpt::tensors
