#include "engine/file_image.h"

#include <utility>

#include "checked_math.h"
#include "os/file.h"
#include "planning/collective_ranges.h"

namespace torch_ckpt::engine {
namespace {

// Elements must not be split between two pieces of the image.
constexpr std::uint64_t kPartAlignment = 64;

}  // namespace

void FileImage::append(ImageItem item) {
  item.offset = bytes_;
  bytes_ += item.bytes;
  if (device_ == staging::Source::kHost) device_ = item.source.device;
  if (item.source.device != staging::Source::kHost) device_bytes_ += item.source.bytes;
  items_.push_back(std::move(item));
}

void FileImage::add_bytes(staging::Source source) {
  const std::uint64_t bytes = source.bytes;
  append({0, bytes, std::move(source), nullptr, nullptr});
}

void FileImage::add_tensor(const format::TensorHeader& header, staging::Source source) {
  // Buckets are sorted by size, so tensors of the same shape are usually adjacent and share a
  // template.
  if (record_ == nullptr || header_ != header || record_->layout().payload_bytes != source.bytes) {
    record_ = std::make_shared<format::RecordTemplate>(format::encode_tensor_pickle(header),
                                                       source.bytes);
    header_ = header;
  }
  append({0, record_->layout().total_bytes(), std::move(source), record_, nullptr});
}

void FileImage::add_part(staging::Source source, PartPlace place) {
  is_of_parts_ = true;
  if (is_packed_) {
    // A file has wide elements first, so no element is split between two pieces of the image.
  } else if (place.runs.run_bytes() >= planning::kLongRunBytes) {
    // Unsigned arithmetic: the distance to the next offset with the alignment of the first run.
    const std::uint64_t first = place.tensor + place.runs.begin();
    bytes_ += (first - bytes_) % os::kDirectAlignment;
  } else {
    bytes_ = align_up(bytes_, kPartAlignment);
  }
  const std::uint64_t bytes = place.runs.bytes();
  append(
      {0, bytes, std::move(source), nullptr, std::make_shared<const PartPlace>(std::move(place))});
}

}  // namespace torch_ckpt::engine
