#pragma once

#include <algorithm>
#include <string_view>

namespace torch_ckpt {

/// Returns true if `name` has the form of a file name beneath a directory: it is not empty or
/// absolute, contains no NUL, no backslash and no ".." component, and its last component is neither
/// empty nor ".".
inline bool names_file_beneath(std::string_view name) {
  constexpr std::string_view kForbidden("\0\\", 2);
  const std::string_view last = name.substr(name.rfind('/') + 1);
  if (last.empty() || last == "." || name.front() == '/') return false;
  if (name.find_first_of(kForbidden) != name.npos) return false;
  while (!name.empty()) {
    const std::string_view component = name.substr(0, name.find('/'));
    if (component == "..") return false;
    name.remove_prefix(std::min(name.size(), component.size() + 1));
  }
  return true;
}

}  // namespace torch_ckpt
