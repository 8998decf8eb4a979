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

// Fills tensors in waves of reads, each of which stays within the memory limit.
//
//   1. The engine reads directly into tensors that it may write to. Other tensors are read into a
//      temporary tensor, from which torch copies them, on the host or on the device. A temporary
//      that would be too large is read in parts.
//   2. If two names fill the same memory, the later one waits for the wave of the earlier one.
//   3. A tensor that turns out to be stored transposed, conjugated or otherwise not row-major is
//      read again with the layout of its record. If stored elements overlap, the entire storage is
//      read.
//
// For one thread, without the GIL. Targets and their tensors outlive it. Throws Failure, and the
// exceptions of ATen.
class LoadWaves {
 public:
  LoadWaves(engine::LimitedLoads& loads, const std::vector<TensorTarget>& targets)
      : loads_(loads), targets_(targets) {}

  /// The numbers of the targets that torch.load must read.
  std::vector<std::size_t> run();

 private:
  using Layout = std::shared_ptr<const format::TensorHeader>;

  // One read of a target, or of some of its rows.
  struct Step {
    std::size_t target = 0;
    engine::ReadRequest request;
    at::Tensor tensor;     // the caller's
    at::Tensor temporary;  // undefined if the engine writes into the tensor

    void finish();
  };

  void run_all_waves();
  void run_wave();
  bool add(std::size_t index, const Layout& layout);
  bool add_with_temporary(std::size_t index, const Layout& layout, bool on_device);
  bool add_rows(std::size_t index, const Layout& layout, std::uint64_t begin, std::uint64_t count,
                const at::Tensor& tensor, const at::Tensor& temporary);
  void read_storage(const TensorTarget& target, const format::TensorHeader& header);

  engine::LimitedLoads& loads_;
  const std::vector<TensorTarget>& targets_;
  std::vector<Step> wave_;
  FilledMemory filled_;     // by all waves since it was last cleared
  std::uint64_t held_ = 0;  // bytes of the wave's temporaries on the host
  std::uint64_t held_on_device_ = 0;
  std::vector<std::pair<std::size_t, Layout>> layouts_;
  std::vector<std::size_t> unknown_;
  std::uint64_t bytes_done_ = 0;
};

}  // namespace torch_ckpt::tensors
