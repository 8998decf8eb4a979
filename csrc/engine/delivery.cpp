#include "engine/delivery.h"

#include <algorithm>
#include <utility>

#include "checked_math.h"
#include "os/file.h"

namespace torch_ckpt::engine {
namespace {

using planning::Region;

// Returns how many bytes to pack per byte that is read; 0 if the elements need no packing.
std::size_t packed_bytes_per_byte(const Region& region, const Target& target) {
  if (target.device == staging::Source::kHost) return 0;
  if (!target.convert && region.is_one_run()) return 0;
  return (region.target_item_bytes() + region.item_bytes() - 1) / region.item_bytes();
}

}  // namespace

void pin_or_warn(Warnings& warnings, staging::Chunk& chunk, int device) {
  auto pinned = chunk.pin(device);
  if (pinned) return;
  warnings.add_once("page-locking",
                    "host memory cannot be page-locked (" + pinned.error().message() +
                        "), so copies between host and device are slower. Raise the limit on "
                        "locked memory (ulimit -l).");
}

std::size_t scratch_chunk_bytes(std::size_t chunk_bytes, std::size_t max_bytes,
                                std::size_t threads) {
  constexpr std::size_t kMinBytes = std::size_t{1} << 20;
  const std::size_t share = max_bytes / std::max<std::size_t>(threads, 1);
  return std::min(chunk_bytes, std::max(share, kMinBytes));
}

ScratchLayout lay_out_scratch(std::span<const Region* const> regions,
                              std::span<const Target* const> targets, std::size_t chunk_bytes,
                              std::size_t max_bytes) {
  ScratchLayout layout;
  std::size_t packed = 0;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    packed = std::max(packed, packed_bytes_per_byte(*regions[i], *targets[i]));
    if (targets[i]->device != staging::Source::kHost) layout.device = targets[i]->device;
  }
  if (layout.device != staging::Source::kHost) layout.chunks = 2;
  layout.chunk_bytes =
      align_down(std::min(chunk_bytes, max_bytes / layout.chunks), os::kDirectAlignment);
  layout.read_bytes = align_down(layout.chunk_bytes / (1 + packed), os::kDirectAlignment);
  if (layout.read_bytes == 0) layout.chunk_bytes = 0;
  return layout;
}

Result<std::unique_ptr<Scratch>> Scratch::make(Context& context, const ScratchLayout& layout,
                                               const std::vector<staging::ReadyEvent>& ready) {
  std::unique_ptr<Scratch> scratch(new Scratch(context, layout, ready));
  for (Slot& slot : scratch->slots_) {
    slot.chunk = context.chunks.take_idle(layout.chunk_bytes);
    slot.was_idle = slot.chunk != nullptr;
    if (!slot.was_idle) {
      auto chunk = context.chunks.take(layout.chunk_bytes);
      if (!chunk) return chunk.error();
      slot.chunk = std::move(*chunk);
    }
    if (layout.device != staging::Source::kHost)
      pin_or_warn(context.warnings, *slot.chunk, layout.device);
  }
  return scratch;
}

Scratch::~Scratch() {
  static_cast<void>(wait_all());
  for (Slot& slot : slots_) {
    if (slot.chunk == nullptr) continue;
    if (slot.was_idle) {
      pool_.give_back(std::move(slot.chunk));
    } else {
      pool_.give_back_within(std::move(slot.chunk), layout_.max_idle_bytes);
    }
  }
}

Result<> Scratch::wait_for_copies(Slot& slot) {
  Result<> status;
  // Wait for all submissions even after an error, because the device may still use the memory.
  for (; slot.in_flight > 0; --slot.in_flight) {
    if (auto waited = copier_->wait_oldest(); !waited) status = waited;
  }
  return status;
}

Result<std::span<std::byte>> Scratch::next_buffer() {
  if (slots_.empty()) return std::span<std::byte>();
  current_ = (current_ + 1) % slots_.size();
  packed_ = 0;
  TC_TRY(wait_for_copies(slots_[current_]));
  return slots_[current_].chunk->bytes().first(layout_.read_bytes);
}

std::size_t ScratchLayout::step_bytes() const {
  // A direct read may be extended by up to one block at each end. Scratch memory too small for that
  // is used for buffered reads only.
  constexpr std::size_t kEnds = 2 * os::kDirectAlignment;
  return read_bytes > kEnds ? read_bytes - kEnds : read_bytes;
}

Result<std::uint64_t> Scratch::deliver(const Region& region, const Target& target,
                                       std::uint64_t position, std::span<const std::byte> bytes) {
  if (target.device != staging::Source::kHost) {
    return deliver_to_device(region, target, position, bytes);
  }
  std::uint64_t delivered = 0;
  region.for_each_run({position, position + bytes.size()}, [&](const Region::Run& run) {
    staging::copy_run(target.address + run.target, bytes.data() + (run.stored - position), run,
                      region.item_bytes(), region.target_item_bytes(), target.convert);
    delivered += run.count * region.item_bytes();
  });
  return delivered;
}

Result<std::uint64_t> Scratch::deliver_to_device(const Region& region, const Target& target,
                                                 std::uint64_t position,
                                                 std::span<const std::byte> bytes) {
  const planning::ByteRange window{position, position + bytes.size()};
  std::uint64_t elements = 0;
  std::int64_t begin = 0;  // in the target
  region.for_each_run(window, [&](const Region::Run& run) {
    if (elements == 0) begin = run.target;
    elements += run.count;
  });
  if (elements == 0) return std::uint64_t{0};
  std::byte* const out = target.address + begin;
  if (packed_bytes_per_byte(region, target) == 0) {
    const std::uint64_t at = std::max(position, region.covering().begin) - position;
    queue({bytes.subspan(at, elements * region.item_bytes()), out, target.device}, target);
    return elements * region.item_bytes();
  }
  const std::size_t size = elements * region.target_item_bytes();
  const std::size_t space = layout_.chunk_bytes - layout_.read_bytes;
  if (packed_ + size > space) {
    // Several regions need the same bytes, and the space for packed elements is used up.
    // Submissions are waited for in order, so waiting for this chunk's copies means waiting for all
    // of them.
    TC_TRY(submit());
    TC_TRY(wait_all());
    packed_ = 0;
  }
  const std::span<std::byte> packed =
      slots_[current_].chunk->bytes().subspan(layout_.read_bytes + packed_, size);
  region.for_each_run(window, [&](const Region::Run& run) {
    staging::copy_run(packed.data() + (run.target - begin), bytes.data() + (run.stored - position),
                      run, region.item_bytes(), region.target_item_bytes(), target.convert);
  });
  packed_ += size;
  queue({packed, out, target.device}, target);
  return elements * region.item_bytes();
}

// Extends the last copy if the next one continues it: a few large copies cost the driver less time
// than many small ones. CUDA refuses a copy to two allocations, even if they are adjacent, so both
// copies must have the same target.
void Scratch::queue(const staging::HostRun& run, const Target& target) {
  if (!runs_.empty() && last_target_ == &target) {
    staging::HostRun& last = runs_.back();
    if (last.in.data() + last.in.size() == run.in.data() && last.out + last.in.size() == run.out) {
      last.in = {last.in.data(), last.in.size() + run.in.size()};
      return;
    }
  }
  runs_.push_back(run);
  last_target_ = &target;
}

Result<> Scratch::submit() {
  if (runs_.empty()) return {};
  if (copier_ == nullptr) {
    auto made = staging::make_copier(ready_, warn_);
    if (!made) return made.error();
    copier_ = std::move(*made);
  }
  const Result<> submitted = copier_->submit_to_device(runs_);
  runs_.clear();
  if (submitted) ++slots_[current_].in_flight;
  return submitted;
}

Result<> Scratch::wait_all() {
  Result<> status;
  // The slot after the current one has the oldest submissions.
  for (std::size_t i = 1; i <= slots_.size(); ++i) {
    auto waited = wait_for_copies(slots_[(current_ + i) % slots_.size()]);
    if (!waited) status = waited;
  }
  return status;
}

}  // namespace torch_ckpt::engine
