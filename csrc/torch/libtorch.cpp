#include "torch/libtorch.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace torch_ckpt::tensors::libtorch {
namespace {

/// The functions of this file's header, in the order of their construction.
std::vector<const AnyFunction*>& functions() {
  static std::vector<const AnyFunction*> all;
  return all;
}

/// Returns a handle of a library if the process has loaded it.
void* loaded(const char* library) { return ::dlopen(library, RTLD_LAZY | RTLD_NOLOAD); }

}  // namespace

AnyFunction::AnyFunction(const char* name, Presence presence) : name_(name), presence_(presence) {
  functions().push_back(this);
}

void load() {
  void* const cpu_library = loaded("libtorch_cpu.so");
  if (cpu_library == nullptr) {
    throw std::runtime_error(
        "torch_ckpt did not find LibTorch (libtorch_cpu.so) among the libraries that `import "
        "torch` has loaded; install torch from PyPI or pytorch.org");
  }
  void* const cuda_library = loaded("libtorch_cuda.so");
  for (const AnyFunction* function : functions()) {
    void* const library =
        function->presence_ == Presence::optional_cuda ? cuda_library : cpu_library;
    if (library != nullptr) function->address_ = ::dlsym(library, function->name_);
    if (function->address_ == nullptr && function->presence_ == Presence::required) {
      throw std::runtime_error(
          std::string("this version of torch has no function ") + function->name_ +
          ", which torch_ckpt needs; install a newer torch_ckpt or an older torch");
    }
  }
}

void check(int status) {
  if (status == 0) return;
  throw std::runtime_error(exception_text
                               ? exception_text()
                               : "torch has reported an error; see its text on the standard error");
}

}  // namespace torch_ckpt::tensors::libtorch
