#include "index/pickle_values.h"

#include "format/pickle_reader.h"

namespace torch_ckpt::index {

namespace op = format::op;

std::string_view PickleValues::text(const Value& value) const {
  const auto at = static_cast<std::size_t>(value.opcode_at());
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

TorchClass PickleValues::type(const Value& value) const {
  if (value.kind != ValueKind::object) return TorchClass::other;
  const Object& found = objects[value.number()];
  return found.kind == ObjectKind::instance ? globals[found.type].type : TorchClass::other;
}

const Object* PickleValues::object(const Value& value, ObjectKind kind) const {
  if (value.kind != ValueKind::object || objects[value.number()].kind != kind) return nullptr;
  return &objects[value.number()];
}

std::string PickleValues::kind(const Value& value) const {
  const auto last_part = [&](std::uint32_t global) {
    const std::string& name = globals[global].name;
    return "a " + name.substr(name.find_last_of(". ") + 1);
  };
  switch (value.kind) {
    case ValueKind::mark:
    case ValueKind::none:
      return "a NoneType";
    case ValueKind::boolean:
      return "a bool";
    case ValueKind::small_integer:
    case ValueKind::integer:
    case ValueKind::large_integer:
      return "an int";
    case ValueKind::real:
      return "a float";
    case ValueKind::text:
      return "a str";
    case ValueKind::bytes:
      return "a bytes";
    case ValueKind::tuple:
      return "a tuple";
    case ValueKind::extents:
      return value.is_size ? "a Size" : "a tuple";
    case ValueKind::called:
      return last_part(value.number());
    case ValueKind::global:
      return globals[value.number()].type == TorchClass::dtype ? "a dtype"
                                                               : last_part(value.number());
    case ValueKind::object:
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
  if (value.kind == ValueKind::large_integer) {
    return value.is_negative ? "less than -2**63" : "2**63 or more";
  }
  return value.is_integer() ? std::to_string(value.integer()) : kind(value);
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

}  // namespace torch_ckpt::index
