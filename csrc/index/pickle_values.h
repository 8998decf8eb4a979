#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "index/allowed_globals.h"
#include "index/extents.h"

namespace torch_ckpt::index {

/// torch classes whose fields the walk reads.
enum class TorchClass : std::uint8_t {
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
  ValueKind kind = ValueKind::none;
  bool is_key : 1 = false;          // may be a dict key
  bool is_plain : 1 = false;        // tuple, extents: of scalars, texts and other plain tuples
  bool is_slots_state : 1 = false;  // tuple: (None, dict with attribute names as keys)
  bool names_member : 1 = false;    // tuple: (enum, text) for GlobalRole::member
  bool is_size : 1 = false;         // extents: a torch.Size, not a tuple
  bool is_negative : 1 = false;     // large_integer
  bool is_true : 1 = false;         // boolean
  std::uint8_t depth = 0;
  std::uint32_t weight = 1;
  std::uint64_t payload = 0;  // read by the functions below

  /// The value of a small_integer or integer.
  std::int64_t integer() const { return static_cast<std::int64_t>(payload); }
  /// The value of a real.
  double real() const { return std::bit_cast<double>(payload); }
  /// The offset of the opcode that pushes a text or bytes.
  std::uint64_t opcode_at() const { return payload; }
  /// The index of a tuple's first part; the id of extents; the number of a global, of the global
  /// that was called, or of an object.
  std::uint32_t number() const { return static_cast<std::uint32_t>(payload); }
  /// The number of parts of a tuple.
  std::uint32_t part_count() const { return static_cast<std::uint32_t>(payload >> 32); }

  bool is_integer() const { return kind == ValueKind::small_integer || kind == ValueKind::integer; }
  bool is_tuple() const {
    return kind == ValueKind::tuple || (kind == ValueKind::extents && !is_size);
  }
};

enum class ObjectKind : std::uint8_t { list, dict, mapping, instance };

struct Object {
  ObjectKind kind = ObjectKind::list;
  GlobalRole role = GlobalRole::value;
  bool is_memoized = false;          // in the memo
  bool is_fetched = false;           // fetched from the memo, so other values may contain it
  bool is_built = false;             // instance: its state has been set
  bool only_attribute_names = true;  // dict: all keys are valid attribute names
  bool is_dropped = false;           // dict: was the state of an instance with a record
  std::uint8_t depth = 0;
  std::uint32_t weight = 1;
  std::uint32_t type = 0;  // number of the global that created it
  // Lists and dicts: first and last segment of parts. Instances: `first` is the number of the
  // record or, if the class has no record type, the index of the state in `parts`.
  std::uint32_t first = kNothing;
  std::uint32_t last = kNothing;

  static constexpr std::uint32_t kNothing = 0xffffffff;
};

/// The values that a safe program creates. The program, to which `bytes` refers, must outlive them.
struct PickleValues {
  struct Global {
    std::string name;  // "module name"
    GlobalRole role = GlobalRole::value;
    TorchClass type = TorchClass::other;
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

  /// The contents of a value of kind `text` or `bytes`.
  std::string_view text(const Value& value) const;
  std::span<const Value> tuple(const Value& value) const {
    return std::span(parts).subspan(value.number(), value.part_count());
  }
  /// The class of an instance; TorchClass::other for other values.
  TorchClass type(const Value& value) const;
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

}  // namespace torch_ckpt::index
