#include "torch/load_waves.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>

#include "planning/region.h"
#include "staging/device_copy.h"
#include "torch/conversion.h"
#include "torch/tensor_checks.h"

namespace torch_ckpt::tensors {
namespace {

// Limit on the bytes of temporaries on a device per wave.
constexpr std::uint64_t kMaxDeviceBytes = std::uint64_t{256} << 20;

// Limit on steps per wave: a step can need more memory than the tensor that it reads.
constexpr std::size_t kMaxSteps = 1 << 15;

staging::Convert conversion_for(const TensorRead& read, ScalarType to,
                                const format::TensorHeader* layout) {
  const bool conj = layout != nullptr && layout->conj;
  const bool neg = layout != nullptr && layout->neg;
  if (to == read.dtype && !conj && !neg) return {};
  return conversion_between(read.record.name, read.dtype, to, conj, neg);
}

void* current_stream(int device) {
  void* stream = nullptr;
  libtorch::check(libtorch::get_current_cuda_stream(device, &stream));
  return stream;
}

[[noreturn]] void fail_as_changed(const TensorRead& read) {
  throw Failure(format_error(Errc::internal,
                             read.record.name +
                                 ": the record changed while it was read; the checkpoint must "
                                 "not be written during a load"));
}

}  // namespace

std::vector<std::size_t> LoadWaves::run() {
  std::vector<Tensor> tensors;
  tensors.reserve(reads_.size());
  for (const TensorRead& read : reads_) tensors.push_back(read.tensor);
  Tensor::find_math_bits(tensors);
  std::vector<std::size_t> unknown;
  for (std::size_t i = 0; i < reads_.size(); ++i) {
    const TensorRead& read = reads_[i];
    if (read.record.dtype == nullptr || read.is_transformed) {
      unknown.push_back(i);
      continue;
    }
    if (wave_.size() >= kMaxSteps) run_all_waves();
    if (!filled_.add(read.record.name, read.tensor)) {
      run_all_waves();
      filled_.add(read.record.name, read.tensor);
    }
    if (!add(i, nullptr)) {
      throw Failure(
          format_error(Errc::invalid_argument,
                       read.record.name + ": the stored tensor's size overflows 64 bits"));
    }
  }
  run_all_waves();
  unknown.insert(unknown.end(), unknown_.begin(), unknown_.end());
  return unknown;
}

void LoadWaves::run_all_waves() {
  run_wave();
  for (const auto& [number, header] : std::exchange(layouts_, {})) {
    if (add(number, header)) continue;
    run_wave();
    read_storage(number, *header);
  }
  run_wave();
  if (!layouts_.empty()) fail_as_changed(reads_[layouts_.front().first]);
  filled_.clear();
}

// Adds a read to the wave. Returns false if its stored elements overlap.
bool LoadWaves::add(std::size_t number, const Layout& layout) {
  const Tensor& tensor = reads_[number].tensor;
  // Elements arrive on a device in stored order, so another layout needs a temporary.
  if (can_be_filled(tensor) && (layout == nullptr || tensor.is_cpu())) {
    return add_rows(number, layout, 0, 0, tensor, Tensor());
  }
  const bool on_device = tensor.is_cuda() && staging::device_support() != nullptr &&
                         layout == nullptr && tensor.dtype().known() != nullptr;
  return add_with_temporary(number, layout, on_device);
}

// Adds a read into temporaries, in parts that stay within the limit.
bool LoadWaves::add_with_temporary(std::size_t number, const Layout& layout, bool on_device) {
  const TensorRead& read = reads_[number];
  const std::uint64_t rows = read.record.sizes.empty() ? 1 : read.lengths()[0];
  const std::uint64_t bytes =
      read.region_bytes((on_device ? read.tensor.dtype() : read.dtype).item_bytes());
  if (bytes == 0) return true;
  const std::uint64_t row_bytes = bytes / rows;
  if (!on_device) options_.check_target_bytes(read.record.name, row_bytes).value();
  const std::uint64_t max_bytes = on_device ? kMaxDeviceBytes : options_.max_scratch_bytes / 2;
  std::uint64_t& held = on_device ? held_on_device_ : held_;
  const std::uint64_t part = std::max<std::uint64_t>(1, max_bytes / row_bytes);
  for (std::uint64_t begin = 0; begin < rows; begin += part) {
    const std::uint64_t count = std::min(part, rows - begin);
    if (held > 0 && held + count * row_bytes > max_bytes) run_wave();
    Extents lengths = read.lengths();
    Tensor tensor = read.tensor;
    if (!lengths.empty()) {
      lengths[0] = count;
      tensor = tensor.narrow(0, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(count));
    }
    const Tensor temporary = on_device ? Tensor::empty_on_device_of(read.tensor, signed_of(lengths))
                                       : mapped_tensor(lengths, read.dtype, count * row_bytes);
    held += count * row_bytes;
    if (!add_rows(number, layout, begin, count, tensor, temporary)) return false;
  }
  return true;
}

// Adds `count` rows of a read's region, beginning with row `begin`; all rows if `count` is 0.
bool LoadWaves::add_rows(std::size_t number, const Layout& layout, std::uint64_t begin,
                         std::uint64_t count, const Tensor& tensor, const Tensor& temporary) {
  const TensorRead& read = reads_[number];
  const Tensor& written = temporary.defined() ? temporary : tensor;
  const planning::StoredRecord& record = read.record;
  engine::RegionRead part{&record};
  part.kind = files_[record.file].is_bare ? engine::ReadKind::bare : engine::ReadKind::tensor;
  Extents offsets = read.offsets();
  Extents lengths = read.lengths();
  if (count > 0 && !lengths.empty()) {
    // Let the first part read the entire payload: if the only checksum is the archive's, verifying
    // it needs the entire payload, which no other part reads.
    part.reads_entire_payload = part.kind == engine::ReadKind::tensor && begin == 0 &&
                                count < lengths[0] && lengths == record.sizes;
    offsets[0] += begin;
    lengths[0] = count;
  }
  part.layout = layout;
  auto region = planning::Region::of_box(
      record.sizes, layout == nullptr ? Extents{} : layout->strides, offsets, lengths,
      written.strides(), read.dtype.item_bytes(), written.item_bytes());
  if (!region || (layout != nullptr && layout->storage_offset != 0)) return false;
  part.region = std::move(*region);
  part.target.convert = conversion_for(read, written.dtype(), layout.get());
  if (written.is_cuda()) part.target.device = written.device_index();
  if (written.numel() > 0) part.target.address = written.mutable_data();
  wave_.push_back({number, std::move(part), tensor, temporary});
  return true;
}

void LoadWaves::run_wave() {
  if (wave_.empty()) return;
  std::vector<Step> wave = std::exchange(wave_, {});
  const std::uint64_t held = std::exchange(held_, 0);
  const bool spread_on_device = std::exchange(held_on_device_, 0) > 0;
  std::vector<engine::RegionRead> reads;
  std::set<int> with_temporaries;
  reads.reserve(wave.size());
  for (Step& step : wave) {
    reads.push_back(std::move(step.read));
    if (step.temporary.defined() && step.temporary.is_cuda())
      with_temporaries.insert(step.temporary.device_index());
  }
  // The caching allocator may place a temporary in a block that another thread has freed while work
  // on the current stream still reads the block: the block is free only for later work on this
  // stream. So record the events after the allocation.
  staging::RecordedEvents allocated;
  for (const int device : with_temporaries) {
    allocated.record(device, current_stream(device)).value();
  }
  const auto session = load(std::move(reads), held, allocated.events());
  bytes_done_ += session->bytes_done();
  std::set<int> devices;
  std::optional<InferenceMode> inference;  // entered for torch's copies only
  for (std::size_t i = 0; i < wave.size(); ++i) {
    Step& step = wave[i];
    const engine::ReadOutcome& outcome = session->outcomes()[i];
    if (step.tensor.is_cuda()) devices.insert(step.tensor.device_index());
    switch (outcome.status) {
      case engine::ReadStatus::done:
        if (step.temporary.defined()) {
          if (!inference) inference.emplace();
          step.tensor.copy_from(step.temporary);
        }
        step.temporary = Tensor();
        if (changed_.empty() || changed_.back() != step.number) changed_.push_back(step.number);
        break;
      case engine::ReadStatus::other_layout:
        // Add each read once, even if it was done in several parts.
        if (layouts_.empty() || layouts_.back().first != step.number) {
          layouts_.emplace_back(step.number,
                                std::make_shared<format::TensorHeader>(*outcome.header));
        }
        break;
      case engine::ReadStatus::unknown_record:
        if (unknown_.empty() || unknown_.back() != step.number) unknown_.push_back(step.number);
        break;
      case engine::ReadStatus::pending:
        throw Failure(format_error(
            Errc::internal, reads_[step.number].record.name + ": the read ended without a result"));
    }
  }
  if (!spread_on_device) return;
  // Wait until the temporaries have been copied: the next wave may reuse their memory, and its
  // streams do not wait for these copies.
  for (const int device : devices) {
    staging::device_support()->wait_for_stream(device, current_stream(device)).value();
  }
}

void LoadWaves::read_storage(std::size_t number, const format::TensorHeader& header) {
  const TensorRead& read = reads_[number];
  options_.check_target_bytes(read.record.name, header.storage_bytes).value();
  const Tensor bytes = mapped_tensor({header.storage_bytes}, *ScalarType::named("uint8"),
                                     std::max<std::uint64_t>(header.storage_bytes, 1));
  engine::RegionRead whole{&read.record, engine::ReadKind::storage};
  whole.region = planning::Region::of_bytes(0, header.storage_bytes);
  whole.target.address = bytes.mutable_data();
  const auto session = load({std::move(whole)}, header.storage_bytes, {});
  if (session->outcomes()[0].status != engine::ReadStatus::done) fail_as_changed(read);
  bytes_done_ += read.region_bytes(read.dtype.item_bytes());
  const InferenceMode inference;
  read.tensor.copy_from(region_in_storage(read, bytes, header));
  changed_.push_back(number);
}

/// Runs one load, whose targets already use `held` bytes of the limit. Copies to devices also wait
/// for the events in `ready`.
std::shared_ptr<engine::LoadSession> LoadWaves::load(
    std::vector<engine::RegionRead> reads, std::uint64_t held,
    const std::vector<staging::ReadyEvent>& ready) {
  engine::LoadOptions options = options_;
  options.target_bytes = held;
  options.ready.insert(options.ready.end(), ready.begin(), ready.end());
  auto session = engine::LoadSession::start(engine::Context::process(), folder_.duplicate().value(),
                                            files_, std::move(reads), options)
                     .value();
  wait_(*session, bytes_done_);
  if (auto failure = session->failure()) throw Failure(std::move(*failure));
  return session;
}

}  // namespace torch_ckpt::tensors
