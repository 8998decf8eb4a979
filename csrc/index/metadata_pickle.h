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

// The metadata of a checkpoint is a pickle, which is a program for Python's unpickler.
// Allow-listing names does not make it safe: BUILD sets attributes of any object, lengths and memo
// indices make the unpickler allocate memory, and hashing tuples that each contain the previous one
// twice takes forever. The program is therefore first walked without running it, and the index is
// built from the result of the walk. Python runs only programs that have passed, and only if
// torch's objects are needed.

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

/// Returns the role with this name, or nullopt if there is none.
std::optional<GlobalRole> role_named(std::string_view word);

/// Allow-listed globals. Keys have the form "module name", with one space.
using Globals = std::map<std::string, GlobalRole, std::less<>>;

/// Limits that are far above what real metadata needs. docs/format.md gives the reasons.
struct MetadataLimits {
  static constexpr std::size_t kDepth = 64;  // maximum nesting depth of values
  static constexpr std::size_t kStack = std::size_t{1} << 20;
  static constexpr std::size_t kNameBytes = format::PickleReader::kNameBytes;
  // The weight of a value is 1, plus 1 per 64 bytes of text or bytes, plus the weights of its
  // parts; a shared part counts each time. The cost of hashing, printing or copying a value is
  // proportional to its weight.
  static constexpr std::uint32_t kKeyWeight = 2048;
  static constexpr std::uint32_t kArgumentsWeight = 4096;
  static constexpr std::uint32_t kWeight = 0xfffffffe;
  static constexpr std::uint32_t weight_of_text(std::size_t bytes) {
    return static_cast<std::uint32_t>(1 + bytes / 64);
  }
  /// Maximum weight of a value in a pickle of `bytes` bytes. A value without shared parts weighs
  /// less than 1 per byte of pickle; torch's metadata weighs about 1/3 per byte.
  static constexpr std::uint32_t max_weight(std::size_t bytes) {
    return static_cast<std::uint32_t>(std::min<std::size_t>(kWeight, 65536 + 4 * bytes));
  }
  /// Maximum number of lists, dicts and instances in a pickle of `bytes` bytes. torch's metadata
  /// has one per 26 bytes.
  static constexpr std::size_t max_objects(std::size_t bytes) {
    return std::min<std::size_t>(kWeight, 4096 + bytes / 6);
  }
};

/// torch classes whose fields the walk reads.
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
  small_integer,  // fits in 32 bits; hashes to itself, so dicts with such keys stay fast
  integer,        // fits in 64 bits
  large_integer,  // needs more than 64 bits
  real,
  text,
  bytes,
  tuple,
  extents,  // a tuple of integers, or a torch.Size of them
  called,   // the result of a call
  global,
  object,
};

/// A value on the walk's stack.
struct Value {
  static constexpr std::uint8_t kPlain = 1;  // a tuple of scalars, texts and other plain tuples
  static constexpr std::uint8_t kKey = 2;    // may be a dict key
  static constexpr std::uint8_t kSlots = 4;  // a tuple (None, dict with attribute names as keys)
  static constexpr std::uint8_t kNamesMember = 8;  // a tuple (enum, text) for GlobalRole::member
  static constexpr std::uint8_t kTuple = 16;       // extents: a tuple, not a torch.Size
  static constexpr std::uint8_t kNegative = 32;    // large_integer: it is negative
  static constexpr std::uint8_t kTrue = 64;        // boolean: it is true

  ValueKind kind = ValueKind::none;
  std::uint8_t flags = 0;
  std::uint8_t depth = 0;
  std::uint32_t weight = 1;
  // The meaning depends on the kind:
  //   integer         the value
  //   real            the bits of the double
  //   text, bytes     offset of the opcode
  //   tuple           index of the first part in the lower 32 bits, number of parts in the upper 32
  //   extents         id in PickleValues::extents
  //   called          number of the global that was called
  //   global, object  number of the global or object
  std::uint64_t payload = 0;

  bool is(std::uint8_t flag) const { return (flags & flag) != 0; }
  std::int64_t integer() const { return static_cast<std::int64_t>(payload); }
  std::uint32_t number() const { return static_cast<std::uint32_t>(payload); }
};

enum class ObjectKind : std::uint8_t { list, dict, mapping, instance };

struct Object {
  ObjectKind kind = ObjectKind::list;
  GlobalRole role = GlobalRole::value;
  bool fetched = false;              // fetched from the memo, so other values may contain it
  bool built = false;                // its state has been set
  bool only_attribute_names = true;  // dict: all keys are valid attribute names
  bool dropped = false;              // dict: was an instance's state, stored as a record instead
  std::uint8_t depth = 0;
  std::uint32_t weight = 1;
  std::uint32_t type = 0;  // number of the global that created it
  // Lists and dicts: first and last segment of parts. Instances: `first` is the number of the
  // record or, if the class has no record type, the index of the state in `parts`.
  std::uint32_t first = kNothing;
  std::uint32_t last = kNothing;

  static constexpr std::uint32_t kNothing = 0xffffffff;
};

/// A field that should hold extents. If it does not, `problem` is the index of a message, in which
/// '%' stands for the name of the field.
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

/// The values that a safe program creates. The program, to which `bytes` refers, must outlive them.
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

  /// The contents of a value of kind `text` or `bytes`.
  std::string_view text(const Value& value) const;
  std::span<const Value> tuple(const Value& value) const {
    return std::span(parts).subspan(value.number(), value.payload >> 32);
  }
  /// The class of an instance; Class::other for other values.
  Class type(const Value& value) const;
  const Object* object(const Value& value, ObjectKind kind) const;

  /// Formats the value's Python type for a message: "a list".
  std::string kind(const Value& value) const;
  /// Formats an integer for a message: "7", "2**63 or more". Formats the type of other values.
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
  /// Returns an attribute of an instance whose class has no record type, or nullopt if the instance
  /// lacks it.
  std::optional<Value> attribute(const Object& instance, std::string_view name) const;
};

/// Walks a program without running it. Accepts only binary opcodes of protocols 2 to 5, in the form
/// that CPython's picklers write. Time and memory are proportional to the program's size.
///
/// Fails with Errc::pickle_forbidden for a name that is not in `allowed`. For any other defect,
/// fails with another pickle_* code and the offset of the opcode.
Result<PickleValues> walk_metadata_pickle(std::span<const std::byte> bytes, const Globals& allowed);

}  // namespace torch_ckpt::index
