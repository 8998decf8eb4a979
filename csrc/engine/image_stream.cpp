#include "engine/image_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "checked_math.h"
#include "format/crc32.h"
#include "staging/host_copy.h"

namespace torch_ckpt::engine {
namespace {

// Returns the block size for the checksum table; 0 if the table has no blocks for this item. A
// payload that fits into a single block needs none, because its archive contains the checksum.
// Items without an archive always need blocks. This keeps the table small for checkpoints with many
// small tensors.
std::uint64_t block_bytes_of(const ImageItem& item) {
  const std::uint64_t block = format::block_bytes_for(item.source.bytes);
  const bool has_blocks = item.source.bytes > (item.record != nullptr ? block : 0);
  return has_blocks ? block : 0;
}

bool on_device(const ImageItem& item) { return item.source.device != staging::Source::kHost; }

}  // namespace

const std::vector<staging::ReadyEvent>& ImageStream::no_events() {
  static const std::vector<staging::ReadyEvent> none;
  return none;
}

ImageStream::ImageStream(const FileImage& image, const std::vector<staging::ReadyEvent>& ready,
                         staging::Warn warn)
    : image_(image),
      ready_(ready),
      warn_(std::move(warn)),
      checksums_(image.items().size(), 0),
      sums_(image.items().size()) {
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    sums_[i].offset = image.items()[i].offset;
    sums_[i].raw = image.items()[i].record == nullptr;
    sums_[i].block_bytes = block_bytes_of(image.items()[i]);
  }
}

// Checksums each byte once, as part of its block. The checksums of the blocks
// are joined into the payload's checksum. update(crc, part, position) continues the CRC-32 `crc`
// with the part of the payload at `position`, and returns it.
template <class Update>
void ImageStream::add_to_checksums(std::size_t item, std::uint64_t position,
                                   std::span<std::byte> payload, Update update) {
  std::uint32_t& crc = checksums_[item];
  const std::uint64_t block_bytes = sums_[item].block_bytes;
  if (block_bytes == 0) {
    crc = update(crc, payload, position);
    return;
  }
  const std::uint64_t payload_bytes = image_.items()[item].source.bytes;
  std::vector<std::uint32_t>& blocks = sums_[item].block_crcs;
  if (position == 0) blocks.reserve((payload_bytes + block_bytes - 1) / block_bytes);
  while (!payload.empty()) {
    const std::uint64_t begin = align_down(position, block_bytes);
    const std::uint64_t end = begin + std::min(block_bytes, payload_bytes - begin);
    const auto part = payload.first(std::min<std::uint64_t>(payload.size(), end - position));
    if (position == begin) blocks.push_back(0);
    blocks.back() = update(blocks.back(), part, position);
    position += part.size();
    payload = payload.subspan(part.size());
    if (position != end) continue;
    crc = begin == 0 ? blocks.back() : format::crc32_join(crc, blocks.back(), end - begin);
  }
}

void ImageStream::copy_tail(std::size_t item, std::uint64_t position, std::span<std::byte> out) {
  const ImageItem& tensor = image_.items()[item];
  const std::string tail =
      format::encode_tail(tensor.record->pickle, tensor.source.bytes, checksums_[item]);
  if (position == 0) {
    sums_[item].envelope_crc =
        format::crc32(tensor.record->head_crc, std::as_bytes(std::span(tail)));
  }
  std::memcpy(out.data(), tail.data() + position, out.size());
}

Result<> ImageStream::submit(std::span<const staging::DeviceRun> runs) {
  if (copier_ == nullptr) {
    auto made = staging::make_copier(ready_, warn_);
    if (!made) return made.error();
    copier_ = std::move(*made);
  }
  return copier_->submit(runs);
}

Result<ImageStream::Piece> ImageStream::begin(std::span<std::byte> out) {
  Piece piece;
  std::vector<staging::DeviceRun> runs;
  while (!out.empty()) {
    if (item_ == image_.items().size()) {
      return format_error(Errc::internal, "attempt to read past the end of a file image");
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
      if (on_device(item)) {
        runs.push_back({&item.source, position_ - head, out.first(count)});
        piece.pending_.push_back({item_, true, position_ - head, out.first(count)});
      } else {
        add_to_checksums(item_, position_ - head, out.first(count),
                         [&](std::uint32_t crc, std::span<std::byte> part, std::uint64_t position) {
                           return staging::copy_and_checksum(crc, item.source, position, part);
                         });
      }
    } else if (record != nullptr && position_ < item.bytes) {
      count = std::min<std::size_t>(out.size(), item.bytes - position_);
      if (on_device(item)) {
        piece.pending_.push_back({item_, false, position_ - payload_end, out.first(count)});
      } else {
        copy_tail(item_, position_ - payload_end, out.first(count));
      }
    }
    position_ += count;
    out = out.subspan(count);
    if (position_ == item.bytes) {
      ++item_;
      position_ = 0;
    }
  }
  if (!runs.empty()) {
    if (auto submitted = submit(runs); !submitted) return submitted.error();
    piece.submitted_ = true;
  }
  return piece;
}

Result<> ImageStream::wait_for_copies(Piece& piece) {
  if (!piece.submitted_) return {};
  piece.submitted_ = false;
  return copier_->wait_oldest();
}

bool ImageStream::copies_are_done(const Piece& piece) const {
  return !piece.submitted_ || copier_->oldest_has_arrived();
}

void ImageStream::complete(const Piece& piece) {
  for (const Piece::PendingChecksum& pending : piece.pending_) {
    if (pending.is_payload) {
      add_to_checksums(pending.item, pending.position, pending.bytes,
                       [](std::uint32_t crc, std::span<std::byte> part,
                          std::uint64_t /*position*/) { return format::crc32(crc, part); });
    } else {
      copy_tail(pending.item, pending.position, pending.bytes);
    }
  }
}

Result<> ImageStream::fill(std::span<std::byte> out) {
  auto piece = begin(out);
  if (!piece) return piece.error();
  if (auto waited = wait_for_copies(*piece); !waited) return waited;
  complete(*piece);
  return {};
}

}  // namespace torch_ckpt::engine
