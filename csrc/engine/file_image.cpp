#include "engine/file_image.h"

#include <span>
#include <utility>

#include "format/crc32.h"

namespace torch_ckpt::engine {

void FileImage::append(ImageItem item) {
  item.offset = bytes_;
  bytes_ += item.bytes;
  if (device_ == staging::Source::kHost) device_ = item.source.device;
  if (item.source.device != staging::Source::kHost) device_bytes_ += item.source.bytes;
  items_.push_back(std::move(item));
}

void FileImage::add_bytes(staging::Source source) {
  const std::uint64_t bytes = source.bytes;
  append({0, bytes, std::move(source), nullptr});
}

void FileImage::add_tensor(const format::TensorHeader& header, staging::Source source) {
  std::string pickle = format::encode_tensor_pickle(header);
  // Buckets are sorted by size, so tensors of the same shape are usually adjacent and share a
  // template.
  if (last_ == nullptr || last_->pickle != pickle || last_->layout.payload_bytes != source.bytes) {
    auto fresh = std::make_shared<RecordTemplate>();
    fresh->layout = format::lay_out_record(pickle, source.bytes);
    fresh->head = format::encode_head(pickle, source.bytes);
    fresh->head_crc = format::crc32(0, std::as_bytes(std::span(fresh->head)));
    fresh->pickle = std::move(pickle);
    last_ = std::move(fresh);
  }
  append({0, last_->layout.total_bytes(), std::move(source), last_});
}

}  // namespace torch_ckpt::engine
