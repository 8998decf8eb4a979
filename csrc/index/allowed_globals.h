#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace torch_ckpt::index {

/// The permitted use of a global. Classes and functions may only be called, and cannot be part of
/// other values. So a pickle cannot set the state of a class, a function or an enum member.
enum class GlobalRole : std::uint8_t {
  value,        // part of other values: dtypes
  function,     // called with one tuple of scalars and tuples: torch.Size, pathlib's classes
  enumeration,  // like function, or an argument of `member`: enums
  member,       // called with an enum and a member name: getattr, which Python 3.11.0 to 3.11.3
                // use to pickle enum members
  mapping,      // called without arguments; items are added to the result: OrderedDict
  dict_class,   // created without arguments; the state is a dict, set once
  key_class,    // like dict_class, and instances may be dict keys: MetadataIndex
  tuple_class,  // created without arguments; the state is a tuple: TensorProperties
  slots_class,  // created without arguments; the state is (None, dict): ShardMetadata
};

std::string_view name(GlobalRole role);

/// Roles of globals. Keys have the form "module name", with one space.
using Globals = std::map<std::string, GlobalRole, std::less<>>;

/// Returns the globals that metadata may name.
std::shared_ptr<const Globals> allowed_globals();

/// Allows more dtypes. The table has the dtypes of all known versions of torch; a process that has
/// imported a newer torch adds the names of that torch's dtypes.
void allow_dtypes(std::span<const std::string> names);

}  // namespace torch_ckpt::index
