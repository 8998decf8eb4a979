#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/context.h"
#include "error.h"
#include "format/delta.h"
#include "os/directory.h"
#include "os/file.h"

namespace torch_ckpt::engine {

/// Writes the delta from a base to a version as a file in the version's directory. Both are
/// directories of safetensors files that have checksums (format/safe_checksums.h), and are verified
/// while they are read. name: the base's name, for messages.
Result<> write_delta(Context& context, const os::Directory& base, std::string name,
                     const os::Directory& version, bool sync);

// A delta that has been read into memory. It applies to the base only: the checksums of all blocks
// of the base are part of the delta.
class Delta {
 public:
  /// A tensor of the version.
  struct Tensor {
    const format::SafeTensor* tensor;
    const format::DeltaTensor* change;
  };

  /// Reads the file completely. Fails as format::decode_delta() does.
  static Result<Delta> read(Context& context, const os::File& file);

  const std::string& base() const { return contents_.base; }
  const std::vector<format::DeltaFile>& files() const { return contents_.files; }
  /// The tensors of all files, in order.
  std::vector<Tensor> tensors() const;

  /// Changes the tensors in place, from the base's values to the version's. targets: the memory of
  /// each tensor in tensors(). Checks each block of the targets against the base's checksum, and
  /// each block of the delta. If a check fails, restores the targets, and fails with
  /// Errc::wrong_base or Errc::checksum_mismatch and the name of the tensor. Fails with
  /// Errc::invalid_argument if targets share memory, unless they are the same memory with the same
  /// changes. After a success, the delta contains the former elements, and must not be used again.
  Result<> apply(Context& context, std::span<const std::span<std::byte>> targets);

  /// Writes the safetensors files of the version to an empty directory, without fsync. `base` is a
  /// directory that has checksums. Fails like apply().
  Result<> write_files(Context& context, const os::Directory& base, const os::Directory& to) const;

 private:
  Delta(std::unique_ptr<std::byte[]> bytes, format::DeltaContents contents)
      : bytes_(std::move(bytes)), contents_(std::move(contents)) {}
  std::span<std::byte> payload_of(const format::DeltaBlock& block) const;

  std::unique_ptr<std::byte[]> bytes_;
  format::DeltaContents contents_;
};

}  // namespace torch_ckpt::engine
