#include "torch/libtorch.h"

#include <stdexcept>
#include <string>

namespace torch_ckpt::tensors::libtorch {
namespace {

void load(const os::FunctionTable& table, const os::Lookup& library) {
  if (const char* const missing = table.load(library)) {
    throw std::runtime_error(
        std::string("this version of torch has no function ") + missing +
        ", which torch_ckpt needs; install a newer torch_ckpt or an older torch");
  }
}

}  // namespace
void load() {
  const os::Lookup libtorch = os::loaded_library("libtorch_cpu.so");
  if (!libtorch) {
    throw std::runtime_error(
        "torch_ckpt did not find LibTorch (libtorch_cpu.so) among the libraries that `import "
        "torch` has loaded; install torch from PyPI or pytorch.org");
  }
  load(functions, libtorch);
  if (const os::Lookup with_cuda = os::loaded_library("libtorch_cuda.so")) {
    load(cuda_functions, with_cuda);
  }
}

void check(int status) {
  if (status == 0) return;
  throw std::runtime_error(exception_text
                               ? exception_text()
                               : "torch has reported an error; see its text on the standard error");
}

}  // namespace torch_ckpt::tensors::libtorch
