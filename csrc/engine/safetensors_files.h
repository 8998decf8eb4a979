#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/store.h"
#include "error.h"
#include "format/safetensors.h"
#include "index/checkpoint_index.h"

namespace torch_ckpt::engine {

/// A safetensors file whose header has been read.
struct SafetensorsFile {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint32_t header_crc = 0;  // CRC-32 of the bytes before the data
  /// The file has changed since its checksums were saved, so its checksums are not used.
  bool has_stale_checksums = false;
};

/// The contents of safetensors files, without the data.
struct SafetensorsFiles {
  index::CheckpointIndex index;
  format::SafeMetadata metadata;  // of all files; the last file has precedence
  std::vector<SafetensorsFile> files;
};

/// Reads the headers of safetensors files in a folder. `name` is the name of one file, or of an
/// index that names the file of each tensor (format/weight_map.h). Uses the checksums in the
/// directory (format/safe_checksums.h) for files with the recorded size and header.
///
/// Fails with Errc::metadata_inconsistent if a file is damaged, or if the index does not match the
/// files; with Errc::checksum_mismatch or Errc::table_inconsistent if the checksums are damaged;
/// and with Errc::outside_directory if a name leads out of the directory.
Result<SafetensorsFiles> read_safetensors(const Folder& folder, const std::string& name);

}  // namespace torch_ckpt::engine
