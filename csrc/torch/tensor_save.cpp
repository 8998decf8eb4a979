#include "torch/tensor_save.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/end_session.h"
#include "python/released_gil.h"
#include "torch/conversion.h"
#include "torch/tensor_checks.h"
#include "torch/tensor_source.h"

namespace torch_ckpt::tensors {
namespace {

constexpr const char* kActivityNames[engine::kActivities] = {"stage", "checksum", "write", "fsync"};
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
  item.tensor = std::move(found.header);
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
  return engine::lay_out_save(std::exchange(items_, {}), naming).value();
}

std::vector<engine::SharedFile> SaveSources::shared_files() const {
  std::shared_ptr<engine::CollectiveBuffer> buffer;
  if (places_.collective != nullptr) {
    buffer = engine::CollectiveBuffer::open(*places_.collective).value();
  }
  std::vector<engine::SharedFile> files;
  for (const auto& [name, bytes] : places_.files) {
    files.push_back({name, bytes, buffer, static_cast<std::uint32_t>(files.size())});
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

TensorSave::TensorSave(engine::Context& context, const os::Directory& directory,
                       SaveSources& sources, const engine::NamingOptions& naming,
                       const engine::SaveOptions& options) {
  engine::SaveLayout layout = sources.lay_out(naming);
  file_names_ = std::move(layout.file_names);
  session_ = engine::SaveSession::start(context, directory.duplicate().value(),
                                        std::move(layout.files), options)
                 .value();
  std::swap(sources_, sources);
}

TensorSave::~TensorSave() {
  const python::ReleasedGil released;
  engine::end_session(*session_);
}

Result<bool> TensorSave::wait(double seconds) {
  return wait_by(&engine::SaveSession::wait_for, seconds);
}
Result<bool> TensorSave::wait_staged(double seconds) {
  return wait_by(&engine::SaveSession::wait_staged, seconds);
}
Result<bool> TensorSave::wait_submitted(double seconds) {
  return wait_by(&engine::SaveSession::wait_submitted, seconds);
}

Result<bool> TensorSave::wait_by(Event event, double seconds) {
  // Clamp the time, because the clock's arithmetic overflows for an infinite wait.
  constexpr double kLongest = 1e9;
  const std::chrono::milliseconds timeout(
      static_cast<std::int64_t>(std::min(seconds, kLongest) * 1000.0));
  if (!((*session_).*event)(timeout)) return false;
  if (auto outcome = session_->outcome(); !outcome) return outcome.error();
  return true;
}

Result<> TensorSave::make_stream_wait(int device, std::uintptr_t stream) {
  return session_->make_stream_wait(device, reinterpret_cast<void*>(stream));
}

double TensorSave::elapsed() const { return seconds_of(session_->timing().now_ns()); }

std::tuple<double, double, double, double, double, double> TensorSave::timing() const {
  const engine::Timing& timing = session_->timing();
  const auto busy = [&](engine::Activity activity) { return seconds_of(timing.busy_ns(activity)); };
  return {seconds_of(timing.staged_ns),  seconds_of(timing.ended_ns),
          busy(engine::Activity::stage), busy(engine::Activity::checksum),
          busy(engine::Activity::write), busy(engine::Activity::fsync)};
}

std::vector<std::tuple<const char*, std::size_t, double, double>> TensorSave::trace() const {
  std::vector<std::tuple<const char*, std::size_t, double, double>> rows;
  for (const engine::TraceEvent& event : session_->timing().events()) {
    rows.emplace_back(kActivityNames[static_cast<std::size_t>(event.activity)], event.file,
                      seconds_of(event.begin_ns), seconds_of(event.end_ns));
  }
  return rows;
}

std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>
TensorSave::progress() const {
  const engine::SaveProgress now = session_->progress();
  return {now.bytes_planned, now.bytes_staged, now.bytes_written, now.files_planned,
          now.files_done};
}

std::vector<std::tuple<std::string, const char*, std::uint64_t, std::uint64_t>>
TensorSave::unfinished() const {
  std::vector<std::tuple<std::string, const char*, std::uint64_t, std::uint64_t>> rows;
  for (const engine::FileProgress& file : session_->unfinished()) {
    rows.emplace_back(file_names_[file.file], kPhaseNames[static_cast<std::size_t>(file.phase)],
                      file.bytes_written, file.bytes);
  }
  return rows;
}

}  // namespace torch_ckpt::tensors
