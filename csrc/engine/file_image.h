#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "format/torch_record.h"
#include "staging/source.h"

namespace torch_ckpt::engine {

/// The parts that all records with the same pickle and payload size share.
struct RecordTemplate {
  std::string pickle;
  format::RecordLayout layout;
  std::string head;
  std::uint32_t head_crc = 0;
};

struct ImageItem {
  std::uint64_t offset = 0;  // in the file
  std::uint64_t bytes = 0;   // in the file, archive headers included
  staging::Source source;
  std::shared_ptr<const RecordTemplate> record;  // nullptr: the source's bytes without an archive
};

// The layout of one data file: items back to back, as stock torch lays them out. It is complete
// before any byte is copied, except for the checksums.
class FileImage {
 public:
  /// Appends the bytes of `source`, without an archive.
  void add_bytes(staging::Source source);
  /// Appends a torch.save record of one tensor whose storage is `source`.
  void add_tensor(const format::TensorHeader& header, staging::Source source);

  const std::vector<ImageItem>& items() const { return items_; }
  std::uint64_t bytes() const { return bytes_; }
  /// The CUDA device of the first source on a device; staging::Source::kHost if there is none.
  int device() const { return device_; }
  /// Payload bytes of all sources on devices.
  std::uint64_t device_bytes() const { return device_bytes_; }

 private:
  void append(ImageItem item);

  std::vector<ImageItem> items_;
  std::uint64_t bytes_ = 0;
  int device_ = staging::Source::kHost;
  std::uint64_t device_bytes_ = 0;
  std::shared_ptr<const RecordTemplate> last_;
};

}  // namespace torch_ckpt::engine
