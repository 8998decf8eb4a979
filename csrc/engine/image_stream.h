#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/file_image.h"
#include "error.h"
#include "staging/device_copy.h"

namespace torch_ckpt::engine {

// Produces a file image in order, piece by piece, computing checksums on the way.
// Not thread-safe: one strand uses it. The image and its sources outlive it.
class ImageStream {
 public:
  explicit ImageStream(const FileImage& image);

  /// Fills `out` with the next out.size() bytes; asking for more than are left is a bug.
  Result<> fill(std::span<std::byte> out);

  /// CRC-32 of each item's payload, in the image's order; complete once the whole image was filled.
  const std::vector<std::uint32_t>& checksums() const { return checksums_; }

 private:
  Result<> copy_payload(const ImageItem& item, std::uint64_t offset, std::span<std::byte> out);

  const FileImage& image_;
  std::vector<std::uint32_t> checksums_;
  std::size_t item_ = 0;
  std::uint64_t position_ = 0;  // within the item
  std::string tail_;            // of the current item, once its checksum is known
  std::unique_ptr<staging::DeviceCopier> device_;
};

}  // namespace torch_ckpt::engine
