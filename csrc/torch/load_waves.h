#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/limited_loads.h"
#include "format/tensor_pickle.h"
#include "torch/filled_memory.h"
#include "torch/tensor_target.h"

namespace torch_ckpt::tensors {

// Fills tensors in waves of reads. Each wave stays within the memory limit.
//
//   1. The engine reads directly into tensors that it may write to. Any other tensor is read into a
//      temporary tensor on the host or device, from which torch copies it. If the temporary would be
//      too large, the tensor is read in parts.
//   2. If two names fill the same memory, the later name is read after the wave of the earlier one.
//   3. If a tensor turns out to be stored transposed, conjugated or otherwise not row-major, it is
//      read again with the layout given in its record. If stored elements overlap, the entire
//      storage is read.
//
// Must be used from a single thread, without the GIL. The targets and their tensors must outlive
// it. Throws Failure, and std::runtime_error with torch's text.
class LoadWaves {
 public:
  LoadWaves(engine::LimitedLoads& loads, const std::vector<TensorTarget>& targets)
      : loads_(loads), targets_(targets) {}

  /// Reads all targets. Returns the numbers of those that only torch.load can read.
  std::vector<std::size_t> run();
  /// Returns the numbers of the targets that run() has changed, also if it has failed.
  const std::vector<std::size_t>& changed() const { return changed_; }

 private:
  using Layout = std::shared_ptr<const format::TensorHeader>;

  // One read of a target or of some of its rows.
  struct Step {
    std::size_t target = 0;
    engine::ReadRequest request;
    Tensor tensor;     // the caller's tensor
    Tensor temporary;  // undefined if the engine writes directly into `tensor`
  };

  void run_all_waves();
  void run_wave();
  bool add(std::size_t index, const Layout& layout);
  bool add_with_temporary(std::size_t index, const Layout& layout, bool on_device);
  bool add_rows(std::size_t index, const Layout& layout, std::uint64_t begin, std::uint64_t count,
                const Tensor& tensor, const Tensor& temporary);
  void read_storage(std::size_t index, const format::TensorHeader& header);

  engine::LimitedLoads& loads_;
  const std::vector<TensorTarget>& targets_;
  std::vector<Step> wave_;
  FilledMemory filled_;     // memory filled by all waves since the last clear()
  std::uint64_t held_ = 0;  // bytes of the wave's temporaries on the host
  std::uint64_t held_on_device_ = 0;
  std::vector<std::pair<std::size_t, Layout>> layouts_;
  std::vector<std::size_t> unknown_;
  std::vector<std::size_t> changed_;
  std::uint64_t bytes_done_ = 0;
};

}  // namespace torch_ckpt::tensors
