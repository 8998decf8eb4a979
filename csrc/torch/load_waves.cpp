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

engine::ReadRequest request_for(const TensorTarget& target, engine::ReadKind kind) {
  engine::ReadRequest request;
  request.kind = kind;
  request.file = target.file;
  request.offset = target.offset;
  request.length = target.length;
  request.dtype = target.dtype.known();
  request.sizes = target.sizes;
  return request;
}

staging::Convert conversion_for(const TensorTarget& target, ScalarType to,
                                const format::TensorHeader* layout) {
  const bool conj = layout != nullptr && layout->conj;
  const bool neg = layout != nullptr && layout->neg;
  if (to == target.dtype && !conj && !neg) return {};
  return conversion_between(target.name, target.dtype, to, conj, neg);
}

void* current_stream(int device) {
  void* stream = nullptr;
  libtorch::check(libtorch::get_current_cuda_stream(device, &stream));
  return stream;
}

[[noreturn]] void fail_as_changed(const TensorTarget& target) {
  throw Failure(format_error(
      Errc::internal, target.name + ": the record changed while it was read; the checkpoint must "
                                    "not be written during a load"));
}

}  // namespace

std::vector<std::size_t> LoadWaves::run() {
  std::vector<Tensor> tensors;
  tensors.reserve(targets_.size());
  for (const TensorTarget& target : targets_) tensors.push_back(target.tensor);
  Tensor::find_math_bits(tensors);
  std::vector<std::size_t> unknown;
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    const TensorTarget& target = targets_[i];
    if (target.dtype.known() == nullptr || target.is_transformed) {
      unknown.push_back(i);
      continue;
    }
    if (wave_.size() >= kMaxSteps) run_all_waves();
    if (!filled_.add(target.name, target.tensor)) {
      run_all_waves();
      filled_.add(target.name, target.tensor);
    }
    if (!add(i, nullptr)) {
      throw Failure(format_error(Errc::invalid_argument,
                                 target.name + ": the stored tensor's size overflows 64 bits"));
    }
  }
  run_all_waves();
  unknown.insert(unknown.end(), unknown_.begin(), unknown_.end());
  return unknown;
}

void LoadWaves::run_all_waves() {
  run_wave();
  for (const auto& [index, header] : std::exchange(layouts_, {})) {
    if (add(index, header)) continue;
    run_wave();
    read_storage(index, *header);
  }
  run_wave();
  if (!layouts_.empty()) fail_as_changed(targets_[layouts_.front().first]);
  filled_.clear();
}

// Adds a target to the wave. Returns false if its stored elements overlap.
bool LoadWaves::add(std::size_t index, const Layout& layout) {
  const Tensor& tensor = targets_[index].tensor;
  // Elements arrive on a device in stored order, so another layout needs a temporary.
  if (can_be_filled(tensor) && (layout == nullptr || tensor.is_cpu())) {
    return add_rows(index, layout, 0, 0, tensor, Tensor());
  }
  const bool on_device = tensor.is_cuda() && staging::device_support() != nullptr &&
                         layout == nullptr && tensor.dtype().known() != nullptr;
  return add_with_temporary(index, layout, on_device);
}

// Adds a target that is read into temporaries, in parts that stay within the limit.
bool LoadWaves::add_with_temporary(std::size_t index, const Layout& layout, bool on_device) {
  const TensorTarget& target = targets_[index];
  const std::uint64_t rows = target.sizes.empty() ? 1 : target.region_lengths[0];
  const std::uint64_t bytes =
      target.region_bytes((on_device ? target.tensor.dtype() : target.dtype).item_bytes());
  if (bytes == 0) return true;
  const std::uint64_t row_bytes = bytes / rows;
  if (!on_device) loads_.check_limit(target.name, row_bytes).value();
  const std::uint64_t max_bytes = on_device ? kMaxDeviceBytes : loads_.limit() / 2;
  std::uint64_t& held = on_device ? held_on_device_ : held_;
  const std::uint64_t part = std::max<std::uint64_t>(1, max_bytes / row_bytes);
  for (std::uint64_t begin = 0; begin < rows; begin += part) {
    const std::uint64_t count = std::min(part, rows - begin);
    if (held > 0 && held + count * row_bytes > max_bytes) run_wave();
    Extents lengths = target.region_lengths;
    Tensor tensor = target.tensor;
    if (!lengths.empty()) {
      lengths[0] = count;
      tensor = tensor.narrow(0, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(count));
    }
    const Tensor temporary = on_device ? Tensor::empty_beside(target.tensor, signed_of(lengths))
                                       : mapped_tensor(lengths, target.dtype, count * row_bytes);
    held += count * row_bytes;
    if (!add_rows(index, layout, begin, count, tensor, temporary)) return false;
  }
  return true;
}

// Adds `count` rows of a target's region, beginning with row `begin`; all rows if `count` is 0.
bool LoadWaves::add_rows(std::size_t index, const Layout& layout, std::uint64_t begin,
                         std::uint64_t count, const Tensor& tensor, const Tensor& temporary) {
  const TensorTarget& target = targets_[index];
  const Tensor& written = temporary.defined() ? temporary : tensor;
  Step step{index, request_for(target, loads_.tensor_kind(target.file)), tensor, temporary};
  engine::ReadRequest& request = step.request;
  Extents offsets = target.region_offsets;
  Extents lengths = target.region_lengths;
  if (count > 0 && !lengths.empty()) {
    // Let the first part read the entire payload: if the only checksum is the archive's, verifying
    // it needs the entire payload, which no other part reads.
    request.reads_entire_payload = request.kind == engine::ReadKind::tensor && begin == 0 &&
                                   count < lengths[0] && lengths == target.sizes;
    offsets[0] += begin;
    lengths[0] = count;
  }
  request.layout = layout;
  auto region = planning::Region::of_box(
      target.sizes, layout == nullptr ? Extents{} : layout->strides, offsets, lengths,
      written.strides(), target.dtype.item_bytes(), written.item_bytes());
  if (!region || (layout != nullptr && layout->storage_offset != 0)) return false;
  request.region = std::move(*region);
  request.target.convert = conversion_for(target, written.dtype(), layout.get());
  if (written.is_cuda()) request.target.device = written.device_index();
  if (written.numel() > 0) {
    request.target.address = written.mutable_data();
  }
  wave_.push_back(std::move(step));
  return true;
}

void LoadWaves::run_wave() {
  if (wave_.empty()) return;
  std::vector<Step> wave = std::exchange(wave_, {});
  const std::uint64_t held = std::exchange(held_, 0);
  const bool spread_on_device = std::exchange(held_on_device_, 0) > 0;
  std::vector<engine::ReadRequest> requests;
  std::vector<std::string> names;
  std::set<int> with_temporaries;
  requests.reserve(wave.size());
  names.reserve(wave.size());
  for (Step& step : wave) {
    names.push_back(targets_[step.target].name);
    requests.push_back(std::move(step.request));
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
  const auto session =
      loads_.run(std::move(requests), names, held, bytes_done_, allocated.events()).value();
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
        if (changed_.empty() || changed_.back() != step.target) changed_.push_back(step.target);
        break;
      case engine::ReadStatus::other_layout:
        // Add each target once, even if it was read in several parts.
        if (layouts_.empty() || layouts_.back().first != step.target) {
          layouts_.emplace_back(step.target,
                                std::make_shared<format::TensorHeader>(*outcome.header));
        }
        break;
      case engine::ReadStatus::unknown_record:
        if (unknown_.empty() || unknown_.back() != step.target) unknown_.push_back(step.target);
        break;
      case engine::ReadStatus::pending:
        throw Failure(format_error(
            Errc::internal, targets_[step.target].name + ": the read ended without a result"));
    }
  }
  if (!spread_on_device) return;
  // Wait until the temporaries have been copied: the next wave may reuse their memory, and its
  // streams do not wait for these copies.
  for (const int device : devices) {
    staging::device_support()->wait_for_stream(device, current_stream(device)).value();
  }
}

void LoadWaves::read_storage(std::size_t index, const format::TensorHeader& header) {
  const TensorTarget& target = targets_[index];
  loads_.check_limit(target.name, header.storage_bytes).value();
  const Tensor bytes = mapped_tensor({header.storage_bytes}, *ScalarType::named("uint8"),
                                     std::max<std::uint64_t>(header.storage_bytes, 1));
  engine::ReadRequest request = request_for(target, engine::ReadKind::storage);
  request.region = planning::Region::of_bytes(0, header.storage_bytes);
  request.target.address = bytes.mutable_data();
  const auto session =
      loads_.run({std::move(request)}, {target.name}, header.storage_bytes, bytes_done_).value();
  if (session->outcomes()[0].status != engine::ReadStatus::done) fail_as_changed(target);
  bytes_done_ += target.region_bytes(target.dtype.item_bytes());
  const InferenceMode inference;
  target.tensor.copy_from(region_in_storage(target, bytes, header));
  changed_.push_back(index);
}

}  // namespace torch_ckpt::tensors
