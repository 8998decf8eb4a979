#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "error.h"
#include "os/directory.h"

namespace torch_ckpt::directory {

/// The kinds of files in a checkpoint's directory, distinguished by name.
enum class FileKind {
  data,       // "__3_0.distcp" (rank, bucket) or "__3_5f0c19ab_0.distcp" (rank, tag, bucket),
              // possibly after a separation hint
  metadata,   // ".metadata"; "__3.metadata" if rank 3 saves independently
  temporary,  // metadata under a temporary name
  other,
};

struct FileName {
  FileKind kind = FileKind::other;
  std::string_view rank;  // view into the parsed name; empty if the name has no rank
};

/// Number of hexadecimal digits in a save's tag, and in the suffix of a temporary name.
inline constexpr std::size_t kTagDigits = 8;
inline constexpr std::size_t kSuffixDigits = 32;

/// Returns true if the text has only hexadecimal digits, as random_hex() returns them.
bool is_hex(std::string_view text);

FileName parse_file_name(std::string_view name);

/// Returns the name of the metadata file. rank: the rank, if ranks save independently.
std::string metadata_name(std::optional<int> rank);

/// Returns unpredictable hexadecimal digits.
std::string random_hex(std::size_t digits);

/// Chooses the prefix for the names of a rank's data files. Returns `prefix`, but with a new tag if
/// the directory contains any metadata or data files of the rank, or if `taken` contains `prefix`.
///
/// `prefix` is "__{rank}_" or "__{rank}_{tag}_"; any other prefix is returned unchanged. `taken`
/// contains the prefixes of this process's other saves, which may not have created files yet.
Result<std::string> choose_prefix(const os::Directory& directory, const std::string& prefix,
                                  const std::set<std::string>& taken);

}  // namespace torch_ckpt::directory
