#include "staging/host_scatter.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "format/crc32_copy.h"

namespace torch_ckpt::staging {
namespace {

// Size of the buffer for gathered elements before a conversion, and of the one for converted
// elements after it.
constexpr std::size_t kBufferBytes = 4096;

// Rows of at least this size bypass the caches: they would evict more useful data than they add.
constexpr std::size_t kLongBytes = std::size_t{64} << 10;

template <std::size_t kItem>
void copy_items(std::byte* out, std::int64_t out_stride, const std::byte* in,
                std::int64_t in_stride, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    std::memcpy(out + static_cast<std::int64_t>(i) * out_stride,
                in + static_cast<std::int64_t>(i) * in_stride, kItem);
  }
}

void copy_strided(std::byte* out, std::int64_t out_stride, const std::byte* in,
                  std::int64_t in_stride, std::uint64_t count, std::size_t item) {
  const auto dense = static_cast<std::int64_t>(item);
  if (out_stride == dense && in_stride == dense) {
    if (count * item >= kLongBytes) {
      format::copy_past_caches({in, count * item}, out);
    } else {
      std::memcpy(out, in, count * item);
    }
    return;
  }
  switch (item) {
    case 1:
      return copy_items<1>(out, out_stride, in, in_stride, count);
    case 2:
      return copy_items<2>(out, out_stride, in, in_stride, count);
    case 4:
      return copy_items<4>(out, out_stride, in, in_stride, count);
    case 8:
      return copy_items<8>(out, out_stride, in, in_stride, count);
    default:
      return copy_items<16>(out, out_stride, in, in_stride, count);
  }
}

}  // namespace

void copy_run(std::byte* out, const std::byte* in, const planning::Region::Run& run,
              std::size_t item_bytes, std::size_t target_item_bytes, const Convert& convert) {
  const auto in_stride = static_cast<std::int64_t>(run.stored_stride);
  if (!convert) {
    copy_strided(out, run.target_stride, in, in_stride, run.count, item_bytes);
    return;
  }
  const bool dense_in = run.stored_stride == item_bytes;
  const bool dense_out = run.target_stride == static_cast<std::int64_t>(target_item_bytes);
  if (dense_in && dense_out) {
    convert(out, in, run.count);
    return;
  }
  alignas(16) std::array<std::byte, kBufferBytes> gathered;
  alignas(16) std::array<std::byte, kBufferBytes> converted;
  const std::uint64_t max_count = kBufferBytes / std::max(item_bytes, target_item_bytes);
  for (std::uint64_t done = 0; done < run.count;) {
    const std::uint64_t count = std::min(max_count, run.count - done);
    const std::byte* from = in + static_cast<std::int64_t>(done) * in_stride;
    std::byte* const to = out + static_cast<std::int64_t>(done) * run.target_stride;
    if (!dense_in) {
      copy_strided(gathered.data(), static_cast<std::int64_t>(item_bytes), from, in_stride, count,
                   item_bytes);
      from = gathered.data();
    }
    if (dense_out) {
      convert(to, from, count);
    } else {
      convert(converted.data(), from, count);
      copy_strided(to, run.target_stride, converted.data(),
                   static_cast<std::int64_t>(target_item_bytes), count, target_item_bytes);
    }
    done += count;
  }
}

}  // namespace torch_ckpt::staging
