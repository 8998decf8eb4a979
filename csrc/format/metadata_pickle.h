#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "error.h"
#include "format/pickle_reader.h"

namespace torch_ckpt::format {

// The metadata of a checkpoint is a pickle, which is a program for Python's unpickler. A list of
// names that it may use does not make it harmless: BUILD sets attributes of whatever a name stands
// for, lengths and memo indices make the unpickler allocate, and tuples that hold each other twice
// make it hash for ever. So the program is walked first, with kinds instead of values; nothing
// of it runs, and Python runs what has passed.

/// What a program may do with what a name stands for. Classes and functions can be put nowhere,
/// only called, so that no state ever reaches one of them, nor a member of an enum.
enum class GlobalRole : std::uint8_t {
  value,        // be part of other values; a dtype
  function,     // be called with one tuple of scalars and tuples; torch.Size, paths
  enumeration,  // as function; or be one of the two that `member` is called with; enums
  member,       // be called with an enum and a member's name; getattr, as Python 3.11.0 to 3.11.3
                // pickle a member
  mapping,      // be called with nothing, and the result be given items; OrderedDict
  dict_class,   // be made without arguments, and be given a dict as state, once
  key_class,    // as dict_class; its instances may be keys of dicts; MetadataIndex
  tuple_class,  // be made without arguments, and be given a tuple as state; TensorProperties
  slots_class,  // be made without arguments, and be given (None, dict) as state; ShardMetadata
};

/// nullopt for a word that is not a role.
std::optional<GlobalRole> role_named(std::string_view word);

/// By "module name", with one space.
using Globals = std::map<std::string, GlobalRole, std::less<>>;

/// What metadata stays far below. docs/format.md has the reasons.
struct MetadataLimits {
  static constexpr std::size_t kDepth = 64;  // of values within values
  static constexpr std::size_t kStack = std::size_t{1} << 20;
  static constexpr std::size_t kNameBytes = PickleReader::kNameBytes;
  // Values that one holds, each counted as often as it is reached: what hashing or printing costs.
  static constexpr std::uint32_t kKeyWeight = 128;
  static constexpr std::uint32_t kArgumentsWeight = 4096;
  static constexpr std::uint32_t kWeight = 0xfffffffe;
};

/// The number of bytes up to and including STOP. Binary opcodes of protocols 2 to 5 as CPython's
/// picklers write them, and no others. Takes time and memory in proportion to the bytes.
///
/// Errc::pickle_forbidden for a name that is not among `allowed`; another pickle_* for each other
/// defect, with the offset of the opcode.
Result<std::size_t> check_metadata_pickle(std::span<const std::byte> bytes, const Globals& allowed);

}  // namespace torch_ckpt::format
