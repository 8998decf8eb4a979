// The walk simulates those parts of the unpickler that the checks need:
//
//   stack     values and marks
//   memo      memoized values; indices must be consecutive, as in all CPython picklers
//   objects   values that can change after they were pushed: lists, dicts, instances
//   parts     the items of tuples, lists and dicts
//
// Most of the metadata consists of instances of a few classes. When the state of such an instance
// is set, the fields are stored in a record for its class, and the dict with the state is dropped.
// This frees most of the memory. It also means that two instances cannot share a dict as state.
//
// An object may change only until it is first fetched from the memo. CPython's picklers obey this
// rule except for values that contain themselves, which metadata does not have. The rule implies
// that no value can contain itself, and that the weight of a value is final once another value
// contains it.

#include "index/metadata_pickle.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
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

// Enough for the metadata of five million tensors.
constexpr std::size_t kMaxReserve = std::size_t{1} << 26;

std::string printable(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c < ' ' || c > '~') c = '?';
  }
  return out;
}

class Walk {
 public:
  Walk(std::span<const std::byte> bytes, const Globals& allowed)
      : allowed_(allowed), reader_(bytes) {
    values_.bytes = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  Result<MetadataPickle> run() {
    // Typical numbers for metadata of this size. Reserved memory that is not used costs only
    // address space, but a vector that grows needs twice its memory, and leaves gaps in the heap.
    const auto one_per = [&](std::size_t bytes) {
      return std::min(values_.bytes.size() / bytes, kMaxReserve);
    };
    memo_.reserve(one_per(12));
    values_.objects.reserve(one_per(20));
    values_.parts.reserve(one_per(24));
    values_.segments.reserve(one_per(96));
    records_.reserve(one_per(128));
    max_weight_ = Limits::max_weight(values_.bytes.size());
    max_objects_ = Limits::max_objects(values_.bytes.size());
    while (!error_ && !stopped_) {
      if (!reader_.next(token_)) return *reader_.error();
      step();
      if (stack_.size() > Limits::kStack) too_large("the stack has too many values");
    }
    if (error_) return std::move(*error_);
    values_.end = reader_.position();
    values_.root = stack_.back();
    return MetadataPickle{std::move(values_), std::move(records_)};
  }

 private:
  // --- errors: the first error ends the walk ---

  void fail(Errc code, std::string detail) {
    if (error_) return;
    error_ = Error{code, 0, "pickle", {}, token_.at, std::move(detail)};
  }
  void bad_stack(std::string detail) { fail(Errc::pickle_stack, std::move(detail)); }
  void too_large(std::string detail) { fail(Errc::pickle_too_large, std::move(detail)); }

  // --- values ---

  Object& object(const Value& value) { return values_.objects[value.number()]; }
  const Object& object(const Value& value) const { return values_.objects[value.number()]; }
  std::uint32_t weight(const Value& value) const {
    return value.kind == ValueKind::object ? object(value).weight : value.weight;
  }
  std::uint8_t depth(const Value& value) const {
    return value.kind == ValueKind::object ? object(value).depth : value.depth;
  }
  const PickleValues::Global& global(const Value& value) const {
    return values_.globals[value.number()];
  }
  /// Returns the role of a global, or GlobalRole::value for any other value.
  GlobalRole role(const Value& value) const {
    return value.kind == ValueKind::global ? global(value).role : GlobalRole::value;
  }
  static bool is_plain(const Value& value) {
    switch (value.kind) {
      case ValueKind::none:
      case ValueKind::boolean:
      case ValueKind::small_integer:
      case ValueKind::integer:
      case ValueKind::large_integer:
      case ValueKind::real:
      case ValueKind::text:
        return true;
      case ValueKind::tuple:
      case ValueKind::extents:
        return value.is_plain;
      default:
        return false;
    }
  }

  /// Updates a value's depth and weight for a new part. Fails if either exceeds its limit.
  bool add_depth_and_weight(const Value& part, std::uint8_t& total_depth,
                            std::uint32_t& total_weight) {
    const unsigned new_depth = depth(part) + 1u;
    if (new_depth > Limits::kDepth) {
      fail(Errc::pickle_too_deep, "values are nested too deeply for metadata");
      return false;
    }
    total_depth = std::max(total_depth, static_cast<std::uint8_t>(new_depth));
    if (weight(part) > max_weight_ - total_weight) {
      too_large("a value is too large: its shared parts are counted each time they occur");
      return false;
    }
    total_weight += weight(part);
    return true;
  }

  /// Refuses classes and functions, which may only be called, and the tuple that looks up an enum
  /// member, which may only be an argument.
  bool can_be_part(const Value& value) {
    const bool is_called = role(value) != GlobalRole::value;
    if (!is_called && !(value.kind == ValueKind::tuple && value.names_member)) return true;
    fail(Errc::pickle_stack, "a class or function is used as a value");
    return false;
  }

  /// Pushes a value and returns it, so that the caller can set its other fields.
  Value& push(ValueKind kind, std::uint64_t payload = 0) {
    Value& value = stack_.emplace_back();
    value.kind = kind;
    value.payload = payload;
    return value;
  }
  Value& push_text(ValueKind kind) {
    Value& value = push(kind, token_.at);
    value.weight = Limits::weight_of_text(token_.bytes.size());
    return value;
  }
  void push_object(ObjectKind kind, const Value* type = nullptr) {
    push(ValueKind::object, values_.objects.size());
    Object object;
    object.kind = kind;
    if (type != nullptr) {
      object.role = role(*type);
      object.type = type->number();
    }
    values_.objects.push_back(object);
    if (values_.objects.size() > max_objects_) {
      too_large("the pickle has too many objects for its size");
    }
  }
  void push_integer(std::int64_t value) {
    push(ValueKind::small_integer, static_cast<std::uint64_t>(value)).is_key = true;
  }
  void push_long() {
    // Two's complement, little-endian; the sign bit is in the last byte.
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
    if (fits) {
      push(ValueKind::integer, static_cast<std::uint64_t>(value));
    } else {
      push(ValueKind::large_integer).is_negative = is_negative;
    }
  }

  /// Appends the values at and above `first_on_stack` to the parts. Returns the index of the first.
  std::uint32_t add_parts(std::size_t first_on_stack) {
    const std::size_t first = values_.parts.size();
    values_.parts.insert(values_.parts.end(),
                         stack_.begin() + static_cast<std::ptrdiff_t>(first_on_stack),
                         stack_.end());
    // Indices are 32-bit.
    if (values_.parts.size() >= Limits::kWeight) too_large("the pickle has too many values");
    return static_cast<std::uint32_t>(first);
  }
  void add_segment(Object& object, std::size_t first_on_stack) {
    const auto count = static_cast<std::uint32_t>(stack_.size() - first_on_stack);
    if (count == 0) return;
    const std::uint32_t first = add_parts(first_on_stack);
    std::vector<PickleValues::Segment>& segments = values_.segments;
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

  /// Number of values above the last mark.
  std::size_t height() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back() + 1); }
  bool needs(std::size_t count) {
    if (height() >= count) return true;
    bad_stack("the stack has too few values for the opcode");
    return false;
  }
  Value pop() {
    const Value value = stack_.back();
    stack_.pop_back();
    return value;
  }
  /// Pops the position of the last mark from marks_, and returns the number of values above it. The
  /// caller removes those values and the mark itself from stack_.
  std::optional<std::size_t> values_since_mark() {
    if (marks_.empty()) {
      bad_stack("the stack has no mark");
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
        push(ValueKind::mark);
        return;
      case op::kNone:
        push(ValueKind::none).is_key = true;
        return;
      case op::kNewtrue:
      case op::kNewfalse:
        push(ValueKind::boolean).is_key = true;
        stack_.back().is_true = token_.code == op::kNewtrue;
        return;
      case op::kBinint:
        return push_integer(static_cast<std::int32_t>(token_.number));
      case op::kBinint1:
      case op::kBinint2:
        return push_integer(static_cast<std::int64_t>(token_.number));
      case op::kLong1:
        return push_long();
      case op::kBinfloat:
        push(ValueKind::real, __builtin_bswap64(token_.number));
        return;
      case op::kShortBinunicode:
      case op::kBinunicode:
      case op::kBinunicode8:
        push_text(ValueKind::text).is_key = true;
        return;
      case op::kShortBinbytes:
      case op::kBinbytes:
      case op::kBinbytes8:
        push_text(ValueKind::bytes);
        return;
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
                    "opcode " + std::to_string(token_.code) + " does not occur in metadata");
    }
  }

  void protocol(std::uint64_t version) {
    if (token_.at != 0) return fail(Errc::pickle_opcode, "PROTO is only allowed at the beginning");
    if (version >= kOldestProtocol && version <= kNewestProtocol) return;
    fail(Errc::pickle_opcode, "protocol " + std::to_string(version) + " is not supported");
  }

  // The unpickler may allocate memory for a whole frame, so check the frame's size.
  void frame(std::uint64_t count) {
    if (!inside(reader_.position(), count, values_.bytes.size())) {
      return fail(Errc::pickle_truncated, "a frame ends past the end of the pickle");
    }
    frames_end_ = std::max(frames_end_, reader_.position() + static_cast<std::size_t>(count));
  }

  void stop() {
    // Check this last, so that the error for a protocol 0 program that runs code names the code.
    if (static_cast<unsigned char>(values_.bytes.front()) != op::kProto) {
      return fail(Errc::pickle_opcode, "the first opcode is not PROTO");
    }
    if (!marks_.empty() || stack_.size() != 1) {
      return bad_stack("at STOP, the stack does not hold exactly one value");
    }
    if (frames_end_ > reader_.position()) {
      return fail(Errc::pickle_truncated, "a frame ends after STOP");
    }
    if (can_be_part(stack_.back())) stopped_ = true;
  }

  void marked_tuple() {
    const auto count = values_since_mark();
    if (!count) return;
    make_tuple(*count);
    if (error_) return;
    const Value made = pop();
    stack_.back() = made;  // replaces the mark
  }
  void tuple(std::size_t count) {
    if (needs(count)) make_tuple(count);
  }
  void make_tuple(std::size_t count) {
    Value made;
    made.kind = ValueKind::tuple;
    made.is_plain = made.is_key = true;
    const std::size_t first = stack_.size() - count;
    if (count == 2 && role(stack_[first]) == GlobalRole::enumeration &&
        stack_[first + 1].kind == ValueKind::text) {
      made.names_member = true;
    }
    bool is_extents = true;
    for (std::size_t i = first; i < stack_.size(); ++i) {
      const Value& part = stack_[i];
      if (!made.names_member && !can_be_part(part)) return;
      if (!add_depth_and_weight(part, made.depth, made.weight)) return;
      made.is_plain = made.is_plain && is_plain(part);
      made.is_key = made.is_key && is_plain(part) && part.is_key;
      is_extents = is_extents && part.is_integer();
    }
    if (is_extents) {
      made.kind = ValueKind::extents;
      numbers_.clear();
      for (std::size_t i = first; i < stack_.size(); ++i) numbers_.push_back(stack_[i].integer());
      made.payload = values_.extents.intern(numbers_);
    } else {
      if (count == 2 && stack_[first].kind == ValueKind::none && is_state_dict(stack_[first + 1])) {
        made.is_slots_state = true;
      }
      made.payload = add_parts(first) | (std::uint64_t{count} << 32);
    }
    stack_.resize(first);
    stack_.push_back(made);
  }

  /// Returns the object at this position of the stack. Fails if it has another kind or may no
  /// longer change.
  Object* changeable(std::size_t position, ObjectKind kind, ObjectKind or_kind) {
    const Value& target = stack_[position];
    if (target.kind != ValueKind::object ||
        (object(target).kind != kind && object(target).kind != or_kind)) {
      bad_stack("items are added to a value of the wrong type");
      return nullptr;
    }
    if (object(target).is_fetched) {
      fail(Errc::pickle_shared, "a value is changed after it was fetched from the memo");
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
  /// marks: 1 if there is a mark between the list and the values, otherwise 0.
  void append_above(std::size_t count, std::size_t marks) {
    if (!needs(count + marks + 1)) return;
    const std::size_t first = stack_.size() - count;
    Object* list = changeable(first - marks - 1, ObjectKind::list, ObjectKind::list);
    if (list == nullptr) return;
    for (std::size_t i = first; i < stack_.size(); ++i) {
      if (!can_be_part(stack_[i])) return;
      if (!add_depth_and_weight(stack_[i], list->depth, list->weight)) return;
    }
    add_segment(*list, first);
    stack_.resize(first - marks);
  }

  void marked_set_items() {
    const auto count = values_since_mark();
    if (!count) return;
    if (*count % 2 != 0) return bad_stack("a dict key has no value");
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
      dict->only_attribute_names = dict->only_attribute_names && is_attribute_name(stack_[i]);
      for (std::size_t part = i; part < i + 2; ++part) {
        if (!can_be_part(stack_[part])) return;
        if (!add_depth_and_weight(stack_[part], dict->depth, dict->weight)) return;
      }
    }
    add_segment(*dict, first);
    stack_.resize(first - marks);
  }

  bool is_key(const Value& value) {
    const bool instance = value.kind == ValueKind::object &&
                          object(value).kind == ObjectKind::instance &&
                          object(value).role == GlobalRole::key_class;
    if (!instance && !value.is_key) {
      fail(Errc::pickle_key, "a dict key has a type that metadata does not use for keys");
      return false;
    }
    if (weight(value) > Limits::kKeyWeight) {
      fail(Errc::pickle_key, "a dict key is too large");
      return false;
    }
    return true;
  }

  // Refuses names that start with two underscores: such an attribute could shadow a special
  // attribute of the class.
  bool is_attribute_name(const Value& value) const {
    if (value.kind != ValueKind::text) return false;
    const std::string_view name = values_.text(value);
    return name.size() <= Limits::kNameBytes && !name.starts_with("__");
  }
  bool is_state_dict(const Value& value) const {
    return value.kind == ValueKind::object && object(value).kind == ObjectKind::dict &&
           object(value).only_attribute_names;
  }

  void stack_global() {
    if (!needs(2)) return;
    const Value name = pop();
    const Value module = pop();
    if (name.kind != ValueKind::text || module.kind != ValueKind::text) {
      return bad_stack("the name of a global is not a string");
    }
    if (std::max(values_.text(name).size(), values_.text(module).size()) > Limits::kNameBytes) {
      return too_large("the name of a global has more than 256 bytes");
    }
    push_global(values_.text(module), values_.text(name));
  }
  void push_global(std::string_view module, std::string_view name) {
    // Each key of the table has exactly one space, so a match is unambiguous.
    full_name_.assign(module).append(" ").append(name);
    const auto allowed = allowed_.find(full_name_);
    if (allowed == allowed_.end()) {
      error_ = format_error(Errc::pickle_forbidden,
                            "the metadata names " + printable(module) + "." + printable(name) +
                                ", which is not on the allow-list for metadata");
      return;
    }
    const auto [known, is_new] = global_numbers_.try_emplace(&*allowed, values_.globals.size());
    if (is_new) {
      values_.globals.push_back(
          {full_name_, allowed->second, torch_class(full_name_, allowed->second)});
    }
    push(ValueKind::global, known->second);
  }

  void reduce() {
    if (!needs(2)) return;
    const Value arguments = pop();
    const Value callee = pop();
    if (callee.kind != ValueKind::global || !arguments.is_tuple()) {
      return fail(Errc::pickle_call,
                  "the called value is not a function, or the arguments are not a tuple");
    }
    if (role(callee) == GlobalRole::mapping && arguments.weight == 1) {
      return push_object(ObjectKind::mapping, &callee);
    }
    const bool is_function =
        role(callee) == GlobalRole::function || role(callee) == GlobalRole::enumeration;
    const bool is_lookup = role(callee) == GlobalRole::member;
    if (is_lookup && !arguments.names_member) {
      error_ = format_error(Errc::pickle_forbidden,
                            "the metadata calls getattr for something other than an enum member, "
                            "which is not allowed in metadata");
      return;
    }
    if (!is_lookup && (!is_function || !arguments.is_plain)) {
      return fail(Errc::pickle_call, "this call does not occur in metadata");
    }
    if (arguments.weight > Limits::kArgumentsWeight) {
      return too_large("the arguments of a function are too large");
    }
    Value result;
    result.kind = ValueKind::called;
    result.payload = callee.number();
    if (!add_depth_and_weight(arguments, result.depth, result.weight)) return;
    if (global(callee).type == TorchClass::size && arguments.kind == ValueKind::tuple) {
      const std::span<const Value> given = values_.tuple(arguments);
      if (given.size() == 1 && given[0].kind == ValueKind::extents) {
        result.kind = ValueKind::extents;
        result.payload = given[0].number();
        result.is_size = true;
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
    if (!is_class || !arguments.is_tuple() || arguments.weight != 1) {
      return fail(Errc::pickle_call,
                  "an object is created in a way that does not occur in metadata");
    }
    push_object(ObjectKind::instance, &callee);
  }

  void build() {
    if (!needs(2)) return;
    const Value state = pop();
    const Value& target = stack_.back();
    if (target.kind != ValueKind::object || object(target).kind != ObjectKind::instance) {
      return fail(Errc::pickle_state,
                  "the pickle sets the state of a value that is not an instance of a class");
    }
    Object& instance = object(target);
    if (instance.is_fetched) {
      return fail(Errc::pickle_shared, "a value is changed after it was fetched from the memo");
    }
    if (instance.is_built)
      return fail(Errc::pickle_state, "the pickle sets the state of an object twice");
    if (!is_state(state, instance.role)) {
      return fail(Errc::pickle_state,
                  "the state of an object does not have the form that its class requires");
    }
    if (!add_depth_and_weight(state, instance.depth, instance.weight)) return;
    instance.is_built = true;
    store_state(instance, state);
  }
  bool is_state(const Value& state, GlobalRole role) const {
    if (state.kind == ValueKind::tuple && state.names_member) return false;
    if (role == GlobalRole::tuple_class) return state.is_tuple();
    if (role == GlobalRole::slots_class) {
      return state.kind == ValueKind::tuple && state.is_slots_state;
    }
    return is_state_dict(state);
  }

  void store_state(Object& instance, const Value& state) {
    const auto record = records_.add(values_.globals[instance.type].type, state, values_);
    if (!record) {
      instance.first = static_cast<std::uint32_t>(values_.parts.size());
      values_.parts.push_back(state);
      return;
    }
    instance.first = *record;
    if (state.kind == ValueKind::object) drop(object(state));
  }

  /// Frees the parts of a dict whose contents are in a record, if the parts are the last ones.
  /// Frees the dict as well if it is the last object and nothing refers to it.
  void drop(Object& dict) {
    if (dict.is_fetched || dict.first == Object::kNothing || dict.first != dict.last) return;
    const PickleValues::Segment& segment = values_.segments[dict.first];
    if (dict.first + 1 != values_.segments.size() ||
        segment.first + segment.count != values_.parts.size()) {
      return;
    }
    values_.parts.resize(segment.first);
    values_.segments.pop_back();
    dict.first = dict.last = Object::kNothing;
    dict.is_dropped = true;
    if (!dict.is_memoized && &dict == &values_.objects.back()) values_.objects.pop_back();
  }

  void memoize(std::uint64_t index) {
    if (!needs(1)) return;
    if (index != memo_.size()) {
      return fail(Errc::pickle_stack, "memo indices are not consecutive");
    }
    memo_.push_back(stack_.back());
    if (stack_.back().kind == ValueKind::object) object(stack_.back()).is_memoized = true;
  }
  void fetch(std::uint64_t index) {
    if (index >= memo_.size()) return bad_stack("no value has this memo index");
    const Value& value = memo_[index];
    if (value.kind == ValueKind::object) {
      if (object(value).is_dropped) {
        return fail(Errc::pickle_shared, "the pickle uses the state of an object again");
      }
      object(value).is_fetched = true;
    }
    stack_.push_back(value);
  }

  const Globals& allowed_;
  PickleReader reader_;
  PickleToken token_;
  std::size_t frames_end_ = 0;
  std::uint32_t max_weight_ = 0;
  std::size_t max_objects_ = 0;
  bool stopped_ = false;
  std::optional<Error> error_;
  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;  // positions of the marks on the stack
  std::vector<Value> memo_;
  std::vector<std::int64_t> numbers_;
  std::map<const void*, std::size_t> global_numbers_;  // by address of the entry in allowed_
  std::string full_name_;
  PickleValues values_;
  TorchRecords records_;
};

}  // namespace

Result<MetadataPickle> walk_metadata_pickle(std::span<const std::byte> bytes,
                                            const Globals& allowed) {
  return Walk(bytes, allowed).run();
}

}  // namespace torch_ckpt::index
