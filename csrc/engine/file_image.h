#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "format/tensor_pickle.h"
#include "format/torch_record.h"
#include "planning/box_runs.h"
#include "staging/host_scatter.h"
#include "staging/source.h"

namespace torch_ckpt::engine {

/// The place of a part of a tensor in a file that several ranks write.
struct PartPlace {
  std::uint64_t tensor = 0;  // offset of the tensor's data in the file
  planning::BoxRuns runs;    // the part's elements in the tensor
  // Converts the source's elements to elements of `item_bytes` bytes; empty: no conversion. Sources
  // on devices must not need one.
  staging::Convert convert = {};
  std::size_t item_bytes = 1;
};

struct ImageItem {
  std::uint64_t offset = 0;  // in the image
  std::uint64_t bytes = 0;   // in the image, including archive headers
  staging::Source source;
  std::shared_ptr<const format::RecordTemplate> record;  // nullptr: only the source's bytes
  std::shared_ptr<const PartPlace> place;                // nullptr: the image is the file
};

// The layout of the bytes that a save writes to one file. Except for the checksums, it is complete
// before any bytes are copied. An image is one of:
//
//   - a data file: items back to back, as in stock torch;
//   - this rank's parts of a file that several ranks write. The parts are packed in the order of the
//     file, and for_each_segment() gives their places. An image has small gaps, so that a long run
//     has the same alignment in the image as in the file, as direct I/O requires.
//   - the same without gaps, which is a file of its own. If this rank has all parts of a file, its
//     image is the complete file, which begins with a head.
class FileImage {
 public:
  /// Reserves memory for a number of items.
  void reserve(std::size_t items) { items_.reserve(items); }
  /// Appends the bytes of `source`, without an archive.
  void add_bytes(staging::Source source);
  /// Appends a torch.save record of one tensor whose storage is `source`.
  void add_tensor(const format::TensorHeader& header, staging::Source source);

  /// Begins an image of parts that is a file of its own. The image begins with `head`.
  void pack(std::string head) {
    is_of_parts_ = is_packed_ = true;
    bytes_ = head.size();
    head_ = std::move(head);
  }
  /// Appends a part of a tensor, a source with its elements in row-major order. Parts must be added
  /// in the order of their first bytes in the file.
  void add_part(staging::Source source, PartPlace place);

  /// Calls visit(offset in the file, offset in the image, bytes) for each contiguous part of the
  /// file among the bytes [begin, end) of the image, in ascending order.
  template <class Visit>
  void for_each_segment(std::uint64_t begin, std::uint64_t end, Visit&& visit) const {
    if (!is_of_parts_) return visit(begin, begin, end - begin);
    for (auto item = first_after(begin); item != items_.end() && item->offset < end; ++item) {
      const PartPlace& place = *item->place;
      place.runs.for_each(std::max(begin, item->offset) - item->offset,
                          std::min(end, item->offset + item->bytes) - item->offset,
                          [&](std::uint64_t position, std::uint64_t packed, std::uint64_t bytes) {
                            visit(place.tensor + position, item->offset + packed, bytes);
                          });
    }
  }

  /// True for parts of a file that several ranks write.
  bool is_of_parts() const { return is_of_parts_; }
  /// True if the image is not the file, but its parts have places in the file.
  bool is_scattered() const { return is_of_parts_ && !is_packed_; }
  const std::string& head() const { return head_; }
  const std::vector<ImageItem>& items() const { return items_; }
  /// Returns the first item that ends after a position in the image.
  std::vector<ImageItem>::const_iterator first_after(std::uint64_t offset) const {
    return std::upper_bound(
        items_.begin(), items_.end(), offset,
        [](std::uint64_t at, const ImageItem& item) { return at < item.offset + item.bytes; });
  }
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
  bool is_of_parts_ = false;
  bool is_packed_ = false;
  std::string head_;
  int device_ = staging::Source::kHost;
  std::uint64_t device_bytes_ = 0;
  // The header and the record of the last tensor.
  format::TensorHeader header_;
  std::shared_ptr<const format::RecordTemplate> record_;
};

}  // namespace torch_ckpt::engine
