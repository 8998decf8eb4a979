#include "engine/file_image.h"

#include <utility>

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
  // Buckets are sorted by size, so tensors of the same shape are usually adjacent and share a
  // template.
  if (record_ == nullptr || header_ != header || record_->layout().payload_bytes != source.bytes) {
    record_ = std::make_shared<format::RecordTemplate>(format::encode_tensor_pickle(header),
                                                       source.bytes);
    header_ = header;
  }
  append({0, record_->layout().total_bytes(), std::move(source), record_});
}

}  // namespace torch_ckpt::engine
