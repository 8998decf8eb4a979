#include "format/part_sums.h"

#include <algorithm>
#include <map>
#include <utility>

#include "checked_math.h"
#include "format/crc32.h"
#include "format/little_endian.h"
#include "format/partial_crc.h"

namespace torch_ckpt::format {
namespace {

constexpr std::size_t kCrcBytes = 4;
constexpr std::size_t kLeastPartBytes = 8 + 8 + 8 + 8 + 4;

Error damaged() {
  return format_error(Errc::frame_damaged, "the checksums of a rank's parts are damaged");
}

}  // namespace

std::string encode_part_sums(std::span<const PartSums> parts) {
  std::string out;
  put(out, parts.size(), 4);
  for (const PartSums& part : parts) {
    put(out, part.tensor, 8);
    put(out, part.tensor_bytes, 8);
    put(out, part.bytes, 8);
    put(out, part.first_block, 8);
    put(out, part.shares.size(), 4);
    for (const std::uint32_t share : part.shares) put(out, share, kCrcBytes);
  }
  put(out, crc32(0, std::as_bytes(std::span(out))), kCrcBytes);
  return out;
}

Result<std::vector<PartSums>> decode_part_sums(std::span<const std::byte> bytes) {
  if (bytes.size() < kCrcBytes) return damaged();
  const auto body = bytes.first(bytes.size() - kCrcBytes);
  if (crc32(0, body) != little_endian(bytes.subspan(body.size()))) return damaged();
  ByteReader reader(body);
  const std::uint64_t count = reader.number(4);
  std::vector<PartSums> parts;
  parts.reserve(std::min<std::uint64_t>(count, reader.left() / kLeastPartBytes));
  for (std::uint64_t i = 0; i < count && !reader.has_failed(); ++i) {
    PartSums& part = parts.emplace_back();
    part.tensor = reader.number(8);
    part.tensor_bytes = reader.number(8);
    part.bytes = reader.number(8);
    part.first_block = reader.number(8);
    ByteReader shares(reader.take(reader.number(4) * kCrcBytes));
    while (shares.left() > 0) {
      part.shares.push_back(static_cast<std::uint32_t>(shares.number(kCrcBytes)));
    }
  }
  if (reader.has_failed() || reader.left() != 0) return damaged();
  return parts;
}

Result<std::vector<RecordSums>> join_part_sums(std::span<const PartSums> parts) {
  std::map<std::uint64_t, std::pair<std::uint64_t, RecordSums>> tensors;  // by offset, with sizes
  for (const PartSums& part : parts) {
    if (part.tensor_bytes == 0) continue;
    auto& [bytes, sums] = tensors[part.tensor];
    if (sums.block_crcs.empty()) {
      bytes = part.tensor_bytes;
      sums.offset = part.tensor;
      sums.raw = true;
      sums.block_bytes = block_bytes_for(bytes);
      sums.block_crcs.resize(divide_up(bytes, sums.block_bytes));
    }
    if (bytes != part.tensor_bytes ||
        !inside(part.first_block, part.shares.size(), sums.block_crcs.size())) {
      return damaged();
    }
    for (std::size_t i = 0; i < part.shares.size(); ++i) {
      sums.block_crcs[part.first_block + i] ^= part.shares[i];
    }
  }
  std::vector<RecordSums> records;
  records.reserve(tensors.size());
  for (auto& [offset, tensor] : tensors) {
    auto& [bytes, sums] = tensor;
    for (std::size_t i = 0; i < sums.block_crcs.size(); ++i) {
      const std::uint64_t left = bytes - i * sums.block_bytes;
      sums.block_crcs[i] = crc32_of_shares(sums.block_crcs[i], std::min(sums.block_bytes, left));
    }
    records.push_back(std::move(sums));
  }
  return records;
}

}  // namespace torch_ckpt::format
