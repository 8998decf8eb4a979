// The machine, as far as the checks need it:
//
//   stack     kinds of values, and marks
//   memo      what has been memoized; indices count up, as every pickler of CPython writes them
//   objects   what can still change after it was pushed: lists, dicts, instances
//
// An object changes only until it is fetched from the memo for the first time. CPython's picklers
// write nothing else unless a value holds itself, which metadata never does. With that rule no
// value can become part of itself, and what a value weighs is known when it becomes part of
// another.

#include "format/metadata_pickle.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "checked_math.h"

namespace torch_ckpt::format {
namespace {

using Limits = MetadataLimits;

constexpr std::uint64_t kOldestProtocol = 2;
constexpr std::uint64_t kNewestProtocol = 5;

constexpr std::size_t kUsualMostMemo = std::size_t{1} << 20;

enum class Kind : std::uint8_t {
  mark,
  none,
  scalar,         // a bool, a float, an integer of more than 32 bits
  small_integer,  // 32 bits; its hash is the number, so that dicts of them stay fast
  text,
  bytes,
  tuple,
  called,  // what a function returned
  global,
  object,
};

enum class ObjectKind : std::uint8_t { list, dict, mapping, instance };

struct Value {
  Kind kind = Kind::none;
  // Of tuples: nothing in it but scalars, texts and tuples of those.
  bool plain = false;
  // Of texts and tuples, too.
  bool key = false;
  // Of tuples: (None, dict of attribute names), the state of a class with slots.
  bool slots = false;
  // Of tuples: (an enum, a text), with which one of its members is looked up.
  bool names_member = false;
  std::uint8_t depth = 0;
  GlobalRole role = GlobalRole::value;
  std::uint32_t weight = 1;
  std::uint32_t index = 0;  // of an object; of a text the number of bytes, as far as it matters
  std::uint64_t at = 0;     // of a text
};

struct Object {
  ObjectKind kind = ObjectKind::list;
  GlobalRole role = GlobalRole::value;
  bool fetched = false;         // from the memo, so that others may hold it
  bool built = false;           // has got its state
  bool attribute_names = true;  // of dicts: all keys are names that a state may have
  std::uint8_t depth = 0;
  std::uint32_t weight = 1;
};

std::string printable(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c < ' ' || c > '~') c = '?';
  }
  return out;
}

class Verifier {
 public:
  Verifier(std::span<const std::byte> bytes, const Globals& allowed)
      : bytes_(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
        allowed_(allowed),
        reader_(bytes) {}

  Result<std::size_t> run() {
    // About what metadata has; memory that is not used stays untouched.
    memo_.reserve(std::min(bytes_.size() / 12, kUsualMostMemo));
    objects_.reserve(std::min(bytes_.size() / 24, kUsualMostMemo));
    while (!error_ && !stopped_) {
      if (!reader_.next(token_)) return *reader_.error();
      step();
      if (stack_.size() > Limits::kStack) too_large("holds more values than metadata ever does");
    }
    if (error_) return std::move(*error_);
    return reader_.position();
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

  std::uint32_t weight(const Value& value) const {
    return value.kind == Kind::object ? objects_[value.index].weight : value.weight;
  }
  std::uint8_t depth(const Value& value) const {
    return value.kind == Kind::object ? objects_[value.index].depth : value.depth;
  }
  bool is_plain(const Value& value) const {
    return value.kind == Kind::none || value.kind == Kind::scalar ||
           value.kind == Kind::small_integer || value.kind == Kind::text ||
           (value.kind == Kind::tuple && value.plain);
  }

  /// Counts `part` in; false where the whole is more than metadata can be.
  bool count_in(const Value& part, std::uint8_t& whole_depth, std::uint32_t& whole_weight) {
    const unsigned deep = depth(part) + 1u;
    if (deep > Limits::kDepth) {
      fail(Errc::pickle_too_deep, "values lie deeper within each other than metadata's do");
      return false;
    }
    whole_depth = std::max(whole_depth, static_cast<std::uint8_t>(deep));
    if (weight(part) > Limits::kWeight - whole_weight) {
      too_large("a value is reached more often than metadata's are");
      return false;
    }
    whole_weight += weight(part);
    return true;
  }

  /// Classes and functions are called and nothing else; nor does a tuple with one go elsewhere.
  bool can_be_part(const Value& value) {
    const bool is_called = value.kind == Kind::global && value.role != GlobalRole::value;
    if (!is_called && !value.names_member) return true;
    fail(Errc::pickle_stack, "a class or function lies where a value belongs");
    return false;
  }

  void push(Kind kind) {
    Value value;
    value.kind = kind;
    stack_.push_back(value);
  }
  void push_key(Kind kind) {
    push(kind);
    stack_.back().key = true;
  }
  void push_object(ObjectKind kind, GlobalRole role = GlobalRole::value) {
    push(Kind::object);
    stack_.back().index = static_cast<std::uint32_t>(objects_.size());
    Object object;
    object.kind = kind;
    object.role = role;
    objects_.push_back(object);
    // Indices have 32 bits.
    if (objects_.size() >= Limits::kWeight) too_large("has more objects than metadata ever does");
  }
  void push_text() {
    push_key(Kind::text);
    stack_.back().at = static_cast<std::uint64_t>(token_.bytes.data() - bytes_.data());
    stack_.back().index =
        static_cast<std::uint32_t>(std::min(token_.bytes.size(), Limits::kNameBytes + 1));
  }
  std::string_view text(const Value& value) const { return bytes_.substr(value.at, value.index); }

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
        return push_key(Kind::none);
      case op::kNewtrue:
      case op::kNewfalse:
        return push_key(Kind::scalar);
      case op::kBinint:
      case op::kBinint1:
      case op::kBinint2:
        return push_key(Kind::small_integer);
      case op::kLong1:
      case op::kBinfloat:
        return push(Kind::scalar);
      case op::kShortBinunicode:
      case op::kBinunicode:
      case op::kBinunicode8:
        return push_text();
      case op::kShortBinbytes:
      case op::kBinbytes:
      case op::kBinbytes8:
        return push(Kind::bytes);
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
        return global(token_.bytes, token_.name);
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
    if (!inside(reader_.position(), count, bytes_.size())) {
      return fail(Errc::pickle_truncated, "a frame ends outside");
    }
    frames_end_ = std::max(frames_end_, reader_.position() + static_cast<std::size_t>(count));
  }

  void stop() {
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
    made.plain = true;
    made.key = true;
    const std::size_t first = stack_.size() - count;
    made.names_member = count == 2 && stack_[first].kind == Kind::global &&
                        stack_[first].role == GlobalRole::enumeration &&
                        stack_[first + 1].kind == Kind::text;
    for (std::size_t i = first; i < stack_.size(); ++i) {
      const Value& part = stack_[i];
      if (!made.names_member && !can_be_part(part)) return;
      if (!count_in(part, made.depth, made.weight)) return;
      made.plain = made.plain && is_plain(part);
      made.key = made.key && part.key && is_plain(part);
    }
    made.slots = count == 2 && stack_[first].kind == Kind::none && is_state_dict(stack_[first + 1]);
    stack_.resize(first);
    stack_.push_back(made);
  }

  /// The object at the place, where it is of one of the kinds and may still change.
  Object* changeable(std::size_t place, ObjectKind kind, ObjectKind or_kind) {
    const Value& target = stack_[place];
    if (target.kind != Kind::object ||
        (objects_[target.index].kind != kind && objects_[target.index].kind != or_kind)) {
      bad_stack("items are put into something that cannot hold them");
      return nullptr;
    }
    Object& object = objects_[target.index];
    if (object.fetched) {
      fail(Errc::pickle_shared, "a value changes after others may hold it");
      return nullptr;
    }
    return &object;
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
    stack_.resize(first - marks);
  }

  bool is_key(const Value& value) {
    const bool instance = value.kind == Kind::object &&
                          objects_[value.index].kind == ObjectKind::instance &&
                          objects_[value.index].role == GlobalRole::key_class;
    if (!instance && !value.key) {
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
    return value.kind == Kind::text && value.index <= Limits::kNameBytes &&
           !text(value).starts_with("__");
  }
  bool is_state_dict(const Value& value) const {
    return value.kind == Kind::object && objects_[value.index].kind == ObjectKind::dict &&
           objects_[value.index].attribute_names;
  }

  void stack_global() {
    if (!needs(2)) return;
    const Value name = pop();
    const Value module = pop();
    if (name.kind != Kind::text || module.kind != Kind::text) {
      return bad_stack("a name is not a string");
    }
    if (std::max(name.index, module.index) > Limits::kNameBytes) {
      return too_large("a name is longer than any of metadata's");
    }
    global(text(module), text(name));
  }
  void global(std::string_view module, std::string_view name) {
    // No name of the table has a second space, so that one way alone leads to each.
    full_name_.assign(module).append(" ").append(name);
    const auto found = allowed_.find(full_name_);
    if (found == allowed_.end()) {
      error_ = format_error(Errc::pickle_forbidden,
                            "the metadata names " + printable(module) + "." + printable(name) +
                                ", which is not on the list of what a checkpoint may contain");
      return;
    }
    push(Kind::global);
    stack_.back().role = found->second;
  }

  void reduce() {
    if (!needs(2)) return;
    const Value arguments = pop();
    const Value callee = pop();
    if (callee.kind != Kind::global || arguments.kind != Kind::tuple) {
      return fail(Errc::pickle_call,
                  "something is called that is not a function, or its arguments are not a tuple");
    }
    if (callee.role == GlobalRole::mapping && arguments.weight == 1) {
      return push_object(ObjectKind::mapping);
    }
    const bool is_function =
        callee.role == GlobalRole::function || callee.role == GlobalRole::enumeration;
    const bool is_lookup = callee.role == GlobalRole::member;
    if (is_lookup && !arguments.names_member) {
      error_ =
          format_error(Errc::pickle_forbidden,
                       "the metadata calls getattr for something that is not a member of an enum, "
                       "which is not on the list of what a checkpoint may contain");
      return;
    }
    if (!is_lookup && (!is_function || !arguments.plain)) {
      return fail(Errc::pickle_call, "a call that metadata never makes");
    }
    if (arguments.weight > Limits::kArgumentsWeight) {
      return too_large("a function gets more arguments than metadata has for one");
    }
    Value result;
    result.kind = Kind::called;
    if (!count_in(arguments, result.depth, result.weight)) return;
    stack_.push_back(result);
  }

  void new_object() {
    if (!needs(2)) return;
    const Value arguments = pop();
    const Value callee = pop();
    const bool made =
        callee.kind == Kind::global &&
        (callee.role == GlobalRole::dict_class || callee.role == GlobalRole::key_class ||
         callee.role == GlobalRole::tuple_class || callee.role == GlobalRole::slots_class);
    if (!made || arguments.kind != Kind::tuple || arguments.weight != 1) {
      return fail(Errc::pickle_call, "an object is made as metadata's never are");
    }
    push_object(ObjectKind::instance, callee.role);
  }

  void build() {
    if (!needs(2)) return;
    const Value state = pop();
    const Value& target = stack_.back();
    if (target.kind != Kind::object || objects_[target.index].kind != ObjectKind::instance) {
      return fail(Errc::pickle_state,
                  "a state is given to something that is not an instance of a class");
    }
    Object& object = objects_[target.index];
    if (object.fetched) {
      return fail(Errc::pickle_shared, "a value changes after others may hold it");
    }
    if (object.built) return fail(Errc::pickle_state, "an object gets a second state");
    if (!is_state(state, object.role)) {
      return fail(Errc::pickle_state, "a state is not of its class's form");
    }
    if (count_in(state, object.depth, object.weight)) object.built = true;
  }
  bool is_state(const Value& state, GlobalRole role) const {
    if (state.names_member) return false;
    if (role == GlobalRole::tuple_class) return state.kind == Kind::tuple;
    if (role == GlobalRole::slots_class) return state.kind == Kind::tuple && state.slots;
    return is_state_dict(state);
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
    if (value.kind == Kind::object) objects_[value.index].fetched = true;
    stack_.push_back(value);
  }

  std::string_view bytes_;
  const Globals& allowed_;
  PickleReader reader_;
  PickleToken token_;
  std::size_t frames_end_ = 0;
  bool stopped_ = false;
  std::optional<Error> error_;
  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;  // their places on the stack
  std::vector<Value> memo_;
  std::vector<Object> objects_;
  std::string full_name_;
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

Result<std::size_t> check_metadata_pickle(std::span<const std::byte> bytes,
                                          const Globals& allowed) {
  return Verifier(bytes, allowed).run();
}

}  // namespace torch_ckpt::format
