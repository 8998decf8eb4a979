#include "torch/tensor_reads.h"

#include <algorithm>
#include <span>
#include <utility>

#include "format/crc32.h"
#include "torch/tensor_checks.h"

namespace torch_ckpt::tensors {

std::uint64_t TensorReads::stored_bytes() const {
  std::uint64_t bytes = 0;
  for (const TensorRead& read : reads_) {
    bytes += read.region_bytes(read.dtype.item_bytes());
  }
  return bytes;
}

std::uint32_t TensorReads::digest() const {
  std::uint32_t crc = 0;
  for (const TensorRead& read : reads_) {
    const Extents offsets = read.offsets();
    const std::uint64_t record[] = {read.record.offset, read.record.length};
    crc = format::crc32(crc, std::as_bytes(std::span(files_.at(read.record.file))));
    crc = format::crc32(crc, std::as_bytes(std::span(record)));
    crc = format::crc32(crc, std::as_bytes(std::span(offsets)));
    crc = format::crc32(crc, std::as_bytes(std::span(read.lengths())));
  }
  return crc;
}

std::vector<int> TensorReads::devices() const {
  std::vector<int> found;
  for (const TensorRead& read : reads_) add_cuda_device(found, read.tensor);
  return found;
}

void TensorReads::split(std::uint64_t max_bytes,
                        const std::function<bool(std::string_view)>& can_split) {
  std::vector<TensorRead> parts;
  for (TensorRead& read : reads_) {
    const std::int64_t lines = read.tensor.dims() == 0 ? 1 : read.tensor.sizes()[0];
    const std::uint64_t bytes = read.tensor.nbytes();
    if (bytes <= max_bytes || lines <= 1 || !can_split(files_.at(read.record.file))) {
      parts.push_back(std::move(read));
      continue;
    }
    const auto step = static_cast<std::int64_t>(
        std::max<std::uint64_t>(1, max_bytes * static_cast<std::uint64_t>(lines) / bytes));
    for (std::int64_t begin = 0; begin < lines; begin += step) {
      const std::int64_t length = std::min(step, lines - begin);
      TensorRead::Region region{read.offsets(), read.lengths()};
      region.offsets[0] += static_cast<std::uint64_t>(begin);
      region.lengths[0] = static_cast<std::uint64_t>(length);
      TensorRead part = read;
      part.region = std::make_shared<const TensorRead::Region>(std::move(region));
      part.tensor = read.tensor.narrow(0, begin, length);
      parts.push_back(std::move(part));
    }
  }
  reads_ = std::move(parts);
}

TensorReads TensorReads::subset(const std::vector<std::size_t>& numbers) const {
  TensorReads found;
  found.files_ = files_;
  for (const std::size_t number : numbers) found.reads_.push_back(reads_.at(number));
  return found;
}

}  // namespace torch_ckpt::tensors
