#include "format/crc32.h"

#include <isa-l/crc.h>
#include <zlib.h>

namespace torch_ckpt::format {

std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> data) {
  // Carry-less multiplication, chosen for the processor at run time; the function takes a pointer
  // to non-const by an oversight of its header and does not write.
  return ::crc32_gzip_refl(
      crc, reinterpret_cast<unsigned char*>(const_cast<std::byte*>(data.data())), data.size());
}

std::uint32_t crc32_join(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) {
  return static_cast<std::uint32_t>(
      ::crc32_combine(first, second, static_cast<z_off_t>(second_bytes)));
}

}  // namespace torch_ckpt::format
