#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/file_image.h"
#include "error.h"
#include "format/checksum_table.h"
#include "format/part_sums.h"
#include "staging/device_copy.h"

namespace torch_ckpt::engine {

// Produces a file image piece by piece. Each piece takes two steps:
//
//   1. begin() copies and checksums host memory in one pass, writes archive heads, and returns the
//      copies from devices that the piece needs. Threads may begin pieces in any order, and several
//      pieces at once.
//   2. complete() checksums the bytes that came from devices, joins the checksums, and writes
//      archive tails, which contain them. Call it once the piece's copies from devices are done,
//      for the pieces in the order of the file, one at a time. It may run in parallel with begin().
//
// The image and its sources must outlive the stream.
class ImageStream {
 public:
  explicit ImageStream(const FileImage& image);

  /// The work that remains for a piece after begin().
  class Piece {
   private:
    friend class ImageStream;
    struct Part {
      std::size_t item = 0;
      bool is_payload = false;     // otherwise part of the archive's tail
      std::uint64_t position = 0;  // within the payload or the tail
      std::span<std::byte> bytes;
      std::optional<std::uint32_t> crc;  // of `bytes`, within one block; nullopt: not yet computed
    };
    // A share in the checksum of a block of a tensor that several ranks write.
    struct Share {
      std::size_t item = 0;
      std::size_t block = 0;  // minus the item's first block
      std::uint32_t crc = 0;
    };
    std::vector<Part> parts_;
    std::vector<Share> shares_;
  };

  /// Starts filling `out` with the out.size() bytes of the image from `offset` on; adds the copies
  /// from devices to `runs`. Fails if the image has fewer bytes.
  Result<Piece> begin(std::uint64_t offset, std::span<std::byte> out,
                      std::vector<staging::DeviceRun>& runs) const;
  void complete(const Piece& piece);

  /// Returns the checksums of the image's parts of tensors that several ranks write, in the order
  /// of the image. Valid once all pieces are complete.
  std::vector<format::PartSums> part_sums() const;

  /// Returns the CRC-32 of each item's payload, in the order of the image. Valid once all pieces
  /// are complete.
  const std::vector<std::uint32_t>& checksums() const { return checksums_; }

  /// Returns the items' checksum table entries, in the order of the image. Valid once all pieces
  /// are complete.
  const std::vector<format::RecordSums>& sums() const { return sums_; }

 private:
  template <class Visit>
  void for_each_block(std::size_t item, std::uint64_t position, std::span<std::byte> payload,
                      Visit visit) const;
  template <class Checksum>
  void for_each_share(std::size_t item, std::uint64_t position, std::span<std::byte> payload,
                      std::vector<Piece::Share>& shares, Checksum checksum) const;
  void add_share(const Piece::Share& share) {
    sums_[share.item].block_crcs[share.block] ^= share.crc;
  }
  void add_checksum(std::size_t item, std::uint64_t position, std::uint64_t bytes,
                    std::uint32_t crc);
  void copy_tail(std::size_t item, std::uint64_t position, std::span<std::byte> out);

  const FileImage& image_;
  std::vector<std::uint32_t> checksums_;
  std::vector<format::RecordSums> sums_;
};

}  // namespace torch_ckpt::engine
