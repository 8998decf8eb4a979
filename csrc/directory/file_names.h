#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "error.h"
#include "os/directory.h"

namespace torch_ckpt::directory {

/// Kinds of files in a checkpoint's directory, by their names.
enum class FileKind {
  data,       // "__3_0.distcp" (rank, bucket), "__3_5f0c19ab_0.distcp" (rank, tag, bucket); may
              // begin with a separation hint
  metadata,   // ".metadata"; "__3.metadata" if rank 3 saves independently
  temporary,  // metadata under its temporary name
  other,
};

struct FileName {
  FileKind kind = FileKind::other;
  std::string_view rank;  // points into the parsed name; empty if the name has no rank
};

/// Hexadecimal digits of a save's tag, and of a temporary name's suffix.
inline constexpr std::size_t kTagDigits = 8;
inline constexpr std::size_t kSuffixDigits = 32;

FileName parse_file_name(std::string_view name);

/// Returns the name of the metadata file. Pass a rank if ranks save independently.
std::string metadata_name(std::optional<int> rank);

/// Returns unpredictable hexadecimal digits.
std::string random_hex(std::size_t digits);

/// Chooses the prefix of one rank's data files: `prefix`, or the same with a new tag if the
/// directory has any metadata, or data files of the rank, or if `taken` contains `prefix`.
///
/// `prefix` is "__{rank}_" or "__{rank}_{tag}_"; any other prefix is returned unchanged. `taken`
/// has the prefixes of other saves of this process, which may not have created their files yet.
Result<std::string> choose_prefix(const os::Directory& directory, const std::string& prefix,
                                  const std::set<std::string>& taken);

}  // namespace torch_ckpt::directory
