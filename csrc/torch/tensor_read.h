#pragma once

#include <cstdint>
#include <memory>

#include "format/tensor_pickle.h"
#include "planning/stored_record.h"
#include "torch/extents.h"
#include "torch/tensor.h"

namespace torch_ckpt::tensors {

/// Reads a region of a stored tensor into a tensor.
struct TensorRead {
  struct Region {
    Extents offsets;
    Extents lengths;
  };

  planning::StoredRecord record;
  ScalarType dtype;                      // the stored one
  std::shared_ptr<const Region> region;  // nullptr: the complete stored tensor
  Tensor tensor;
  bool is_transformed = false;  // a transform has changed the record, so only torch can read it

  Extents offsets() const {
    return region == nullptr ? Extents(record.sizes.size()) : region->offsets;
  }
  const Extents& lengths() const { return region == nullptr ? record.sizes : region->lengths; }
  std::uint64_t region_bytes(std::uint64_t item_bytes) const;
};

/// Creates a read. record: name and location of the record. If the stored tensor has dimensions,
/// empty `region_lengths` select all of it. Throws Failure if sizes are invalid, if the region does
/// not lie within the stored tensor, or if `tensor` does not have the size of the region.
TensorRead make_read(planning::StoredRecord record, ScalarType dtype, Tensor::ExtentsView sizes,
                     Tensor::ExtentsView region_offsets, Tensor::ExtentsView region_lengths,
                     Tensor tensor);

/// Returns an uninitialised tensor of `bytes` bytes, whose memory is unmapped when it is freed.
/// Memory freed by malloc might stay in the heap, so that the process exceeds the memory limit.
Tensor mapped_tensor(const Extents& sizes, ScalarType dtype, std::uint64_t bytes);

/// Returns a view of the read's region of the stored tensor. bytes: the tensor's storage. header:
/// the tensor's layout.
Tensor region_in_storage(const TensorRead& read, const Tensor& bytes,
                         const format::TensorHeader& header);

}  // namespace torch_ckpt::tensors
