#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

namespace torch_ckpt::tensors {

// Which memory the names of a wave fill. Of two names that fill the same memory the later one wins,
// as in torch; read at once they would be mixed, and checksums of the one be those of the other.
class FilledMemory {
 public:
  /// False, and nothing is noted, where another name fills some of it.
  bool add(const std::string& name, const at::Tensor& tensor);
  void clear() { spans_.clear(); }

 private:
  struct Span {
    std::uintptr_t end = 0;
    std::string name;
  };
  std::map<std::uintptr_t, Span> spans_;  // by begin; apart from each other
};

}  // namespace torch_ckpt::tensors
