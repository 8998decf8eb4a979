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
// permitted names does not make it safe: BUILD sets attributes of any object, lengths and memo
// indices make the unpickler allocate memory, and tuples that each contain the previous one twice
// take forever to hash. The program is therefore first walked without running it. The index is
// built from the walk's result. Python runs only programs that have passed, and only if torch's
// objects are needed.

/// The permitted use of a global. Classes and functions may only be called and are never parts of
/// other values, so no state can be set on a class, a function or a member of an enum.
enum class GlobalRole : std::uint8_t {
  value,        // a part of other values; dtypes
  function,     // called with one tuple of scalars and tuples; torch.Size, paths
  enumeration,  // like function, or an argument of `member`; enums
  member,       // called with an enum and a member's name; getattr, with which Python 3.11.0 to
                // 3.11.3 pickle a member
  mapping,      // called without arguments; the result gets items; OrderedDict
  dict_class,   // created without arguments; the instance gets a dict as state, once
  key_class,    // like dict_class; instances may be keys of dicts; MetadataIndex
  tuple_class,  // created without arguments; the instance gets a tuple as state; TensorProperties
  slots_class,  // created without arguments; the instance gets (None, dict); ShardMetadata
};

/// Returns the role with this name; nullopt if there is none.
std::optional<GlobalRole> role_named(std::string_view word);

/// Permitted globals. The keys are "module name", with one space.
using Globals = std::map<std::string, GlobalRole, std::less<>>;

/// Limits that metadata stays far below. docs/format.md has the reasons.
struct MetadataLimits {
  static constexpr std::size_t kDepth = 64;  // of nested values
  static constexpr std::size_t kStack = std::size_t{1} << 20;
  static constexpr std::size_t kNameBytes = format::PickleReader::kNameBytes;
  // The weight of a value is 1, plus 1 for each 64 bytes of text or bytes, plus the weights of its
  // parts; shared parts count each time. The costs of hashing, printing and copying a value are in
  // proportion to its weight.
  static constexpr std::uint32_t kKeyWeight = 2048;
  static constexpr std::uint32_t kArgumentsWeight = 4096;
  static constexpr std::uint32_t kWeight = 0xfffffffe;
  static constexpr std::uint32_t weight_of_text(std::size_t bytes) {
    return static_cast<std::uint32_t>(1 + bytes / 64);
  }
  /// Largest weight of a value in a pickle of `bytes` bytes. A value without shared parts weighs
  /// less than 1 for each byte, torch's metadata about a third.
  static constexpr std::uint32_t max_weight(std::size_t bytes) {
    return static_cast<std::uint32_t>(std::min<std::size_t>(kWeight, 65536 + 4 * bytes));
  }
  /// Most lists, dicts and instances in a pickle of `bytes` bytes. torch's metadata has one for
  /// each 26 bytes.
  static constexpr std::size_t max_objects(std::size_t bytes) {
    return std::min<std::size_t>(kWeight, 4096 + bytes / 6);
  }
};

/// The classes of torch whose fields the walk reads.
enum class Class : std::uint8_t {
  other,
  metadata,
  tensor,        // TensorStorageMetadata
  object,        // BytesStorageMetadata
  shard,         // ChunkStorageMetadata
  properties,    // TensorProperties
  key,           // MetadataIndex
  storage_info,  // _StorageInfo
  storage_meta,
  size,   // torch.Size
  dtype,  // torch.float32 and the like
};

enum class ValueKind : std::uint8_t {
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
  called,   // the result of a function
  global,
  object,
};

/// A value on the walk's stack.
struct Value {
  static constexpr std::uint8_t kPlain = 1;        // a tuple of scalars, texts and such tuples
  static constexpr std::uint8_t kKey = 2;          // may be a key of a dict
  static constexpr std::uint8_t kSlots = 4;        // a tuple (None, dict of attribute names)
  static constexpr std::uint8_t kNamesMember = 8;  // a tuple (enum, text) for GlobalRole::member
  static constexpr std::uint8_t kTuple = 16;       // extents: a tuple, not a torch.Size
  static constexpr std::uint8_t kNegative = 32;    // large_integer
  static constexpr std::uint8_t kTrue = 64;        // boolean

  ValueKind kind = ValueKind::none;
  std::uint8_t flags = 0;
  std::uint8_t depth = 0;
  std::uint32_t weight = 1;
  // Its meaning depends on the kind:
  //   integer        its value
  //   real           its bits
  //   text, bytes    offset of the opcode
  //   tuple          index of the first part in the lower 32 bits, number of parts in the upper
  //   extents        id in PickleValues::extents
  //   called         number of the global that was called
  //   global, object its number
  std::uint64_t payload = 0;

  bool is(std::uint8_t flag) const { return (flags & flag) != 0; }
  std::int64_t integer() const { return static_cast<std::int64_t>(payload); }
  std::uint32_t number() const { return static_cast<std::uint32_t>(payload); }
};

enum class ObjectKind : std::uint8_t { list, dict, mapping, instance };

struct Object {
  ObjectKind kind = ObjectKind::list;
  GlobalRole role = GlobalRole::value;
  bool fetched = false;              // was fetched from the memo, so other values may contain it
  bool built = false;                // has its state
  bool only_attribute_names = true;  // dict: all keys are names that a state may have
  bool dropped = false;              // dict: was the state of an instance and has been dropped
  std::uint8_t depth = 0;
  std::uint32_t weight = 1;
  std::uint32_t type = 0;  // number of the global
  // Lists and dicts: first and last segment of parts. Instances: `first` is the number of the
  // record, or the index of the part that is the state.
  std::uint32_t first = kNothing;
  std::uint32_t last = kNothing;

  static constexpr std::uint32_t kNothing = 0xffffffff;
};

/// Extents, or the index of a message about a value that is not extents. In the message, '%' stands
/// for the name of the field.
struct ExtentsField {
  std::uint32_t id = 0;
  std::uint32_t problem = Object::kNothing;
};

struct ShardRecord {
  ExtentsField offsets, sizes;
  bool is_complete = true;  // has both fields
};
struct KeyRecord {
  Value name;
  ExtentsField offsets;
  bool has_offsets = false;
};
struct StorageInfoRecord {
  Value file, offset, length, transforms;
  bool is_complete = true;  // has file, offset and length
};
struct TensorRecord {
  Value properties, chunks;
  ExtentsField size;
  bool is_complete = true;
};
struct PropertiesRecord {
  Value dtype, requires_grad;
};

/// The values that a safe program creates. `bytes` refers to the program, which outlives them.
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
  std::size_t end = 0;  // offset after STOP
  Value root;
  std::vector<Global> globals;
  std::vector<Object> objects;
  std::vector<Value> parts;
  std::vector<Segment> segments;
  ExtentsTable extents;
  std::vector<std::string> problems;
  std::vector<ShardRecord> shards;
  std::vector<KeyRecord> keys;
  std::vector<StorageInfoRecord> storage_infos;
  std::vector<TensorRecord> tensors;
  std::vector<PropertiesRecord> properties;

  /// The contents of a text or bytes.
  std::string_view text(const Value& value) const;
  std::span<const Value> tuple(const Value& value) const {
    return std::span(parts).subspan(value.number(), value.payload >> 32);
  }
  /// The class of an instance; Class::other for other values.
  Class type(const Value& value) const;
  const Object* object(const Value& value, ObjectKind kind) const;

  /// Python's name of the type, for messages: "a list".
  std::string kind(const Value& value) const;
  /// For messages: the number, or why it is not a count.
  std::string number(const Value& value) const;

  /// Calls visit(const Value&) for each item of a list, or for each key and value of a dict.
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
  /// An attribute of an instance whose class has no record type; nullopt if it does not exist.
  std::optional<Value> attribute(const Object& instance, std::string_view name) const;
};

/// Walks a program without running it. Accepts only binary opcodes of protocols 2 to 5 as CPython's
/// picklers write them. Needs time and memory in proportion to the size.
///
/// Fails with Errc::pickle_forbidden for a name that is not in `allowed`, and with another pickle_*
/// code and the offset of the opcode for any other defect.
Result<PickleValues> walk_metadata_pickle(std::span<const std::byte> bytes, const Globals& allowed);

}  // namespace torch_ckpt::index
