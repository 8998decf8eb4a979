#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "format/pickle_reader.h"
#include "index/extents.h"

namespace torch_ckpt::index {

// The metadata of a checkpoint is a pickle, which is a program for Python's unpickler. A list of
// names that it may use does not make it harmless: BUILD sets attributes of whatever a name stands
// for, lengths and memo indices make the unpickler allocate, and tuples that hold each other twice
// make it hash for ever. So the program is walked first, and nothing of it runs. Python runs what
// has passed, where somebody asks for torch's objects; the index is made of what the walk has
// found.

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
  static constexpr std::size_t kNameBytes = format::PickleReader::kNameBytes;
  // Weights: each value counts 1 as often as it is reached, a text or bytes 1 more for each
  // 64 bytes. Hashing, printing and copying cost in proportion to the weight.
  static constexpr std::uint32_t kKeyWeight = 2048;
  static constexpr std::uint32_t kArgumentsWeight = 4096;
  static constexpr std::uint32_t kWeight = 0xfffffffe;
  static constexpr std::uint32_t weight_of_text(std::size_t bytes) {
    return static_cast<std::uint32_t>(1 + bytes / 64);
  }
  /// The weight that a program of `bytes` bytes may have: without shared values it is less than one
  /// for each byte, and torch's metadata has about a third.
  static constexpr std::uint32_t most_weight(std::size_t bytes) {
    return static_cast<std::uint32_t>(std::min<std::size_t>(kWeight, 65536 + 4 * bytes));
  }
  /// Most lists, dicts and instances in a program of so many bytes. torch's metadata has one for
  /// each 26 bytes.
  static constexpr std::size_t most_objects(std::size_t bytes) {
    return std::min<std::size_t>(kWeight, 4096 + bytes / 6);
  }
};

/// The classes of torch that a walk knows the fields of.
enum class Class : std::uint8_t {
  other,
  metadata,
  tensor,      // TensorStorageMetadata
  object,      // BytesStorageMetadata
  shard,       // ChunkStorageMetadata
  properties,  // TensorProperties
  key,         // MetadataIndex
  place,       // _StorageInfo
  storage_meta,
  size,   // torch.Size
  dtype,  // torch.float32 and the like
};

enum class Kind : std::uint8_t {
  mark,
  none,
  boolean,
  small_integer,  // 32 bits; its hash is the number, so that dicts of them stay fast
  integer,        // 64 bits
  large_integer,  // more
  real,
  text,
  bytes,
  tuple,
  extents,  // a tuple of integers, or a torch.Size of them
  called,   // what a function has returned
  global,
  object,
};

/// A value on the walk's stack.
struct Value {
  // Of tuples: nothing in it but scalars, texts and tuples of those.
  static constexpr std::uint8_t kPlain = 1;
  // Of texts and tuples, too: may be a key of a dict.
  static constexpr std::uint8_t kKey = 2;
  // Of tuples: (None, dict of attribute names), the state of a class with slots.
  static constexpr std::uint8_t kSlots = 4;
  // Of tuples: (an enum, a text), with which one of its members is looked up.
  static constexpr std::uint8_t kNamesMember = 8;
  // Of extents: a tuple, not a torch.Size. Of large integers: negative. Of booleans: true.
  static constexpr std::uint8_t kIs = 16;

  Kind kind = Kind::none;
  std::uint8_t flags = 0;
  std::uint8_t depth = 0;
  std::uint32_t weight = 1;
  // The number of an integer, of extents, of a global or of an object; of what was called the
  // global's; the bits of a real; of a text or bytes the offset of its opcode; of a tuple the
  // number of its first part, and their count from bit 32 on.
  std::uint64_t payload = 0;

  bool is(std::uint8_t flag) const { return (flags & flag) != 0; }
  std::int64_t integer() const { return static_cast<std::int64_t>(payload); }
  std::uint32_t number() const { return static_cast<std::uint32_t>(payload); }
};

enum class ObjectKind : std::uint8_t { list, dict, mapping, instance };

struct Object {
  ObjectKind kind = ObjectKind::list;
  GlobalRole role = GlobalRole::value;
  bool fetched = false;         // from the memo, so that others may hold it
  bool built = false;           // has got its state
  bool attribute_names = true;  // of dicts: all keys are names that a state may have
  bool taken = false;           // of dicts: an instance's state, and no longer here
  std::uint8_t depth = 0;
  std::uint32_t weight = 1;
  std::uint32_t type = 0;  // the global's number
  // Of lists and dicts: segments of parts. Of instances: the record's number, or the part that is
  // the state.
  std::uint32_t first = kNothing;
  std::uint32_t last = kNothing;

  static constexpr std::uint32_t kNothing = 0xffffffff;
};

/// Extents, or why they are none. The reason has a '%' where the name of what is looked for stands.
struct ExtentsField {
  std::uint32_t id = 0;
  std::uint32_t problem = Object::kNothing;
};

struct ShardRecord {
  ExtentsField offsets, sizes;
  bool is_whole = true;  // has both
};
struct KeyRecord {
  Value name;
  ExtentsField offsets;
  bool has_offsets = false;
};
struct PlaceRecord {
  Value file, offset, length, transforms;
  bool is_whole = true;  // has the first three
};
struct TensorRecord {
  Value properties, chunks;
  ExtentsField size;
  bool is_whole = true;
};
struct PropertiesRecord {
  Value dtype, requires_grad;
};

/// What a harmless program makes. It stays valid as long as the bytes of the program.
struct PickleValues {
  struct Global {
    std::string name;  // "module name"
    GlobalRole role = GlobalRole::value;
    Class type = Class::other;
  };
  struct Segment {
    std::uint32_t first = 0;
    std::uint32_t count = 0;
    std::uint32_t next = Object::kNothing;
  };

  std::string_view bytes;
  std::size_t end = 0;  // of the program, behind STOP
  Value root;
  std::vector<Global> globals;
  std::vector<Object> objects;
  std::vector<Value> parts;
  std::vector<Segment> segments;
  ExtentsTable extents;
  std::vector<std::string> problems;
  std::vector<ShardRecord> shards;
  std::vector<KeyRecord> keys;
  std::vector<PlaceRecord> places;
  std::vector<TensorRecord> tensors;
  std::vector<PropertiesRecord> properties;

  /// Of a text or bytes.
  std::string_view text(const Value& value) const;
  std::span<const Value> tuple(const Value& value) const {
    return std::span(parts).subspan(value.number(), value.payload >> 32);
  }
  /// The class of an instance; Class::other of everything else.
  Class type(const Value& value) const;
  const Object* object(const Value& value, ObjectKind kind) const;

  /// "a list", as Python calls the type.
  std::string kind(const Value& value) const;
  /// For messages: the number, or why it is not one.
  std::string number(const Value& value) const;

  /// visit(const Value&) for each item of a list; of a dict for keys and values in turn.
  template <class Visit>
  void for_each(const Object& object, Visit&& visit) const {
    for (std::uint32_t at = object.first; at != Object::kNothing; at = segments[at].next) {
      for (std::uint32_t i = 0; i < segments[at].count; ++i) visit(parts[segments[at].first + i]);
    }
  }
  template <class Visit>
  void for_each_pair(const Object& dict, Visit&& visit) const {
    for (std::uint32_t at = dict.first; at != Object::kNothing; at = segments[at].next) {
      for (std::uint32_t i = 0; i < segments[at].count; i += 2) {
        visit(parts[segments[at].first + i], parts[segments[at].first + i + 1]);
      }
    }
  }
  std::size_t count(const Object& object) const;
  /// An attribute of an instance whose class has no record; nullopt where it does not have it.
  std::optional<Value> attribute(const Object& instance, std::string_view name) const;
};

/// Walks a program. Binary opcodes of protocols 2 to 5 as CPython's picklers write them, and no
/// others. Takes time and memory in proportion to the bytes.
///
/// Errc::pickle_forbidden for a name that is not among `allowed`; another pickle_* for each other
/// defect, with the offset of the opcode.
Result<PickleValues> walk_metadata_pickle(std::span<const std::byte> bytes, const Globals& allowed);

}  // namespace torch_ckpt::index
