#include "index/metadata_seal.h"

#include "format/crc32.h"
#include "format/little_endian.h"

namespace torch_ckpt::index {
namespace {

constexpr std::string_view kMagic = "TCM1";

}  // namespace

std::string seal_of(std::span<const std::string_view> pieces) {
  std::uint32_t crc = 0;
  std::uint64_t bytes = 0;
  for (const std::string_view piece : pieces) {
    crc = format::crc32(crc, std::as_bytes(std::span(piece)));
    bytes += piece.size();
  }
  std::string seal(kMagic);
  format::put(seal, crc, 4);
  format::put(seal, bytes, 8);
  return seal;
}

Result<std::optional<std::uint64_t>> bytes_sealed(std::span<const std::byte> file) {
  if (file.size() < kSealBytes) return std::optional<std::uint64_t>();
  const std::size_t covered = file.size() - kSealBytes;
  format::ByteReader seal(file.subspan(covered));
  const bool is_ours = seal.text(kMagic.size()) == kMagic;
  const auto crc = static_cast<std::uint32_t>(seal.number(4));
  if (!is_ours || seal.number(8) != covered) return std::optional<std::uint64_t>();
  if (format::crc32(0, file.first(covered)) != crc) {
    return format_error(Errc::checksum_mismatch,
                        "the contents do not match the checksum at the end of the file");
  }
  return std::optional<std::uint64_t>(covered);
}

}  // namespace torch_ckpt::index
