#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "format/tensor_pickle.h"
#include "format/torch_record.h"
#include "staging/source.h"

namespace torch_ckpt::engine {

struct ImageItem {
  std::uint64_t offset = 0;  // in the file
  std::uint64_t bytes = 0;   // in the file, including archive headers
  staging::Source source;
  std::shared_ptr<const format::RecordTemplate> record;  // nullptr: only the source's bytes
};

// The layout of one data file: items back to back, as in stock torch. Except for the checksums, it
// is complete before any bytes are copied.
class FileImage {
 public:
  /// Appends the bytes of `source`, without an archive.
  void add_bytes(staging::Source source);
  /// Appends a torch.save record of one tensor whose storage is `source`.
  void add_tensor(const format::TensorHeader& header, staging::Source source);

  const std::vector<ImageItem>& items() const { return items_; }
  std::uint64_t bytes() const { return bytes_; }
  /// Returns the CUDA device of the first source that is on a device; staging::Source::kHost if
  /// none is.
  int device() const { return device_; }
  /// Returns the total payload bytes of all sources on devices.
  std::uint64_t device_bytes() const { return device_bytes_; }

 private:
  void append(ImageItem item);

  std::vector<ImageItem> items_;
  std::uint64_t bytes_ = 0;
  int device_ = staging::Source::kHost;
  std::uint64_t device_bytes_ = 0;
  // The header and the record of the last tensor.
  format::TensorHeader header_;
  std::shared_ptr<const format::RecordTemplate> record_;
};

}  // namespace torch_ckpt::engine
