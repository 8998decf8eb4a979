#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine/load_session.h"
#include "format/tensor_pickle.h"
#include "torch/filled_memory.h"
#include "torch/tensor_read.h"

namespace torch_ckpt::tensors {

// Fills tensors in waves of reads. Each wave is a load that stays within the memory limit: scratch
// memory and temporary tensors count towards it.
//
//   1. The engine reads directly into tensors that it may write to. Any other tensor is read into a
//      temporary tensor on the host or device, from which torch copies it. If the temporary would be
//      too large, the tensor is read in parts.
//   2. If two names fill the same memory, the later name is read after the wave of the earlier one.
//   3. If a tensor turns out to be stored transposed, conjugated or otherwise not row-major, it is
//      read again with the layout given in its record. If stored elements overlap, the entire
//      storage is read.
//
// Must be used from a single thread, without the GIL. Throws Failure, and std::runtime_error with
// torch's text.
class LoadWaves {
 public:
  /// Waits until a load has ended. May throw, but only after the load has ended. `done_before` is
  /// the number of bytes read by earlier waves.
  using Wait = std::function<void(engine::LoadSession& load, std::uint64_t done_before)>;

  /// `options.max_scratch_bytes` is the limit. The folder, the reads and their tensors must
  /// outlive this object.
  LoadWaves(const engine::Folder& folder, std::vector<engine::LoadFile> files,
            engine::LoadOptions options, Wait wait, const std::vector<TensorRead>& reads)
      : folder_(folder),
        files_(std::move(files)),
        options_(std::move(options)),
        wait_(std::move(wait)),
        reads_(reads) {}

  /// Reads all tensors. Returns the numbers of the reads that only torch.load can do.
  std::vector<std::size_t> run();
  /// Returns the numbers of the reads whose tensors run() has changed, also if it has failed.
  const std::vector<std::size_t>& changed() const { return changed_; }

 private:
  using Layout = std::shared_ptr<const format::TensorHeader>;

  // One of the reads, or some of its rows.
  struct Step {
    std::size_t number = 0;
    engine::RegionRead read;
    Tensor tensor;     // the caller's tensor
    Tensor temporary;  // undefined if the engine writes directly into `tensor`
  };

  void run_all_waves();
  void run_wave();
  bool add(std::size_t number, const Layout& layout);
  bool add_with_temporary(std::size_t number, const Layout& layout, bool on_device);
  bool add_rows(std::size_t number, const Layout& layout, std::uint64_t begin, std::uint64_t count,
                const Tensor& tensor, const Tensor& temporary);
  void read_storage(std::size_t number, const format::TensorHeader& header);
  std::shared_ptr<engine::LoadSession> load(std::vector<engine::RegionRead> reads,
                                            std::uint64_t held,
                                            const std::vector<staging::ReadyEvent>& ready);

  const engine::Folder& folder_;
  const std::vector<engine::LoadFile> files_;
  const engine::LoadOptions options_;
  const Wait wait_;
  const std::vector<TensorRead>& reads_;
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
