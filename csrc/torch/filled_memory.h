#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "torch/tensor.h"

namespace torch_ckpt::tensors {

// Records the memory that the items of a wave fill. If two items fill the same memory, the later
// item must win, as in torch. Reading both in one wave would mix their bytes and make their
// checksums fail.
class FilledMemory {
 public:
  /// Adds the memory of a tensor. If another name fills part of this memory, returns false and adds
  /// nothing.
  bool add(const std::string& name, const Tensor& tensor);
  void clear() { spans_.clear(); }

 private:
  struct Span {
    std::uintptr_t end = 0;
    std::string name;
  };
  std::map<std::uintptr_t, Span> spans_;  // by first address; disjoint
};

}  // namespace torch_ckpt::tensors
