#include "staging/host_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "format/crc32.h"
#include "format/crc32_copy.h"

namespace torch_ckpt::staging {
namespace {

// Bytes to gather before checksumming them, few enough to stay in the second-level cache.
constexpr std::size_t kGatheredBytes = std::size_t{256} << 10;

template <std::size_t kItem>
void gather_row(std::byte* out, const std::byte* in, std::uint64_t count, std::int64_t stride) {
  for (std::uint64_t i = 0; i < count; ++i) {
    std::memcpy(out + i * kItem, in + static_cast<std::int64_t>(i) * stride, kItem);
  }
}

void copy_row(std::byte* out, const std::byte* in, std::uint64_t count, std::int64_t stride,
              std::size_t item) {
  if (stride == static_cast<std::int64_t>(item)) {
    std::memcpy(out, in, count * item);
    return;
  }
  switch (item) {
    case 1:
      return gather_row<1>(out, in, count, stride);
    case 2:
      return gather_row<2>(out, in, count, stride);
    case 4:
      return gather_row<4>(out, in, count, stride);
    case 8:
      return gather_row<8>(out, in, count, stride);
    case 16:
      return gather_row<16>(out, in, count, stride);
    default:
      for (std::uint64_t i = 0; i < count; ++i) {
        std::memcpy(out + i * item, in + static_cast<std::int64_t>(i) * stride, item);
      }
  }
}

// Iterates over a strided source in payload order, at most one innermost row at a time.
class StridedWalk {
 public:
  StridedWalk(const Source& source, std::uint64_t first_item)
      : source_(source), index_(source.dims.size(), 0) {
    for (std::size_t d = source.dims.size(); d-- > 0;) {
      index_[d] = first_item % source.dims[d].size;
      first_item /= source.dims[d].size;
    }
  }

  /// Copies up to `items` elements from the current row. Returns how many were copied.
  std::uint64_t copy(std::byte* out, std::uint64_t items) {
    const Source::Dim& row = source_.dims.back();
    const std::uint64_t count = std::min(items, row.size - index_.back());
    copy_row(out, address(), count, row.stride_bytes, source_.item_bytes);
    advance(count);
    return count;
  }

  const std::byte* address() const {
    std::int64_t at = 0;
    for (std::size_t d = 0; d < index_.size(); ++d) {
      at += static_cast<std::int64_t>(index_[d]) * source_.dims[d].stride_bytes;
    }
    return source_.address + at;
  }

  void advance(std::uint64_t count) {
    index_.back() += count;
    for (std::size_t d = index_.size(); d-- > 1 && index_[d] == source_.dims[d].size;) {
      index_[d] = 0;
      ++index_[d - 1];
    }
  }

 private:
  const Source& source_;
  std::vector<std::uint64_t> index_;
};

}  // namespace

void copy_from_host(const Source& source, std::uint64_t offset, std::span<std::byte> out) {
  if (out.empty()) return;
  if (source.dims.empty()) {
    std::memcpy(out.data(), source.address + offset, out.size());
    return;
  }
  const std::size_t item = source.item_bytes;
  StridedWalk walk(source, offset / item);
  // A chunk may begin and end within an element.
  if (const std::size_t skip = offset % item; skip != 0) {
    const std::size_t count = std::min(item - skip, out.size());
    std::memcpy(out.data(), walk.address() + skip, count);
    out = out.subspan(count);
    walk.advance(1);
  }
  while (out.size() >= item) {
    const std::uint64_t copied = walk.copy(out.data(), out.size() / item);
    out = out.subspan(copied * item);
  }
  if (!out.empty()) std::memcpy(out.data(), walk.address(), out.size());
}

void copy_past_caches(const Source& source, std::uint64_t offset, std::span<std::byte> out) {
  if (out.empty()) return;
  if (source.dims.empty()) {
    format::copy_past_caches({source.address + offset, out.size()}, out.data());
  } else {
    copy_from_host(source, offset, out);
  }
}

std::uint32_t copy_and_checksum(std::uint32_t crc, const Source& source, std::uint64_t offset,
                                std::span<std::byte> out) {
  if (source.dims.empty()) {
    return format::crc32_copy(crc, {source.address + offset, out.size()}, out.data());
  }
  while (!out.empty()) {
    const auto part = out.first(std::min(out.size(), kGatheredBytes));
    copy_from_host(source, offset, part);
    crc = format::crc32(crc, part);
    offset += part.size();
    out = out.subspan(part.size());
  }
  return crc;
}

}  // namespace torch_ckpt::staging
