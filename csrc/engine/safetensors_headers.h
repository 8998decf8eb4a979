#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/record_reader.h"
#include "engine/store.h"
#include "error.h"
#include "format/safe_checksums.h"
#include "format/safetensors.h"

namespace torch_ckpt::engine {

/// Returns the error with the path of a file, unless the error has a path.
Error in_file(Error error, const std::string& path);

/// Reads an entire file of at most 1 GiB. Fails with Errc::metadata_inconsistent if it is larger.
Result<std::string> read_text(const DataFile& file);

/// Reads the checksums of a folder. Returns none if the folder has none. Fails with
/// Errc::checksum_mismatch or Errc::table_inconsistent if they are damaged.
Result<std::vector<format::SafeChecksums>> read_safe_checksums(const Folder& folder);

/// The beginning of a safetensors file.
struct StoredHeader {
  std::uint64_t file_bytes = 0;
  std::string bytes;  // before the data
  format::SafetensorsHeader contents;
};

/// Fails with Errc::metadata_inconsistent if the file is not a safetensors file.
Result<StoredHeader> read_safetensors_header(const DataFile& file);

/// A file of a folder that has checksums.
struct ModelFile {
  format::SafeChecksums checksums;
  std::string start;                        // its header; all bytes if it has no checksum table
  std::vector<format::SafeTensor> tensors;  // in the order of the header
};

/// Reads the files that the checksums of a folder name, without the data of tensors. Fails with
/// Errc::checksum_mismatch if a file has changed since its checksums were saved, and with
/// Errc::invalid_argument if the folder has no checksums.
Result<std::vector<ModelFile>> read_model_files(const Folder& folder);

}  // namespace torch_ckpt::engine
