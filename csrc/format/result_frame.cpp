#include "format/result_frame.h"

#include <optional>
#include <string_view>

#include "format/crc32.h"
#include "format/little_endian.h"

namespace torch_ckpt::format {
namespace {

constexpr std::string_view kMagic = "TCF2";
constexpr std::size_t kHeadBytes = 4 + 4 + 8;
constexpr std::size_t kCrcBytes = 4;

void put_text(std::string& out, std::string_view text) {
  put(out, text.size(), 8);
  out += text;
}

std::string frame_of(FrameKind kind, std::string_view payload) {
  std::string out;
  out.reserve(kHeadBytes + payload.size() + kCrcBytes);
  out += kMagic;
  put(out, static_cast<std::uint32_t>(kind), 4);
  put_text(out, payload);
  put(out, crc32(0, std::as_bytes(std::span(out))), kCrcBytes);
  return out;
}

// Reads a text that put_text() wrote.
std::string read_text(ByteReader& reader) { return std::string(reader.text(reader.number(8))); }

Error damaged(std::string_view what) {
  return format_error(Errc::frame_damaged, "a message between processes " + std::string(what));
}

std::optional<Frame> decode_payload(std::uint32_t kind, std::span<const std::byte> payload) {
  ByteReader reader(payload);
  Frame frame;
  frame.kind = static_cast<FrameKind>(kind);
  switch (frame.kind) {
    case FrameKind::file: {
      frame.files = static_cast<std::uint32_t>(reader.number(4));
      frame.file.name = read_text(reader);
      frame.file.checksum_table = read_text(reader);
      auto locations = ItemLocations::decode(reader.text(reader.number(8)));
      if (!locations || reader.left() != kCrcBytes * locations->size()) return std::nullopt;
      frame.file.crcs.reserve(locations->size());
      for (std::size_t i = 0; i < locations->size(); ++i) {
        frame.file.crcs.push_back(static_cast<std::uint32_t>(reader.number(kCrcBytes)));
      }
      frame.file.locations = *std::move(locations);
      break;
    }
    case FrameKind::failure:
      frame.failure.code = static_cast<Errc>(reader.number(4));
      frame.failure.sys_errno = static_cast<int>(reader.number(4));
      frame.failure.offset = reader.number(8);
      frame.failure.operation = read_text(reader);
      frame.failure.path = read_text(reader);
      frame.failure.detail = read_text(reader);
      break;
    case FrameKind::object:
    case FrameKind::begin:
      frame.sender.process = reader.number(8);
      frame.sender.start = reader.number(8);
      frame.value = reader.text(reader.left());
      break;
    default:
      return std::nullopt;
  }
  if (reader.has_failed() || reader.left() > 0) return std::nullopt;
  return frame;
}

}  // namespace

std::string encode_file(const FileResult& result, std::uint32_t files) {
  std::string payload;
  payload.reserve(4 + 8 + result.name.size() + 8 + result.checksum_table.size() + 8 +
                  result.locations.encoded().size() + kCrcBytes * result.crcs.size());
  put(payload, files, 4);
  put_text(payload, result.name);
  put_text(payload, result.checksum_table);
  put_text(payload, result.locations.encoded());
  for (const std::uint32_t crc : result.crcs) put(payload, crc, kCrcBytes);
  return frame_of(FrameKind::file, payload);
}

std::string encode_files(std::span<const FileResult> results) {
  std::string frames;
  for (const FileResult& result : results) {
    frames += encode_file(result, static_cast<std::uint32_t>(results.size()));
  }
  return frames;
}

std::string encode_failure(const Error& error) {
  std::string payload;
  put(payload, static_cast<std::uint32_t>(error.code), 4);
  put(payload, static_cast<std::uint32_t>(error.sys_errno), 4);
  put(payload, error.offset, 8);
  put_text(payload, error.operation.str());
  put_text(payload, error.path.str());
  put_text(payload, error.detail.str());
  return frame_of(FrameKind::failure, payload);
}

std::string encode_value(FrameKind kind, const Sender& sender, std::span<const std::byte> value) {
  std::string payload;
  payload.reserve(16 + value.size());
  put(payload, sender.process, 8);
  put(payload, sender.start, 8);
  payload.append(reinterpret_cast<const char*>(value.data()), value.size());
  return frame_of(kind, payload);
}

Result<std::vector<Frame>> decode_frames(std::span<const std::byte> bytes) {
  std::vector<Frame> frames;
  while (!bytes.empty()) {
    if (bytes.size() < kHeadBytes + kCrcBytes) return damaged("is truncated");
    ByteReader head(bytes);
    const std::string_view magic = head.text(kMagic.size());
    const auto kind = static_cast<std::uint32_t>(head.number(4));
    const std::uint64_t length = head.number(8);
    if (magic != kMagic) return damaged("does not begin with the magic number");
    if (length > bytes.size() - kHeadBytes - kCrcBytes) return damaged("is truncated");
    const auto covered = bytes.first(kHeadBytes + length);
    const std::uint64_t crc = little_endian(bytes.subspan(covered.size(), kCrcBytes));
    if (crc != crc32(0, covered)) return damaged("does not match its checksum");
    auto frame = decode_payload(kind, covered.subspan(kHeadBytes));
    if (!frame) return damaged("has an unknown kind or layout");
    frames.push_back(std::move(*frame));
    bytes = bytes.subspan(covered.size() + kCrcBytes);
  }
  return frames;
}

Result<std::vector<FileResult>> decode_files(std::span<const std::byte> bytes) {
  auto frames = decode_frames(bytes);
  if (!frames) return std::move(frames).error();
  std::vector<FileResult> files;
  for (Frame& frame : *frames) {
    if (frame.kind != FrameKind::file || frame.files != frames->size()) {
      return damaged("is not the result of a file, or results of other files are missing");
    }
    files.push_back(std::move(frame.file));
  }
  return files;
}

}  // namespace torch_ckpt::format
