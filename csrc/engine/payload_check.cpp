#include "engine/payload_check.h"

#include <algorithm>
#include <string>

#include "checked_math.h"
#include "format/crc32.h"
#include "format/crc32_copy.h"

namespace torch_ckpt::engine {
namespace {

// An archive with more bytes than this around its payload is damaged: the usual number is about
// 2,000.
constexpr std::uint64_t kMaxEnvelopeBytes = std::uint64_t{1} << 20;

std::string hex(std::uint32_t value) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += kDigits[(value >> shift) & 15];
  return text;
}

}  // namespace

const format::RecordSums* block_sums(const std::optional<format::RecordSums>& sums, bool raw) {
  if (!sums || sums->block_bytes == 0 || sums->raw != raw) return nullptr;
  return &*sums;
}

Result<> check_envelope(const format::RecordSums& sums, format::RecordBytes& record,
                        std::uint64_t payload_offset, std::uint64_t payload_bytes) {
  const std::uint64_t end = payload_offset + payload_bytes;
  if (payload_offset > kMaxEnvelopeBytes || record.size() - end > kMaxEnvelopeBytes) {
    return format_error(Errc::checksum_mismatch,
                        "the archive is damaged: its headers are larger than in any valid archive");
  }
  std::uint32_t crc = 0;
  for (const auto& [begin, part_end] :
       {std::pair(std::uint64_t{0}, payload_offset), std::pair(end, record.size())}) {
    auto read = record.at(begin, part_end - begin);
    if (!read) return read.error();
    crc = format::crc32(crc, *read);
  }
  if (crc == sums.envelope_crc) return {};
  return checksum_error(sums.envelope_crc, crc, "the checkpoint's metadata");
}

Error tensor_mismatch(const std::string& found, const std::string& expected) {
  return format_error(Errc::tensor_mismatch, "the record holds a tensor with " + found +
                                                 ", but the metadata describes one with " +
                                                 expected);
}

std::string shape_text(const std::vector<std::uint64_t>& sizes) {
  std::string text = "shape [";
  for (const std::uint64_t size : sizes) {
    text += (text.back() != '[' ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

Error checksum_error(std::uint32_t expected, std::uint32_t found, const char* source,
                     std::uint64_t offset) {
  return format_error(Errc::checksum_mismatch,
                      "the bytes are damaged: their CRC-32 is " + hex(found) + ", but " + source +
                          " has " + hex(expected),
                      offset);
}

PayloadCheck PayloadCheck::by_blocks(const format::RecordSums& sums, std::uint64_t payload_bytes) {
  PayloadCheck check;
  check.active_ = true;
  check.sums_ = &sums;
  check.payload_bytes_ = payload_bytes;
  return check;
}

PayloadCheck PayloadCheck::one_sum() {
  PayloadCheck check;
  check.active_ = true;
  return check;
}

Result<> PayloadCheck::update(std::uint64_t position, std::span<const std::byte> bytes,
                              std::byte* out) {
  const auto add = [&](std::uint32_t crc, std::span<const std::byte> part) {
    if (out == nullptr) return format::crc32(crc, part);
    return format::crc32_copy(crc, part, std::exchange(out, out + part.size()));
  };
  if (!active_) {
    if (out != nullptr) format::copy_past_caches(bytes, out);
    return {};
  }
  if (sums_ == nullptr) {
    crc_ = add(crc_, bytes);
    bytes_added_ += bytes.size();
    return {};
  }
  while (!bytes.empty()) {
    const std::uint64_t block = position / sums_->block_bytes;
    const std::uint64_t begin = block * sums_->block_bytes;
    const std::uint64_t end = std::min(begin + sums_->block_bytes, payload_bytes_);
    const auto part = bytes.first(std::min<std::uint64_t>(bytes.size(), end - position));
    crc_ = add(position == begin ? 0 : crc_, part);
    position += part.size();
    bytes = bytes.subspan(part.size());
    if (position == end && crc_ != sums_->block_crcs[block]) {
      return checksum_error(sums_->block_crcs[block], crc_, "the checkpoint's metadata", begin);
    }
  }
  return {};
}

}  // namespace torch_ckpt::engine
