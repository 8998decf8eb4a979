#include "format/result_frame.h"

#include <optional>
#include <string_view>

#include "checked_math.h"
#include "format/crc32.h"

namespace torch_ckpt::format {
namespace {

constexpr std::string_view kMagic = "TCF1";
constexpr std::size_t kHeadBytes = 4 + 4 + 8;
constexpr std::size_t kCrcBytes = 4;
constexpr std::uint64_t kItemBytes = 8 + 8 + 8 + 4;

void put(std::string& out, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

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

// Reads what must be there; afterwards `is_whole()` says whether all of it was.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}

  std::span<const std::byte> take(std::uint64_t bytes) {
    if (bytes > left_.size()) {
      is_short_ = true;
      return {};
    }
    const auto taken = left_.first(bytes);
    left_ = left_.subspan(bytes);
    return taken;
  }
  std::uint64_t number(std::size_t bytes) {
    std::uint64_t value = 0;
    const auto digits = take(bytes);
    for (std::size_t i = 0; i < digits.size(); ++i) {
      value |= static_cast<std::uint64_t>(digits[i]) << (8 * i);
    }
    return value;
  }
  std::uint32_t short_number() { return static_cast<std::uint32_t>(number(4)); }
  std::string text() { return string_of(take(number(8))); }
  std::string rest() { return string_of(take(left_.size())); }

  std::size_t left() const { return left_.size(); }
  bool is_whole() const { return !is_short_ && left_.empty(); }

 private:
  static std::string string_of(std::span<const std::byte> bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  std::span<const std::byte> left_;
  bool is_short_ = false;
};

Error damaged(std::string_view what) {
  return format_error(Errc::frame_damaged, "a message between processes " + std::string(what));
}

std::optional<Frame> decode_payload(std::uint32_t kind, std::span<const std::byte> payload) {
  Reader reader(payload);
  Frame frame;
  frame.kind = static_cast<FrameKind>(kind);
  switch (frame.kind) {
    case FrameKind::file: {
      frame.files = reader.short_number();
      frame.file.name = reader.text();
      frame.file.checksum_table = reader.text();
      const std::uint64_t count = reader.number(8);
      if (count > reader.left() / kItemBytes) return std::nullopt;
      frame.file.items.reserve(count);
      for (std::uint64_t i = 0; i < count; ++i) {
        ItemResult item;
        item.item = reader.number(8);
        item.offset = reader.number(8);
        item.length = reader.number(8);
        item.crc = reader.short_number();
        frame.file.items.push_back(item);
      }
      break;
    }
    case FrameKind::failure:
      frame.failure.code = static_cast<Errc>(reader.short_number());
      frame.failure.sys_errno = static_cast<int>(reader.short_number());
      frame.failure.offset = reader.number(8);
      frame.failure.operation = reader.text();
      frame.failure.path = reader.text();
      frame.failure.detail = reader.text();
      break;
    case FrameKind::object:
    case FrameKind::begun:
      frame.sender.process = reader.number(8);
      frame.sender.start = reader.number(8);
      frame.value = reader.rest();
      break;
    default:
      return std::nullopt;
  }
  if (!reader.is_whole()) return std::nullopt;
  return frame;
}

}  // namespace

std::string encode_file(const FileResult& result, std::uint32_t files) {
  std::string payload;
  payload.reserve(4 + 8 + result.name.size() + 8 + result.checksum_table.size() + 8 +
                  result.items.size() * kItemBytes);
  put(payload, files, 4);
  put_text(payload, result.name);
  put_text(payload, result.checksum_table);
  put(payload, result.items.size(), 8);
  for (const ItemResult& item : result.items) {
    put(payload, item.item, 8);
    put(payload, item.offset, 8);
    put(payload, item.length, 8);
    put(payload, item.crc, 4);
  }
  return frame_of(FrameKind::file, payload);
}

std::string encode_failure(const Error& error) {
  std::string payload;
  put(payload, static_cast<std::uint32_t>(error.code), 4);
  put(payload, static_cast<std::uint32_t>(error.sys_errno), 4);
  put(payload, error.offset, 8);
  put_text(payload, error.operation);
  put_text(payload, error.path);
  put_text(payload, error.detail);
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
    if (bytes.size() < kHeadBytes + kCrcBytes) return damaged("is cut short");
    Reader head(bytes);
    const std::string magic = [&] {
      const auto found = head.take(kMagic.size());
      return std::string(reinterpret_cast<const char*>(found.data()), found.size());
    }();
    const std::uint32_t kind = head.short_number();
    const std::uint64_t length = head.number(8);
    if (magic != kMagic) return damaged("does not begin as one");
    // Of what comes behind the head the checksum is no part of the payload.
    if (length > bytes.size() - kHeadBytes - kCrcBytes) return damaged("is cut short");
    const auto covered = bytes.first(kHeadBytes + length);
    Reader tail(bytes.subspan(covered.size(), kCrcBytes));
    if (tail.short_number() != crc32(0, covered)) return damaged("has another checksum");
    auto frame = decode_payload(kind, covered.subspan(kHeadBytes));
    if (!frame) return damaged("is of a kind or a form that this version does not know");
    frames.push_back(std::move(*frame));
    bytes = bytes.subspan(covered.size() + kCrcBytes);
  }
  return frames;
}

}  // namespace torch_ckpt::format
