#pragma once

#include <cstdint>
#include <memory>

#include "engine/delivery.h"
#include "format/tensor_pickle.h"
#include "planning/region.h"
#include "planning/stored_record.h"

namespace torch_ckpt::engine {

enum class ReadKind {
  // The record's bytes, such as an object.
  raw,
  // The record's bytes, which are the row-major elements of a tensor.
  bare,
  // The payload of a tensor with the record's dtype and sizes, stored row-major or with the strides
  // of `layout`.
  tensor,
  // The entire storage of such a tensor, with any strides.
  storage,
};

/// Reads a region of a record into a target.
struct RegionRead {
  const planning::StoredRecord* record = nullptr;  // must outlive the read
  ReadKind kind = ReadKind::raw;
  std::shared_ptr<const format::TensorHeader> layout = {};
  planning::Region region = {};
  Target target = {};
  bool reads_entire_payload = false;  // also read bytes outside the region, to verify them

  /// True if the entire record is payload, and is not parsed as an archive.
  bool is_all_payload() const { return kind == ReadKind::raw || kind == ReadKind::bare; }

  /// Returns the size that the record's payload should have.
  std::uint64_t payload_bytes() const {
    if (is_all_payload()) return record->length;
    if (kind == ReadKind::storage) return region.covering().end;
    if (layout != nullptr) return layout->storage_bytes;
    std::uint64_t bytes = record->dtype->item_bytes;
    for (const std::uint64_t size : record->sizes) bytes *= size;
    return bytes;
  }
};

}  // namespace torch_ckpt::engine
