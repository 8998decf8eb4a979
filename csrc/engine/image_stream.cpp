#include "engine/image_stream.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "checked_math.h"
#include "format/crc32.h"
#include "format/partial_crc.h"
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

/// Copies bytes [position, position + out.size()) of a part to `out`, converted, and returns their
/// CRC-32.
std::uint32_t copy_part(const ImageItem& item, std::uint64_t position, std::span<std::byte> out) {
  const PartPlace& place = *item.place;
  if (!place.convert) return staging::copy_and_checksum(0, item.source, position, out);
  constexpr std::size_t kAtOnce = 4096;  // elements, few enough to stay in the first-level cache
  std::vector<std::byte> elements(kAtOnce * item.source.item_bytes);
  const std::size_t count = out.size() / place.item_bytes;
  for (std::size_t done = 0; done < count; done += kAtOnce) {
    const std::size_t now = std::min(kAtOnce, count - done);
    const auto in = std::span(elements).first(now * item.source.item_bytes);
    const std::uint64_t first = position / place.item_bytes + done;
    staging::copy_from_host(item.source, first * item.source.item_bytes, in);
    place.convert(out.data() + done * place.item_bytes, in.data(), now);
  }
  return format::crc32(0, out);
}

}  // namespace

ImageStream::ImageStream(const FileImage& image)
    : image_(image), checksums_(image.items().size(), 0), sums_(image.items().size()) {
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    sums_[i].offset = image.items()[i].offset;
    sums_[i].raw = image.items()[i].record == nullptr;
    sums_[i].block_bytes = block_bytes_of(image.items()[i]);
    if (const PartPlace* place = image.items()[i].place.get(); place != nullptr) {
      const std::uint64_t block = format::block_bytes_for(place->runs.tensor_bytes());
      const std::uint64_t first = place->runs.begin() / block;
      sums_[i].block_bytes = block;
      sums_[i].block_crcs.resize(
          place->runs.bytes() == 0 ? 0 : (place->runs.end() - 1) / block - first + 1);
    }
  }
}

std::vector<format::PartSums> ImageStream::part_sums() const {
  std::vector<format::PartSums> parts;
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    const PartPlace& place = *image_.items()[i].place;
    parts.push_back({place.tensor, place.runs.tensor_bytes(), place.runs.bytes(),
                     place.runs.begin() / sums_[i].block_bytes, sums_[i].block_crcs});
  }
  return parts;
}

// Adds this rank's shares in the checksums of blocks to `shares`, for a piece of the item's
// payload. checksum(position, bytes) returns the CRC-32 of bytes of the payload.
template <class Checksum>
void ImageStream::for_each_share(std::size_t item, std::uint64_t position,
                                 std::span<std::byte> payload, std::vector<Piece::Share>& shares,
                                 Checksum checksum) const {
  const planning::BoxRuns& runs = image_.items()[item].place->runs;
  const std::uint64_t block_bytes = sums_[item].block_bytes;
  const std::uint64_t first = runs.begin() / block_bytes;
  std::uint64_t block = first;
  format::PartialCrc crc;
  bool has_bytes = false;
  const auto end_block = [&] {
    const std::uint64_t left = runs.tensor_bytes() - block * block_bytes;
    if (has_bytes) shares.push_back({item, block - first, crc.share(std::min(block_bytes, left))});
  };
  runs.for_each(position, position + payload.size(),
                [&](std::uint64_t at, std::uint64_t packed, std::uint64_t bytes) {
                  while (bytes > 0) {
                    if (!has_bytes || at / block_bytes != block) {
                      end_block();
                      block = at / block_bytes;
                      crc = {};
                      has_bytes = true;
                    }
                    const std::uint64_t in_block = at - block * block_bytes;
                    const std::uint64_t count = std::min(bytes, block_bytes - in_block);
                    crc.add(in_block, count,
                            checksum(packed, payload.subspan(packed - position, count)));
                    at += count;
                    packed += count;
                    bytes -= count;
                  }
                });
  end_block();
}

// Calls visit(position, part) for the parts of a piece of a payload in each block of the checksum
// table. A payload without blocks is one block.
template <class Visit>
void ImageStream::for_each_block(std::size_t item, std::uint64_t position,
                                 std::span<std::byte> payload, Visit visit) const {
  const std::uint64_t block_bytes = sums_[item].block_bytes;
  while (!payload.empty()) {
    std::size_t count = payload.size();
    if (block_bytes != 0) {
      count = std::min<std::uint64_t>(count, block_bytes - position % block_bytes);
    }
    visit(position, payload.first(count));
    position += count;
    payload = payload.subspan(count);
  }
}

// Adds the checksum of a part of a block. The parts of a block are joined into its checksum, the
// blocks into the payload's.
void ImageStream::add_checksum(std::size_t item, std::uint64_t position, std::uint64_t bytes,
                               std::uint32_t crc) {
  std::uint32_t& whole = checksums_[item];
  const std::uint64_t block_bytes = sums_[item].block_bytes;
  if (block_bytes == 0) {
    whole = position == 0 ? crc : format::crc32_join(whole, crc, bytes);
    return;
  }
  const std::uint64_t payload_bytes = image_.items()[item].source.bytes;
  std::vector<std::uint32_t>& blocks = sums_[item].block_crcs;
  if (position == 0) blocks.reserve((payload_bytes + block_bytes - 1) / block_bytes);
  const std::uint64_t begin = align_down(position, block_bytes);
  if (position == begin) {
    blocks.push_back(crc);
  } else {
    blocks.back() = format::crc32_join(blocks.back(), crc, bytes);
  }
  const std::uint64_t end = position + bytes;
  if (end != begin + block_bytes && end != payload_bytes) return;
  whole = begin == 0 ? blocks.back() : format::crc32_join(whole, blocks.back(), end - begin);
}

void ImageStream::copy_tail(std::size_t item, std::uint64_t position, std::span<std::byte> out) {
  const ImageItem& tensor = image_.items()[item];
  const std::string tail = tensor.record->encode_tail(checksums_[item]);
  if (position == 0) {
    sums_[item].envelope_crc =
        format::crc32(tensor.record->head_crc(), std::as_bytes(std::span(tail)));
  }
  std::memcpy(out.data(), tail.data() + position, out.size());
}

Result<ImageStream::Piece> ImageStream::begin(std::uint64_t offset, std::span<std::byte> out,
                                              std::vector<staging::DeviceRun>& runs) const {
  const std::vector<ImageItem>& items = image_.items();
  if (offset + out.size() > image_.bytes()) {
    return format_error(Errc::internal, "attempt to read past the end of a file image");
  }
  Piece piece;
  const std::byte* const first = out.data();
  if (const auto head = std::as_bytes(std::span(image_.head())); offset < head.size()) {
    const auto part = head.subspan(offset, std::min<std::size_t>(head.size() - offset, out.size()));
    std::memcpy(out.data(), part.data(), part.size());
    out = out.subspan(part.size());
  }
  for (auto found = image_.first_after(offset); !out.empty(); ++found) {
    const auto number = static_cast<std::size_t>(found - items.begin());
    std::uint64_t at_image = offset + static_cast<std::uint64_t>(out.data() - first);
    // Skip a gap before the item.
    if (at_image < found->offset) {
      const std::uint64_t gap = std::min<std::uint64_t>(found->offset - at_image, out.size());
      out = out.subspan(gap);
      at_image += gap;
    }
    std::uint64_t position = at_image - std::min(at_image, found->offset);
    const format::RecordTemplate* record = found->record.get();
    const std::uint64_t head = record != nullptr ? record->head().size() : 0;
    const std::uint64_t payload_end =
        head + (record != nullptr ? found->source.bytes : found->bytes);
    // Calls use(position, part) for the part of `out` between two positions in the item.
    const auto take = [&](std::uint64_t begin, std::uint64_t end, auto use) {
      if (out.empty() || position >= end) return;
      const auto part = out.first(std::min<std::uint64_t>(out.size(), end - position));
      use(position - begin, part);
      position += part.size();
      out = out.subspan(part.size());
    };
    take(0, head, [&](std::uint64_t at, std::span<std::byte> part) {
      std::memcpy(part.data(), record->head().data() + at, part.size());
    });
    take(head, payload_end, [&](std::uint64_t at, std::span<std::byte> part) {
      if (on_device(*found)) {
        runs.push_back({&found->source, at, part});
        piece.parts_.push_back({number, true, at, part, std::nullopt});
        return;
      }
      if (found->place != nullptr) {
        return for_each_share(number, at, part, piece.shares_,
                              [&](std::uint64_t packed, std::span<std::byte> bytes) {
                                return copy_part(*found, packed, bytes);
                              });
      }
      for_each_block(number, at, part, [&](std::uint64_t block_at, std::span<std::byte> block) {
        const std::uint32_t crc = staging::copy_and_checksum(0, found->source, block_at, block);
        piece.parts_.push_back({number, true, block_at, block, crc});
      });
    });
    take(payload_end, found->bytes, [&](std::uint64_t at, std::span<std::byte> part) {
      piece.parts_.push_back({number, false, at, part, std::nullopt});
    });
  }
  return piece;
}

void ImageStream::complete(const Piece& piece) {
  for (const Piece::Share& share : piece.shares_) add_share(share);
  for (const Piece::Part& part : piece.parts_) {
    if (image_.items()[part.item].place != nullptr) {
      std::vector<Piece::Share> shares;
      for_each_share(
          part.item, part.position, part.bytes, shares,
          [](std::uint64_t, std::span<std::byte> bytes) { return format::crc32(0, bytes); });
      for (const Piece::Share& share : shares) add_share(share);
    } else if (!part.is_payload) {
      copy_tail(part.item, part.position, part.bytes);
    } else if (part.crc) {
      add_checksum(part.item, part.position, part.bytes.size(), *part.crc);
    } else {
      for_each_block(part.item, part.position, part.bytes,
                     [&](std::uint64_t position, std::span<std::byte> block) {
                       add_checksum(part.item, position, block.size(), format::crc32(0, block));
                     });
    }
  }
}

}  // namespace torch_ckpt::engine
