#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "error.h"

namespace torch_ckpt::format {

/// Where one item of a save lies.
struct ItemResult {
  std::uint64_t item = 0;    // its number in the plan
  std::uint64_t offset = 0;  // in bytes, in the file
  std::uint64_t length = 0;  // in bytes, in the file
  std::uint32_t crc = 0;     // of the payload

  bool operator==(const ItemResult&) const = default;
};

/// What a save has written to one file.
struct FileResult {
  std::string name;               // in the checkpoint's directory
  std::vector<ItemResult> items;  // in the order of the file
  std::string checksum_table;     // format/checksum_table.h

  bool operator==(const FileResult&) const = default;
};

// Frames in which results travel between processes. Integers are little-endian.
//
//   frames  := frame*
//   frame   := "TCF1" kind:u32 bytes:u64 payload[bytes] crc:u32   ; CRC-32 of all before it
//   payload := file | failure | object | begun
//   file    := files:u32 name:text table:text count:u64 item[count]
//   item    := item:u64 offset:u64 length:u64 crc:u32
//   failure := code:u32 errno:u32 offset:u64 operation:text path:text detail:text
//   object  := process start:u64 rest            ; whatever the sender's language makes of a value
//   begun   := process start:u64 rest            ; text: what the sender is going to do
//   text    := bytes:u64 byte[bytes]
//   process := pid:u64
//
// A frame that is cut short or was changed is refused (frame_damaged), and so is what follows it.
enum class FrameKind : std::uint32_t { file = 1, failure = 2, object = 3, begun = 4 };

/// The process that sent a value, told apart from later ones of the same number.
struct Sender {
  std::uint64_t process = 0;
  std::uint64_t start = 0;  // when it began, in the system's ticks

  bool operator==(const Sender&) const = default;
};

/// One frame as it was read. Only the members of its kind are set.
struct Frame {
  FrameKind kind = FrameKind::object;
  std::uint32_t files = 0;  // file: of the whole save
  FileResult file;          // file
  Error failure;            // failure
  Sender sender;            // object, begun
  std::string value;        // object, begun
};

std::string encode_file(const FileResult& result, std::uint32_t files);
std::string encode_failure(const Error& error);
/// An object or a begun frame.
std::string encode_value(FrameKind kind, const Sender& sender, std::span<const std::byte> value);

/// Fails with frame_damaged.
Result<std::vector<Frame>> decode_frames(std::span<const std::byte> bytes);

}  // namespace torch_ckpt::format
