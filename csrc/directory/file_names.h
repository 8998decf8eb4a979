#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "error.h"
#include "os/directory.h"

namespace torch_ckpt::directory {

/// What a file of a checkpoint's directory is, by its name.
enum class FileKind {
  data,       // "__3_0.distcp", "__3_5f0c19ab_0.distcp": rank, tag where there is one, bucket; a
              // separation hint may stand before it
  metadata,   // ".metadata"; "__3.metadata" of a rank that saves on its own
  temporary,  // metadata that is being written
  other,
};

struct FileName {
  FileKind kind = FileKind::other;
  std::string_view rank;  // its digits, in the name that was looked at; empty where it has none
};

/// Hexadecimal digits of a save's tag, and at the end of a temporary name.
inline constexpr std::size_t kTagDigits = 8;
inline constexpr std::size_t kSuffixDigits = 32;

FileName parse_file_name(std::string_view name);

/// The metadata's file name; of one rank's own where ranks save on their own.
std::string metadata_name(std::optional<int> rank);

/// `digits` hexadecimal digits that nobody can guess.
std::string random_hex(std::size_t digits);

/// The prefix of one rank's data files: `prefix`, tagged where files of this kind are there.
///
/// `prefix` is "__{rank}_", and the tag of the save where it has one; any other one is returned.
/// `taken` are those of other saves of this process that may not have made their files yet.
Result<std::string> choose_prefix(const os::Directory& directory, const std::string& prefix,
                                  const std::set<std::string>& taken);

}  // namespace torch_ckpt::directory
