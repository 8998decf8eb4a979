#include "os/function_table.h"

#include <dlfcn.h>

namespace torch_ckpt::os {

Lookup loaded_library(const std::string& name) {
  void* const library = ::dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return {};
  return [library](const char* function) { return ::dlsym(library, function); };
}

const char* FunctionTable::load(const Lookup& lookup) const {
  const char* missing = nullptr;
  for (const AnyFunction* function : functions_) {
    function->address_ = lookup(function->name_);
    if (function->address_ == nullptr && function->presence_ == Presence::required &&
        missing == nullptr) {
      missing = function->name_;
    }
  }
  return missing;
}

}  // namespace torch_ckpt::os
