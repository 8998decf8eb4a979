#include "engine/image_stream.h"

#include <algorithm>
#include <cstring>

#include "format/crc32.h"
#include "staging/host_copy.h"

namespace torch_ckpt::engine {
namespace {

// Copied and then checksummed while it is still in the second-level cache.
constexpr std::size_t kFusedBytes = std::size_t{256} << 10;

}  // namespace

ImageStream::ImageStream(const FileImage& image)
    : image_(image), checksums_(image.items().size(), 0) {}

Result<> ImageStream::copy_payload(const ImageItem& item, std::uint64_t offset,
                                   std::span<std::byte> out) {
  std::uint32_t& crc = checksums_[item_];
  if (item.source.device != staging::Source::kHost) {
    if (device_ == nullptr) {
      const staging::DeviceSupport* support = staging::device_support();
      if (support == nullptr) {
        return format_error(Errc::invalid_argument,
                            "a tensor lies on a device that this build does not support");
      }
      device_ = support->make_copier();
    }
    if (auto copied = device_->copy(item.source, offset, out); !copied) return copied;
    crc = format::crc32(crc, out);
    return {};
  }
  while (!out.empty()) {
    const auto piece = out.first(std::min(out.size(), kFusedBytes));
    staging::copy_from_host(item.source, offset, piece);
    crc = format::crc32(crc, piece);
    offset += piece.size();
    out = out.subspan(piece.size());
  }
  return {};
}

Result<> ImageStream::fill(std::span<std::byte> out) {
  while (!out.empty()) {
    if (item_ == image_.items().size()) {
      return format_error(Errc::internal, "a file image was asked for bytes past its end");
    }
    const ImageItem& item = image_.items()[item_];
    const RecordTemplate* record = item.record.get();
    const std::uint64_t head = record != nullptr ? record->head.size() : 0;
    const std::uint64_t payload_end = head + item.source.bytes;
    std::size_t count = 0;
    if (position_ < head) {
      count = std::min<std::size_t>(out.size(), head - position_);
      std::memcpy(out.data(), record->head.data() + position_, count);
    } else if (position_ < payload_end) {
      count = std::min<std::size_t>(out.size(), payload_end - position_);
      if (auto done = copy_payload(item, position_ - head, out.first(count)); !done) return done;
    } else if (record != nullptr && position_ < item.bytes) {
      if (tail_.empty()) {
        tail_ = format::encode_tail(record->pickle, item.source.bytes, checksums_[item_]);
      }
      count = std::min<std::size_t>(out.size(), item.bytes - position_);
      std::memcpy(out.data(), tail_.data() + (position_ - payload_end), count);
    }
    position_ += count;
    out = out.subspan(count);
    if (position_ == item.bytes) {
      ++item_;
      position_ = 0;
      tail_.clear();
    }
  }
  return {};
}

}  // namespace torch_ckpt::engine
