#include "engine/collective_buffer.h"

#include <algorithm>
#include <utility>

#include "checked_math.h"

namespace torch_ckpt::engine {
namespace {

// The state of a window: the number of its bytes in its block, and above it the block's number
// plus 1. 0: no rank has come to the window yet.
constexpr unsigned kBlockShift = 32;
constexpr std::uint64_t kIsInFile = ~std::uint64_t{0};
constexpr std::uint64_t kCountMask = (std::uint64_t{1} << kBlockShift) - 1;

// The use of a block: a phase, and above it the window's number. 0: free.
constexpr unsigned kPhaseBits = 2;
enum Phase : std::uint64_t { kFilling = 1, kReady = 2, kWriting = 3 };

std::uint64_t use_of(std::size_t window, Phase phase) { return window << kPhaseBits | phase; }

constexpr std::chrono::milliseconds kLongestWait{1000};
constexpr std::uint64_t kMostHalvings = 8;

std::size_t words_bytes(std::size_t windows) {
  return align_up((1 + CollectiveBuffer::kBlocks + windows) * sizeof(std::uint64_t),
                  os::kDirectAlignment);
}

}  // namespace

Result<std::shared_ptr<CollectiveBuffer>> CollectiveBuffer::open(
    const planning::CollectiveRanges& given) {
  std::vector<Range> ranges;
  std::size_t windows = 0;
  for (const auto& range : given.ranges) {
    ranges.push_back({range, windows});
    windows += (range.end - 1) / kWindowBytes - range.begin / kWindowBytes + 1;
  }
  auto memory = os::SharedMemory::map(given.memory, words_bytes(windows) + kBlocks * kWindowBytes);
  if (!memory) {
    Error error = memory.error();
    error.detail = "could not share the memory in which the ranks of this machine collect writes";
    return error;
  }
  return std::shared_ptr<CollectiveBuffer>(
      new CollectiveBuffer(std::move(*memory), std::move(ranges), windows));
}

CollectiveBuffer::CollectiveBuffer(os::SharedMemory memory, std::vector<Range> ranges,
                                   std::size_t windows)
    : memory_(std::move(memory)),
      ranges_(std::move(ranges)),
      // The file begins with zeros, which are a valid value of each word.
      timeouts_(reinterpret_cast<Word*>(memory_.bytes().data())),
      uses_(timeouts_ + 1),
      states_(uses_ + kBlocks),
      blocks_(memory_.bytes().data() + words_bytes(windows)) {}

CollectiveBuffer::Window CollectiveBuffer::window_in(const Range& of, std::uint64_t cell) {
  const auto& [range, first_window] = of;
  return {first_window + (cell - range.begin / kWindowBytes),
          std::max(range.begin, cell * kWindowBytes),
          std::min(range.end, (cell + 1) * kWindowBytes)};
}

std::optional<CollectiveBuffer::Window> CollectiveBuffer::window_at(std::uint32_t file,
                                                                    std::uint64_t offset) const {
  const auto after = std::ranges::upper_bound(
      ranges_, std::pair(file, offset), {},
      [](const Range& one) { return std::pair(one.range.file, one.range.begin); });
  if (after == ranges_.begin()) return std::nullopt;
  const Range& found = *std::prev(after);
  if (found.range.file != file || offset >= found.range.end) return std::nullopt;
  return window_in(found, offset / kWindowBytes);
}

const CollectiveBuffer::Range& CollectiveBuffer::range_of(std::size_t window) const {
  return *std::prev(std::ranges::upper_bound(ranges_, window, {}, &Range::first_window));
}

// A block has the same alignment as its window, as direct I/O requires.
std::span<std::byte> CollectiveBuffer::bytes_of(std::size_t block, const Window& window) const {
  return {blocks_ + block * kWindowBytes + window.begin % kWindowBytes, window.end - window.begin};
}

CollectiveBuffer::Access CollectiveBuffer::access(const Window& window,
                                                  Clock::time_point waiting_since) {
  using Kind = Access::Kind;
  Word& state = states_[window.number];
  std::uint64_t now = state.load();
  while (now == 0) {
    if (const auto block = take_free(window)) {
      if (state.compare_exchange_strong(now, (*block + 1) << kBlockShift)) {
        return {Kind::block, bytes_of(*block, window)};
      }
      uses_[*block].store(0);
    } else {
      const std::uint64_t halvings = std::min(timeouts_->load(), kMostHalvings);
      if (Clock::now() - waiting_since < kLongestWait / (1 << halvings)) return {Kind::wait};
      if (!state.compare_exchange_strong(now, kIsInFile)) continue;
      timeouts_->fetch_add(1);
      return {Kind::file};
    }
  }
  if (now == kIsInFile) return {Kind::file};
  return {Kind::block, bytes_of((now >> kBlockShift) - 1, window)};
}

std::optional<std::size_t> CollectiveBuffer::take_free(const Window& window) {
  for (std::size_t block = 0; block < kBlocks; ++block) {
    std::uint64_t use = 0;
    if (uses_[block].compare_exchange_strong(use, use_of(window.number, kFilling))) return block;
  }
  return std::nullopt;
}

void CollectiveBuffer::add(const Window& window, std::uint64_t bytes) {
  const std::uint64_t state = states_[window.number].fetch_add(bytes) + bytes;
  if ((state & kCountMask) != window.end - window.begin) return;
  uses_[(state >> kBlockShift) - 1].store(use_of(window.number, kReady));
}

std::optional<CollectiveBuffer::ReadyBlock> CollectiveBuffer::take_ready(std::uint32_t file) {
  for (std::size_t block = 0; block < kBlocks; ++block) {
    std::uint64_t use = uses_[block].load();
    const std::size_t number = use >> kPhaseBits;
    if (use != use_of(number, kReady)) continue;
    const Range& range = range_of(number);
    if (range.range.file != file) continue;
    if (!uses_[block].compare_exchange_strong(use, use_of(number, kWriting))) continue;
    const Window window =
        window_in(range, range.range.begin / kWindowBytes + (number - range.first_window));
    return ReadyBlock{block, window, bytes_of(block, window)};
  }
  return std::nullopt;
}

void CollectiveBuffer::release(const ReadyBlock& block) { uses_[block.number].store(0); }

}  // namespace torch_ckpt::engine
