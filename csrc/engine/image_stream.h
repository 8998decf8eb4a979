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

// Produces a file image piece by piece, in order. Each piece takes three steps:
//
//   1. begin() copies and checksums host memory in one pass, writes archive headers, and the tails
//      of tensors in host memory. It starts the copies from devices.
//   2. wait_for_copies() waits for the copies from devices. After this, the piece no longer needs
//      its sources.
//   3. complete() checksums the copies from devices, and writes the tails of these tensors.
//
// Copies of many pieces can therefore be in flight at once. begin() and wait_for_copies() must be
// called by one thread at a time. So must complete(), but it may run in parallel with them. Each
// method must be called for the pieces in order. The image, its sources and `ready` must outlive
// the stream.
class ImageStream {
 public:
  explicit ImageStream(const FileImage& image)
      : ImageStream(image, no_events(), [](const auto&, const auto&) {}) {}
  ImageStream(const FileImage& image, const std::vector<staging::ReadyEvent>& ready,
              staging::Warn warn);

  /// The work that remains for a piece after begin().
  class Piece {
   private:
    friend class ImageStream;
    struct PendingChecksum {
      std::size_t item = 0;
      bool is_payload = false;     // otherwise part of the archive's tail
      std::uint64_t position = 0;  // within the payload or the tail
      std::span<std::byte> bytes;
    };
    std::vector<PendingChecksum> pending_;
    bool submitted_ = false;
  };

  /// Starts filling `out` with the next out.size() bytes of the image, which must have that many
  /// left.
  Result<Piece> begin(std::span<std::byte> out);
  Result<> wait_for_copies(Piece& piece);
  /// True if wait_for_copies() would return immediately. Call this only for the oldest piece not
  /// yet waited for.
  bool copies_are_done(const Piece& piece) const;
  void complete(const Piece& piece);

  /// Calls begin(), wait_for_copies() and complete().
  Result<> fill(std::span<std::byte> out);

  /// Returns the CRC-32 of each item's payload, in the order of the image. Valid once all pieces
  /// are complete.
  const std::vector<std::uint32_t>& checksums() const { return checksums_; }

  /// Returns the items' checksum table entries, in the order of the image. Valid once all pieces
  /// are complete.
  const std::vector<format::RecordSums>& sums() const { return sums_; }

  /// Returns the copier used for copies from devices; nullptr if there have been none.
  const std::shared_ptr<staging::DeviceCopier>& copier() const { return copier_; }

 private:
  static const std::vector<staging::ReadyEvent>& no_events();
  template <class Update>
  void add_to_checksums(std::size_t item, std::uint64_t position, std::span<std::byte> payload,
                        Update update);
  void copy_tail(std::size_t item, std::uint64_t position, std::span<std::byte> out);
  Result<> submit(std::span<const staging::DeviceRun> runs);

  const FileImage& image_;
  const std::vector<staging::ReadyEvent>& ready_;
  const staging::Warn warn_;
  std::vector<std::uint32_t> checksums_;
  std::vector<format::RecordSums> sums_;
  std::size_t item_ = 0;
  std::uint64_t position_ = 0;  // within the item
  std::shared_ptr<staging::DeviceCopier> copier_;
};

}  // namespace torch_ckpt::engine
