#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "format/item_locations.h"

namespace torch_ckpt::format {

/// Describes a file that a save has written.
struct FileResult {
  std::string name;  // relative to the checkpoint's directory
  ItemLocations locations;
  std::vector<std::uint32_t> crcs;  // CRC-32 of each item's payload, in the order of `locations`
  std::string checksum_table;       // format/checksum_table.h

  bool operator==(const FileResult&) const = default;
};

// Frames carry results between processes. Integers are little-endian.
//
//   frames  := frame*
//   frame   := "TCF2" kind:u32 bytes:u64 payload[bytes] crc:u32   ; CRC-32 of the preceding bytes
//   payload := file | failure | object | begin
//   file    := files:u32 name:text table:text locations:text crc:u32*   ; one CRC-32 per location
//   failure := code:u32 errno:u32 offset:u64 operation:text path:text detail:text
//   object  := process start:u64 byte*           ; a value in the sender's encoding (for example
//                                                ; a Python pickle)
//   begin   := process start:u64 byte*           ; name of the task that the sender begins
//   text    := bytes:u64 byte[bytes]
//   process := pid:u64
//
// A truncated or damaged frame makes decoding fail with frame_damaged.
enum class FrameKind : std::uint32_t { file = 1, failure = 2, object = 3, begin = 4 };

/// Identifies the process that sent a value. The start time distinguishes it from a later process
/// with the same id.
struct Sender {
  std::uint64_t process = 0;
  std::uint64_t start = 0;  // start time in clock ticks since boot

  bool operator==(const Sender&) const = default;
};

/// A decoded frame. Only the members for its kind are set.
struct Frame {
  FrameKind kind = FrameKind::object;
  std::uint32_t files = 0;  // file: number of files in the save
  FileResult file;          // file
  Error failure;            // failure
  Sender sender;            // object, begin
  std::string value;        // object, begin
};

std::string encode_file(const FileResult& result, std::uint32_t files);
/// Encodes the results of all files of a save, each as a frame.
std::string encode_files(std::span<const FileResult> results);
std::string encode_failure(const Error& error);
/// kind: object or begin.
std::string encode_value(FrameKind kind, const Sender& sender, std::span<const std::byte> value);

/// Fails with frame_damaged.
Result<std::vector<Frame>> decode_frames(std::span<const std::byte> bytes);
/// Decodes the output of encode_files(). Fails with frame_damaged, also if a file is missing.
Result<std::vector<FileResult>> decode_files(std::span<const std::byte> bytes);

}  // namespace torch_ckpt::format
