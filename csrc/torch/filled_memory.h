#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

namespace torch_ckpt::tensors {

// The memory that the items of a wave fill. If two items fill the same memory, the later one must
// win, as in torch. Reading both in one wave would mix their bytes and break their checksums.
class FilledMemory {
 public:
  /// Adds the memory of a tensor. Returns false, and adds nothing, if another name fills some of
  /// it.
  bool add(const std::string& name, const at::Tensor& tensor);
  void clear() { spans_.clear(); }

 private:
  struct Span {
    std::uintptr_t end = 0;
    std::string name;
  };
  std::map<std::uintptr_t, Span> spans_;  // by begin; disjoint
};

}  // namespace torch_ckpt::tensors
