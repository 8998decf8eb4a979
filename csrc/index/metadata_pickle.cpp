// The machine, as far as the checks need it:
//
//   stack     values, and marks
//   memo      what has been memoized; indices count up, as every pickler of CPython writes them
//   objects   what can still change after it was pushed: lists, dicts, instances
//   parts     what tuples, lists and dicts hold
//
// Most of a checkpoint's metadata is instances of a few classes. What these hold goes into a record
// of its class when the instance gets its state, and the dict that was the state is let go of: with
// it most of what the program makes. So it cannot be the state of another instance, too.
//
// An object changes only until it is fetched from the memo for the first time. CPython's picklers
// write nothing else unless a value holds itself, which metadata never does. With that rule no
// value can become part of itself, and what a value weighs is known when it becomes part of
// another.

#include "index/metadata_pickle.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "checked_math.h"

namespace torch_ckpt::index {
namespace {

namespace op = format::op;

using format::PickleReader;
using format::PickleToken;
using Limits = MetadataLimits;

constexpr std::uint64_t kOldestProtocol = 2;
constexpr std::uint64_t kNewestProtocol = 5;

constexpr std::size_t kUsualMostMemo = std::size_t{1} << 20;

std::string printable(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c < ' ' || c > '~') c = '?';
  }
  return out;
}

Class class_named(std::string_view name, GlobalRole role) {
  struct Known {
    std::string_view name;
    Class type;
  };
  static constexpr std::array<Known, 11> kKnown = {{
      {"torch.distributed.checkpoint.metadata Metadata", Class::metadata},
      {"torch.distributed.checkpoint.metadata TensorStorageMetadata", Class::tensor},
      {"torch.distributed.checkpoint.metadata BytesStorageMetadata", Class::object},
      {"torch.distributed.checkpoint.metadata ChunkStorageMetadata", Class::shard},
      {"torch.distributed.checkpoint.metadata TensorProperties", Class::properties},
      {"torch.distributed.checkpoint.metadata MetadataIndex", Class::key},
      {"torch.distributed.checkpoint.metadata StorageMeta", Class::storage_meta},
      {"torch.distributed.checkpoint.filesystem _StorageInfo", Class::place},
      {"torch.distributed._shard.sharded_tensor.metadata TensorProperties", Class::properties},
      {"torch Size", Class::size},
  }};
  for (const Known& known : kKnown) {
    if (known.name == name) return known.type;
  }
  return role == GlobalRole::value && name.starts_with("torch ") ? Class::dtype : Class::other;
}

class Walk {
 public:
  Walk(std::span<const std::byte> bytes, const Globals& allowed)
      : allowed_(allowed), reader_(bytes) {
    found_.bytes = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  Result<PickleValues> run() {
    // About what metadata has; memory that is not used stays untouched.
    memo_.reserve(std::min(found_.bytes.size() / 12, kUsualMostMemo));
    found_.objects.reserve(std::min(found_.bytes.size() / 24, kUsualMostMemo));
    most_weight_ = Limits::most_weight(found_.bytes.size());
    most_objects_ = Limits::most_objects(found_.bytes.size());
    while (!error_ && !stopped_) {
      if (!reader_.next(token_)) return *reader_.error();
      step();
      if (stack_.size() > Limits::kStack) too_large("holds more values than metadata ever does");
    }
    if (error_) return std::move(*error_);
    found_.end = reader_.position();
    found_.root = stack_.back();
    return std::move(found_);
  }

 private:
  // --- errors: the first one ends the walk ---

  void fail(Errc code, std::string detail) {
    if (error_) return;
    error_ = Error{code, 0, "pickle", {}, token_.at, std::move(detail)};
  }
  void bad_stack(std::string detail) { fail(Errc::pickle_stack, std::move(detail)); }
  void too_large(std::string detail) { fail(Errc::pickle_too_large, std::move(detail)); }

  // --- values ---

  Object& object(const Value& value) { return found_.objects[value.number()]; }
  const Object& object(const Value& value) const { return found_.objects[value.number()]; }
  std::uint32_t weight(const Value& value) const {
    return value.kind == Kind::object ? object(value).weight : value.weight;
  }
  std::uint8_t depth(const Value& value) const {
    return value.kind == Kind::object ? object(value).depth : value.depth;
  }
  const PickleValues::Global& global(const Value& value) const {
    return found_.globals[value.number()];
  }
  /// Of a value that is not a global, none.
  GlobalRole role(const Value& value) const {
    return value.kind == Kind::global ? global(value).role : GlobalRole::value;
  }
  static bool is_tuple(const Value& value) {
    return value.kind == Kind::tuple || (value.kind == Kind::extents && value.is(Value::kIs));
  }
  static bool is_integer(const Value& value) {
    return value.kind == Kind::small_integer || value.kind == Kind::integer;
  }
  static bool is_plain(const Value& value) {
    switch (value.kind) {
      case Kind::none:
      case Kind::boolean:
      case Kind::small_integer:
      case Kind::integer:
      case Kind::large_integer:
      case Kind::real:
      case Kind::text:
        return true;
      case Kind::tuple:
      case Kind::extents:
        return value.is(Value::kPlain);
      default:
        return false;
    }
  }

  /// Counts `part` in; false where the whole is more than metadata can be.
  bool count_in(const Value& part, std::uint8_t& whole_depth, std::uint32_t& whole_weight) {
    const unsigned deep = depth(part) + 1u;
    if (deep > Limits::kDepth) {
      fail(Errc::pickle_too_deep, "values lie deeper within each other than metadata's do");
      return false;
    }
    whole_depth = std::max(whole_depth, static_cast<std::uint8_t>(deep));
    if (weight(part) > most_weight_ - whole_weight) {
      too_large("a value is reached more often than metadata's are");
      return false;
    }
    whole_weight += weight(part);
    return true;
  }

  /// Classes and functions are called and nothing else; nor does a tuple with one go elsewhere.
  bool can_be_part(const Value& value) {
    const bool is_called = role(value) != GlobalRole::value;
    if (!is_called && !(value.kind == Kind::tuple && value.is(Value::kNamesMember))) return true;
    fail(Errc::pickle_stack, "a class or function lies where a value belongs");
    return false;
  }

  void push(Kind kind, std::uint64_t payload = 0, std::uint8_t flags = 0) {
    stack_.push_back({kind, flags, 0, 1, payload});
  }
  void push_text(Kind kind, std::uint8_t flags) {
    stack_.push_back({kind, flags, 0, Limits::weight_of_text(token_.bytes.size()), token_.at});
  }
  void push_object(ObjectKind kind, const Value* type = nullptr) {
    push(Kind::object, found_.objects.size());
    Object object;
    object.kind = kind;
    if (type != nullptr) {
      object.role = role(*type);
      object.type = type->number();
    }
    found_.objects.push_back(object);
    if (found_.objects.size() > most_objects_) {
      too_large("has more objects than metadata of its size ever does");
    }
  }
  void push_integer(std::int64_t value) {
    push(Kind::small_integer, static_cast<std::uint64_t>(value), Value::kKey);
  }
  void push_long() {
    // Two's complement, little-endian; its sign is the last byte's.
    const std::string_view bytes = token_.bytes;
    const bool is_negative = !bytes.empty() && (bytes.back() & 0x80) != 0;
    const char fill = is_negative ? '\xff' : '\0';
    std::array<char, 8> low;
    low.fill(fill);
    std::copy_n(bytes.begin(), std::min<std::size_t>(bytes.size(), 8), low.begin());
    std::int64_t value = 0;
    for (std::size_t i = 8; i-- > 0;) {
      value = static_cast<std::int64_t>((static_cast<std::uint64_t>(value) << 8) |
                                        static_cast<unsigned char>(low[i]));
    }
    const bool fits = (value < 0) == is_negative &&
                      (bytes.size() <= 8 || std::all_of(bytes.begin() + 8, bytes.end(),
                                                        [&](char c) { return c == fill; }));
    if (fits) return push(Kind::integer, static_cast<std::uint64_t>(value));
    push(Kind::large_integer, 0, is_negative ? Value::kIs : 0);
  }

  /// Puts parts behind each other, and gives the number of the first.
  std::uint32_t add_parts(std::size_t first_on_stack) {
    const std::size_t first = found_.parts.size();
    found_.parts.insert(found_.parts.end(),
                        stack_.begin() + static_cast<std::ptrdiff_t>(first_on_stack), stack_.end());
    // Numbers have 32 bits.
    if (found_.parts.size() >= Limits::kWeight) {
      too_large("has more values than metadata ever does");
    }
    return static_cast<std::uint32_t>(first);
  }
  void add_segment(Object& object, std::size_t first_on_stack) {
    const auto count = static_cast<std::uint32_t>(stack_.size() - first_on_stack);
    if (count == 0) return;
    const std::uint32_t first = add_parts(first_on_stack);
    std::vector<PickleValues::Segment>& segments = found_.segments;
    if (object.last != Object::kNothing &&
        segments[object.last].first + segments[object.last].count == first) {
      segments[object.last].count += count;
      return;
    }
    const auto number = static_cast<std::uint32_t>(segments.size());
    segments.push_back({first, count, Object::kNothing});
    (object.last == Object::kNothing ? object.first : segments[object.last].next) = number;
    object.last = number;
  }

  /// How many values lie above the last mark.
  std::size_t height() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back() + 1); }
  bool needs(std::size_t count) {
    if (height() >= count) return true;
    bad_stack("too few values on the stack");
    return false;
  }
  Value pop() {
    const Value value = stack_.back();
    stack_.pop_back();
    return value;
  }
  /// The values above the last mark, which is gone afterwards; they are to be dropped by the
  /// caller.
  std::optional<std::size_t> values_since_mark() {
    if (marks_.empty()) {
      bad_stack("no mark on the stack");
      return std::nullopt;
    }
    const std::size_t count = height();
    marks_.pop_back();
    return count;
  }

  // --- opcodes ---

  void step() {
    switch (token_.code) {
      case op::kProto:
        return protocol(token_.number);
      case op::kFrame:
        return frame(token_.number);
      case op::kStop:
        return stop();
      case op::kMark:
        marks_.push_back(stack_.size());
        return push(Kind::mark);
      case op::kNone:
        return push(Kind::none, 0, Value::kKey);
      case op::kNewtrue:
        return push(Kind::boolean, 0, Value::kKey | Value::kIs);
      case op::kNewfalse:
        return push(Kind::boolean, 0, Value::kKey);
      case op::kBinint:
        return push_integer(static_cast<std::int32_t>(token_.number));
      case op::kBinint1:
      case op::kBinint2:
        return push_integer(static_cast<std::int64_t>(token_.number));
      case op::kLong1:
        return push_long();
      case op::kBinfloat:
        return push(Kind::real, __builtin_bswap64(token_.number));
      case op::kShortBinunicode:
      case op::kBinunicode:
      case op::kBinunicode8:
        return push_text(Kind::text, Value::kKey);
      case op::kShortBinbytes:
      case op::kBinbytes:
      case op::kBinbytes8:
        return push_text(Kind::bytes, 0);
      case op::kEmptyTuple:
        return tuple(0);
      case op::kTuple1:
        return tuple(1);
      case op::kTuple2:
        return tuple(2);
      case op::kTuple3:
        return tuple(3);
      case op::kTuple:
        return marked_tuple();
      case op::kEmptyList:
        return push_object(ObjectKind::list);
      case op::kEmptyDict:
        return push_object(ObjectKind::dict);
      case op::kAppend:
        return append(1);
      case op::kAppends:
        return appends();
      case op::kSetitem:
        return set_items(2);
      case op::kSetitems:
        return marked_set_items();
      case op::kGlobal:
        return push_global(token_.bytes, token_.name);
      case op::kStackGlobal:
        return stack_global();
      case op::kReduce:
        return reduce();
      case op::kNewobj:
        return new_object();
      case op::kBuild:
        return build();
      case op::kMemoize:
        return memoize(memo_.size());
      case op::kBinput:
      case op::kLongBinput:
        return memoize(token_.number);
      case op::kBinget:
      case op::kLongBinget:
        return fetch(token_.number);
      default:
        return fail(Errc::pickle_opcode,
                    "opcode " + std::to_string(token_.code) + " is none that metadata needs");
    }
  }

  void protocol(std::uint64_t version) {
    if (token_.at != 0) return fail(Errc::pickle_opcode, "the protocol is named in the middle");
    if (version >= kOldestProtocol && version <= kNewestProtocol) return;
    fail(Errc::pickle_opcode, "protocol " + std::to_string(version) + " is not known");
  }

  // The unpickler may read a frame's bytes at once, whatever the opcodes in it say.
  void frame(std::uint64_t count) {
    if (!inside(reader_.position(), count, found_.bytes.size())) {
      return fail(Errc::pickle_truncated, "a frame ends outside");
    }
    frames_end_ = std::max(frames_end_, reader_.position() + static_cast<std::size_t>(count));
  }

  void stop() {
    // Last, so that a program of protocol 0 that runs code is refused for the name.
    if (static_cast<unsigned char>(found_.bytes.front()) != op::kProto) {
      return fail(Errc::pickle_opcode, "the first opcode is not PROTO");
    }
    if (!marks_.empty() || stack_.size() != 1) {
      return bad_stack("it ends with more or fewer than one value");
    }
    if (frames_end_ > reader_.position())
      return fail(Errc::pickle_truncated, "a frame ends behind STOP");
    if (can_be_part(stack_.back())) stopped_ = true;
  }

  void marked_tuple() {
    const auto count = values_since_mark();
    if (!count) return;
    make_tuple(*count);
    if (error_) return;
    const Value made = pop();
    stack_.back() = made;  // in the mark's place
  }
  void tuple(std::size_t count) {
    if (needs(count)) make_tuple(count);
  }
  void make_tuple(std::size_t count) {
    Value made;
    made.kind = Kind::tuple;
    made.flags = Value::kPlain | Value::kKey;
    const std::size_t first = stack_.size() - count;
    if (count == 2 && role(stack_[first]) == GlobalRole::enumeration &&
        stack_[first + 1].kind == Kind::text) {
      made.flags |= Value::kNamesMember;
    }
    bool is_extents = true;
    for (std::size_t i = first; i < stack_.size(); ++i) {
      const Value& part = stack_[i];
      if (!made.is(Value::kNamesMember) && !can_be_part(part)) return;
      if (!count_in(part, made.depth, made.weight)) return;
      if (!is_plain(part)) made.flags &= ~(Value::kPlain | Value::kKey);
      if (!part.is(Value::kKey)) made.flags &= ~Value::kKey;
      is_extents = is_extents && is_integer(part);
    }
    if (is_extents) {
      made.kind = Kind::extents;
      made.flags |= Value::kIs;
      numbers_.clear();
      for (std::size_t i = first; i < stack_.size(); ++i) numbers_.push_back(stack_[i].integer());
      made.payload = found_.extents.intern(numbers_);
    } else {
      if (count == 2 && stack_[first].kind == Kind::none && is_state_dict(stack_[first + 1])) {
        made.flags |= Value::kSlots;
      }
      made.payload = add_parts(first) | (std::uint64_t{count} << 32);
    }
    stack_.resize(first);
    stack_.push_back(made);
  }

  /// The object at the place, where it is of one of the kinds and may still change.
  Object* changeable(std::size_t place, ObjectKind kind, ObjectKind or_kind) {
    const Value& target = stack_[place];
    if (target.kind != Kind::object ||
        (object(target).kind != kind && object(target).kind != or_kind)) {
      bad_stack("items are put into something that cannot hold them");
      return nullptr;
    }
    if (object(target).fetched) {
      fail(Errc::pickle_shared, "a value changes after others may hold it");
      return nullptr;
    }
    return &object(target);
  }

  void appends() {
    const auto count = values_since_mark();
    if (!count) return;
    append_above(*count, 1);
  }
  void append(std::size_t count) {
    if (needs(count + 1)) append_above(count, 0);
  }
  /// The list lies below the values and, with one, the mark.
  void append_above(std::size_t count, std::size_t marks) {
    if (!needs(count + marks + 1)) return;
    const std::size_t first = stack_.size() - count;
    Object* list = changeable(first - marks - 1, ObjectKind::list, ObjectKind::list);
    if (list == nullptr) return;
    for (std::size_t i = first; i < stack_.size(); ++i) {
      if (!can_be_part(stack_[i]) || !count_in(stack_[i], list->depth, list->weight)) return;
    }
    add_segment(*list, first);
    stack_.resize(first - marks);
  }

  void marked_set_items() {
    const auto count = values_since_mark();
    if (!count) return;
    if (*count % 2 != 0) return bad_stack("a key has no value");
    set_items_above(*count, 1);
  }
  void set_items(std::size_t count) {
    if (needs(count + 1)) set_items_above(count, 0);
  }
  void set_items_above(std::size_t count, std::size_t marks) {
    if (!needs(count + marks + 1)) return;
    const std::size_t first = stack_.size() - count;
    Object* dict = changeable(first - marks - 1, ObjectKind::dict, ObjectKind::mapping);
    if (dict == nullptr) return;
    for (std::size_t i = first; i < stack_.size(); i += 2) {
      if (!is_key(stack_[i])) return;
      dict->attribute_names = dict->attribute_names && is_attribute_name(stack_[i]);
      for (std::size_t part = i; part < i + 2; ++part) {
        if (!can_be_part(stack_[part])) return;
        if (!count_in(stack_[part], dict->depth, dict->weight)) return;
      }
    }
    add_segment(*dict, first);
    stack_.resize(first - marks);
  }

  bool is_key(const Value& value) {
    const bool instance = value.kind == Kind::object &&
                          object(value).kind == ObjectKind::instance &&
                          object(value).role == GlobalRole::key_class;
    if (!instance && !value.is(Value::kKey)) {
      fail(Errc::pickle_key, "a dict's key is none of those that metadata has");
      return false;
    }
    if (weight(value) > Limits::kKeyWeight) {
      fail(Errc::pickle_key, "a dict's key holds more values than metadata's do");
      return false;
    }
    return true;
  }

  // Names with two underscores are Python's own; an instance's could stand in the way of its
  // class's.
  bool is_attribute_name(const Value& value) const {
    if (value.kind != Kind::text) return false;
    const std::string_view name = found_.text(value);
    return name.size() <= Limits::kNameBytes && !name.starts_with("__");
  }
  bool is_state_dict(const Value& value) const {
    return value.kind == Kind::object && object(value).kind == ObjectKind::dict &&
           object(value).attribute_names;
  }

  void stack_global() {
    if (!needs(2)) return;
    const Value name = pop();
    const Value module = pop();
    if (name.kind != Kind::text || module.kind != Kind::text) {
      return bad_stack("a name is not a string");
    }
    if (std::max(found_.text(name).size(), found_.text(module).size()) > Limits::kNameBytes) {
      return too_large("a name is longer than any of metadata's");
    }
    push_global(found_.text(module), found_.text(name));
  }
  void push_global(std::string_view module, std::string_view name) {
    // No name of the table has a second space, so that one way alone leads to each.
    full_name_.assign(module).append(" ").append(name);
    const auto allowed = allowed_.find(full_name_);
    if (allowed == allowed_.end()) {
      error_ = format_error(Errc::pickle_forbidden,
                            "the metadata names " + printable(module) + "." + printable(name) +
                                ", which is not on the list of what a checkpoint may contain");
      return;
    }
    const auto [known, is_new] = global_numbers_.try_emplace(&*allowed, found_.globals.size());
    if (is_new) {
      found_.globals.push_back(
          {full_name_, allowed->second, class_named(full_name_, allowed->second)});
    }
    push(Kind::global, known->second);
  }

  void reduce() {
    if (!needs(2)) return;
    const Value arguments = pop();
    const Value callee = pop();
    if (callee.kind != Kind::global || !is_tuple(arguments)) {
      return fail(Errc::pickle_call,
                  "something is called that is not a function, or its arguments are not a tuple");
    }
    if (role(callee) == GlobalRole::mapping && arguments.weight == 1) {
      return push_object(ObjectKind::mapping, &callee);
    }
    const bool is_function =
        role(callee) == GlobalRole::function || role(callee) == GlobalRole::enumeration;
    const bool is_lookup = role(callee) == GlobalRole::member;
    if (is_lookup && !arguments.is(Value::kNamesMember)) {
      error_ =
          format_error(Errc::pickle_forbidden,
                       "the metadata calls getattr for something that is not a member of an enum, "
                       "which is not on the list of what a checkpoint may contain");
      return;
    }
    if (!is_lookup && (!is_function || !arguments.is(Value::kPlain))) {
      return fail(Errc::pickle_call, "a call that metadata never makes");
    }
    if (arguments.weight > Limits::kArgumentsWeight) {
      return too_large("a function gets more arguments than metadata has for one");
    }
    Value result;
    result.kind = Kind::called;
    result.payload = callee.payload;
    if (!count_in(arguments, result.depth, result.weight)) return;
    if (global(callee).type == Class::size && arguments.kind == Kind::tuple) {
      const std::span<const Value> given = found_.tuple(arguments);
      if (given.size() == 1 && given[0].kind == Kind::extents) {
        result.kind = Kind::extents;
        result.payload = given[0].payload;
      }
    }
    stack_.push_back(result);
  }

  void new_object() {
    if (!needs(2)) return;
    const Value arguments = pop();
    const Value callee = pop();
    const GlobalRole made = role(callee);
    const bool is_class = made == GlobalRole::dict_class || made == GlobalRole::key_class ||
                          made == GlobalRole::tuple_class || made == GlobalRole::slots_class;
    if (!is_class || !is_tuple(arguments) || arguments.weight != 1) {
      return fail(Errc::pickle_call, "an object is made as metadata's never are");
    }
    push_object(ObjectKind::instance, &callee);
  }

  void build() {
    if (!needs(2)) return;
    const Value state = pop();
    const Value& target = stack_.back();
    if (target.kind != Kind::object || object(target).kind != ObjectKind::instance) {
      return fail(Errc::pickle_state,
                  "a state is given to something that is not an instance of a class");
    }
    Object& instance = object(target);
    if (instance.fetched) {
      return fail(Errc::pickle_shared, "a value changes after others may hold it");
    }
    if (instance.built) return fail(Errc::pickle_state, "an object gets a second state");
    if (!is_state(state, instance.role)) {
      return fail(Errc::pickle_state, "a state is not of its class's form");
    }
    if (!count_in(state, instance.depth, instance.weight)) return;
    instance.built = true;
    keep_state(instance, state);
  }
  bool is_state(const Value& state, GlobalRole role) const {
    if (state.kind == Kind::tuple && state.is(Value::kNamesMember)) return false;
    if (role == GlobalRole::tuple_class) return is_tuple(state);
    if (role == GlobalRole::slots_class) {
      return state.kind == Kind::tuple && state.is(Value::kSlots);
    }
    return is_state_dict(state);
  }

  // --- records ---

  void keep_state(Object& instance, const Value& state) {
    const bool is_dict = state.kind == Kind::object;
    switch (found_.globals[instance.type].type) {
      case Class::shard:
        if (is_dict) return keep(instance, state, found_.shards, shard_of(object(state)));
        break;
      case Class::key:
        if (is_dict) return keep(instance, state, found_.keys, key_of(object(state)));
        break;
      case Class::place:
        if (is_dict) return keep(instance, state, found_.places, place_of(object(state)));
        break;
      case Class::tensor:
        if (is_dict) return keep(instance, state, found_.tensors, tensor_of(object(state)));
        break;
      case Class::properties:
        if (!is_dict) {
          instance.first = static_cast<std::uint32_t>(found_.properties.size());
          found_.properties.push_back(properties_of(state));
          return;
        }
        break;
      default:
        break;
    }
    instance.first = static_cast<std::uint32_t>(found_.parts.size());
    found_.parts.push_back(state);
  }

  template <class Record>
  void keep(Object& instance, const Value& state, std::vector<Record>& records, Record record) {
    instance.first = static_cast<std::uint32_t>(records.size());
    records.push_back(std::move(record));
    Object& dict = object(state);
    if (dict.fetched || dict.first == Object::kNothing || dict.first != dict.last) return;
    const PickleValues::Segment& segment = found_.segments[dict.first];
    if (dict.first + 1 != found_.segments.size() ||
        segment.first + segment.count != found_.parts.size()) {
      return;
    }
    found_.parts.resize(segment.first);
    found_.segments.pop_back();
    dict.first = dict.last = Object::kNothing;
    dict.taken = true;
  }

  ShardRecord shard_of(const Object& dict) {
    ShardRecord record;
    int has = 0;
    found_.for_each_pair(dict, [&](const Value& key, const Value& value) {
      const std::string_view name = found_.text(key);
      if (name == "offsets") {
        record.offsets = extents_of(value);
        has |= 1;
      } else if (name == "sizes") {
        record.sizes = extents_of(value);
        has |= 2;
      }
    });
    record.is_whole = has == 3;
    return record;
  }

  KeyRecord key_of(const Object& dict) {
    KeyRecord record;
    found_.for_each_pair(dict, [&](const Value& key, const Value& value) {
      const std::string_view name = found_.text(key);
      if (name == "fqn") record.name = value;
      if (name == "offset" && value.kind != Kind::none) {
        record.offsets = extents_of(value);
        record.has_offsets = true;
      }
    });
    return record;
  }

  PlaceRecord place_of(const Object& dict) {
    PlaceRecord record;
    int has = 0;
    found_.for_each_pair(dict, [&](const Value& key, const Value& value) {
      const std::string_view name = found_.text(key);
      if (name == "relative_path") {
        record.file = value;
        has |= 1;
      } else if (name == "offset") {
        record.offset = value;
        has |= 2;
      } else if (name == "length") {
        record.length = value;
        has |= 4;
      } else if (name == "transform_descriptors") {
        record.transforms = value;
      }
    });
    record.is_whole = has == 7;
    return record;
  }

  TensorRecord tensor_of(const Object& dict) {
    TensorRecord record;
    int has = 0;
    found_.for_each_pair(dict, [&](const Value& key, const Value& value) {
      const std::string_view name = found_.text(key);
      if (name == "properties") {
        record.properties = value;
        has |= 1;
      } else if (name == "size") {
        record.size = extents_of(value);
        has |= 2;
      } else if (name == "chunks") {
        record.chunks = value;
        has |= 4;
      }
    });
    record.is_whole = has == 7;
    return record;
  }

  PropertiesRecord properties_of(const Value& state) {
    PropertiesRecord record;
    if (state.kind != Kind::tuple) return record;
    const std::span<const Value> fields = found_.tuple(state);
    record.dtype = fields[0];
    if (fields.size() > 2) record.requires_grad = fields[2];
    return record;
  }

  ExtentsField extents_of(const Value& value) {
    if (value.kind == Kind::extents) return {value.number(), Object::kNothing};
    std::string problem = found_.kind(value) + " instead of %";
    if (value.kind == Kind::tuple) {
      const std::span<const Value> parts = found_.tuple(value);
      const auto bad = std::ranges::find_if_not(parts, is_integer);
      problem = "% of " + found_.number(*bad);
    }
    found_.problems.push_back(std::move(problem));
    return {0, static_cast<std::uint32_t>(found_.problems.size() - 1)};
  }

  void memoize(std::uint64_t index) {
    if (!needs(1)) return;
    if (index != memo_.size()) {
      return fail(Errc::pickle_stack, "a memo index is not the next one");
    }
    memo_.push_back(stack_.back());
  }
  void fetch(std::uint64_t index) {
    if (index >= memo_.size()) return bad_stack("nothing is memoized at an index");
    const Value& value = memo_[index];
    if (value.kind == Kind::object) {
      if (object(value).taken) {
        return fail(Errc::pickle_shared, "the state of an object is held by others");
      }
      object(value).fetched = true;
    }
    stack_.push_back(value);
  }

  const Globals& allowed_;
  PickleReader reader_;
  PickleToken token_;
  std::size_t frames_end_ = 0;
  std::uint32_t most_weight_ = 0;
  std::size_t most_objects_ = 0;
  bool stopped_ = false;
  std::optional<Error> error_;
  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;  // their places on the stack
  std::vector<Value> memo_;
  std::vector<std::int64_t> numbers_;
  std::map<const void*, std::size_t> global_numbers_;  // by the entry of the table
  std::string full_name_;
  PickleValues found_;
};

}  // namespace

std::optional<GlobalRole> role_named(std::string_view word) {
  static constexpr std::array<std::pair<std::string_view, GlobalRole>, 9> kWords = {{
      {"value", GlobalRole::value},
      {"function", GlobalRole::function},
      {"enumeration", GlobalRole::enumeration},
      {"member", GlobalRole::member},
      {"mapping", GlobalRole::mapping},
      {"dict_class", GlobalRole::dict_class},
      {"key_class", GlobalRole::key_class},
      {"tuple_class", GlobalRole::tuple_class},
      {"slots_class", GlobalRole::slots_class},
  }};
  for (const auto& [name, role] : kWords) {
    if (name == word) return role;
  }
  return std::nullopt;
}

std::string_view PickleValues::text(const Value& value) const {
  const auto at = static_cast<std::size_t>(value.payload);
  std::size_t count_bytes = 1;
  switch (static_cast<unsigned char>(bytes[at])) {
    case op::kBinunicode:
    case op::kBinbytes:
      count_bytes = 4;
      break;
    case op::kBinunicode8:
    case op::kBinbytes8:
      count_bytes = 8;
      break;
    default:
      break;
  }
  std::size_t count = 0;
  for (std::size_t i = count_bytes; i > 0; --i) {
    count = (count << 8) | static_cast<unsigned char>(bytes[at + i]);
  }
  return bytes.substr(at + 1 + count_bytes, count);
}

Class PickleValues::type(const Value& value) const {
  if (value.kind != Kind::object) return Class::other;
  const Object& found = objects[value.number()];
  return found.kind == ObjectKind::instance ? globals[found.type].type : Class::other;
}

const Object* PickleValues::object(const Value& value, ObjectKind kind) const {
  if (value.kind != Kind::object || objects[value.number()].kind != kind) return nullptr;
  return &objects[value.number()];
}

std::string PickleValues::kind(const Value& value) const {
  const auto last_part = [&](std::uint32_t global) {
    const std::string& name = globals[global].name;
    return "a " + name.substr(name.find_last_of(". ") + 1);
  };
  switch (value.kind) {
    case Kind::mark:
    case Kind::none:
      return "a NoneType";
    case Kind::boolean:
      return "a bool";
    case Kind::small_integer:
    case Kind::integer:
    case Kind::large_integer:
      return "a int";
    case Kind::real:
      return "a float";
    case Kind::text:
      return "a str";
    case Kind::bytes:
      return "a bytes";
    case Kind::tuple:
      return "a tuple";
    case Kind::extents:
      return value.is(Value::kIs) ? "a tuple" : "a Size";
    case Kind::called:
      return last_part(value.number());
    case Kind::global:
      return globals[value.number()].type == Class::dtype ? "a dtype" : last_part(value.number());
    case Kind::object:
      break;
  }
  const Object& found = objects[value.number()];
  switch (found.kind) {
    case ObjectKind::list:
      return "a list";
    case ObjectKind::dict:
      return "a dict";
    default:
      return last_part(found.type);
  }
}

std::string PickleValues::number(const Value& value) const {
  if (value.kind == Kind::large_integer) {
    return value.is(Value::kIs) ? "less than -2**63, which is not a count" : "2**63 or more";
  }
  if (value.kind != Kind::small_integer && value.kind != Kind::integer) {
    return kind(value) + ", which is not a count";
  }
  return std::to_string(value.integer()) + (value.integer() < 0 ? ", which is not a count" : "");
}

std::size_t PickleValues::count(const Object& object) const {
  std::size_t found = 0;
  for (std::uint32_t at = object.first; at != Object::kNothing; at = segments[at].next) {
    found += segments[at].count;
  }
  return found;
}

std::optional<Value> PickleValues::attribute(const Object& instance, std::string_view name) const {
  if (instance.first == Object::kNothing) return std::nullopt;
  const Object* state = object(parts[instance.first], ObjectKind::dict);
  std::optional<Value> found;
  if (state == nullptr) return found;
  for_each_pair(*state, [&](const Value& key, const Value& value) {
    if (text(key) == name) found = value;
  });
  return found;
}

Result<PickleValues> walk_metadata_pickle(std::span<const std::byte> bytes,
                                          const Globals& allowed) {
  return Walk(bytes, allowed).run();
}

}  // namespace torch_ckpt::index
