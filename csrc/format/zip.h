#pragma once

#include <cstddef>
#include <cstdint>

// The part of PKWARE's APPNOTE 6.3 that torch.save uses: uncompressed entries, zip64, data
// descriptors.
namespace torch_ckpt::format::zip {

inline constexpr std::uint32_t kLocalHeader = 0x04034b50;
inline constexpr std::uint32_t kDescriptor = 0x08074b50;
inline constexpr std::uint32_t kDirectoryEntry = 0x02014b50;
inline constexpr std::uint32_t kEnd64 = 0x06064b50;
inline constexpr std::uint32_t kEnd64Locator = 0x07064b50;
inline constexpr std::uint32_t kEnd = 0x06054b50;

inline constexpr std::size_t kLocalHeaderBytes = 30;
inline constexpr std::size_t kDirectoryEntryBytes = 46;
inline constexpr std::size_t kEnd64Bytes = 56;
inline constexpr std::size_t kEnd64LocatorBytes = 20;
inline constexpr std::size_t kEndBytes = 22;

inline constexpr std::uint16_t kExtraZip64 = 0x0001;
inline constexpr std::uint16_t kFlagDescriptor = 0x0008;
inline constexpr std::uint16_t kFlagUtf8 = 0x0800;

/// Numbers greater than or equal to this are stored in the zip64 extra field, and the 32-bit field
/// holds this value instead.
inline constexpr std::uint64_t kMax32 = 0xffffffff;

}  // namespace torch_ckpt::format::zip
