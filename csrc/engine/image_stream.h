#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/file_image.h"
#include "error.h"
#include "format/checksum_table.h"
#include "staging/device_copy.h"

namespace torch_ckpt::engine {

// Produces a file image in order, piece by piece, in three steps for each piece:
//
//   begin     lays it out: literal bytes and host memory are copied, copies from a device start
//   arrive    waits for the copies from a device; from then on the piece needs no source
//   complete  computes the checksums, and what depends on them, that begin() has not
//
// So copies of many pieces can be under way at once, and sources are free before all is
// checksummed. begin() and arrive() are for one thread, complete() for one that may be another;
// each is called for the pieces in order. The image, its sources and `ready` outlive it.
class ImageStream {
 public:
  explicit ImageStream(const FileImage& image)
      : ImageStream(image, false, no_events(), [](const auto&, const auto&) {}) {}

  /// snapshot: many pieces are begun before the first is completed. Host memory is then copied past
  /// the caches and checksummed by complete(); else both happen at once, while it is in a cache.
  ImageStream(const FileImage& image, bool snapshot, const std::vector<staging::ReadyEvent>& ready,
              staging::Warn warn);

  /// What is left to do for a piece that was begun.
  class Piece {
   private:
    friend class ImageStream;
    struct PendingChecksum {
      std::size_t item = 0;
      bool is_payload = false;     // else a part of the record's tail
      std::uint64_t position = 0;  // within the payload or the tail
      std::span<std::byte> bytes;
    };
    std::vector<PendingChecksum> pending_;
    bool submitted_ = false;
  };

  /// Begins to fill `out` with the next out.size() bytes; asking for more than are left is a bug.
  Result<Piece> begin(std::span<std::byte> out);
  Result<> arrive(Piece& piece);
  /// Whether arrive() has nothing to wait for; of the oldest piece that has not arrived.
  bool has_arrived(const Piece& piece) const;
  void complete(const Piece& piece);

  /// All three.
  Result<> fill(std::span<std::byte> out);

  /// CRC-32 of each item's payload, in the image's order; complete once the whole image was filled.
  const std::vector<std::uint32_t>& checksums() const { return checksums_; }

  /// What a checksum table says of each item, in the image's order; complete as checksums() is.
  const std::vector<format::RecordSums>& sums() const { return sums_; }

  /// Where the copies from devices are made; nullptr where there have been none.
  const std::shared_ptr<staging::DeviceCopier>& copier() const { return copier_; }

 private:
  static const std::vector<staging::ReadyEvent>& no_events();
  void copy_and_checksum(const ImageItem& item, std::uint64_t offset, std::span<std::byte> out);
  void add_to_checksums(std::size_t item, std::uint64_t position,
                        std::span<const std::byte> payload);
  void copy_tail(std::size_t item, std::uint64_t position, std::span<std::byte> out);
  Result<> submit(std::span<const staging::DeviceRun> runs);

  const FileImage& image_;
  const bool snapshot_;
  const std::vector<staging::ReadyEvent>& ready_;
  const staging::Warn warn_;
  std::vector<std::uint32_t> checksums_;
  std::vector<format::RecordSums> sums_;
  std::size_t item_ = 0;
  std::uint64_t position_ = 0;  // within the item
  std::shared_ptr<staging::DeviceCopier> copier_;
};

}  // namespace torch_ckpt::engine
