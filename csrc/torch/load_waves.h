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

// Fills tensors, in waves of reads that each stay within the limit of memory.
//
//   1. The engine reads straight into tensors that it may write to. Others are read into temporary
//      tensors and copied from there by torch, in parts where a temporary tensor would be too
//      large; on a device that spreads the elements itself, too.
//   2. Where two names fill the same memory the later one waits for the wave of the earlier one.
//   3. What turns out to be stored transposed, conjugated or otherwise not row-major is read again,
//      as its record says. Where the stored elements overlap, all of the storage is read.
//
// For one thread, without the GIL. Targets, with their tensors, outlive it. Throws Failure, and
// what ATen throws.
class LoadWaves {
 public:
  LoadWaves(engine::LimitedLoads& loads, const std::vector<TensorTarget>& targets)
      : loads_(loads), targets_(targets) {}

  /// The numbers of the targets that torch.load must read.
  std::vector<std::size_t> run();

 private:
  using Layout = std::shared_ptr<const format::TensorHeader>;

  // One reading of the engine for a target, or for some of its rows.
  struct Step {
    std::size_t target = 0;
    engine::ReadRequest request;
    at::Tensor tensor;     // of the caller
    at::Tensor temporary;  // undefined where the engine writes into the tensor itself

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
  FilledMemory filled_;     // by this wave and those before, since the last time it was cleared
  std::uint64_t held_ = 0;  // by the temporaries of the wave
  std::uint64_t held_on_device_ = 0;
  std::vector<std::pair<std::size_t, Layout>> layouts_;
  std::vector<std::size_t> unknown_;
  std::uint64_t bytes_done_ = 0;
};

}  // namespace torch_ckpt::tensors
