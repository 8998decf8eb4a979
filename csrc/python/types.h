#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl/filesystem.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace torch_ckpt::python {

/// The name of a value, which may contain surrogates, as the argument of a bound function.
struct Name : std::string {};

/// The name of a file or directory, as the argument of a bound function. It is encoded like
/// os.fsencode does.
struct FileName : std::string {};

/// Bytes, as an argument or result of a bound function.
struct Bytes : std::string {};

/// An object of a Python type that the stubs name. pybind11 does not check the type.
template <pybind11::typing::StringLiteral Type>
struct Typed : pybind11::object {
  using object::object;
  Typed(pybind11::object value) : pybind11::object(std::move(value)) {}
  static bool check_(pybind11::handle) { return true; }
};

/// Decodes a name, which may contain surrogates.
inline pybind11::str text_of(std::string_view bytes) {
  PyObject* text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogatepass");
  if (text == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(text);
}

/// Returns the getter of a property: decodes a member, or the result of a method, which is a name.
template <class Class, class Member>
auto text_getter(Member Class::*name) {
  return [name](const Class& object) { return text_of(std::invoke(name, object)); };
}

/// Returns a tuple of integers.
inline pybind11::typing::Tuple<int, pybind11::ellipsis> tuple_of(
    std::span<const std::int64_t> numbers) {
  pybind11::tuple made(numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) made[i] = pybind11::int_(numbers[i]);
  return made;
}

}  // namespace torch_ckpt::python

namespace pybind11::detail {

template <typing::StringLiteral Type>
struct handle_type_name<torch_ckpt::python::Typed<Type>> {
  static constexpr auto name = const_name(Type.name);
};

template <>
struct type_caster<torch_ckpt::python::Name> {
  PYBIND11_TYPE_CASTER(torch_ckpt::python::Name, const_name("str"));

  bool load(handle object, bool) {
    if (!isinstance<str>(object)) return false;
    const auto encoded =
        reinterpret_steal<bytes>(PyUnicode_AsEncodedString(object.ptr(), "utf-8", "surrogatepass"));
    if (!encoded) throw error_already_set();
    value = {std::string(encoded)};
    return true;
  }
};

template <>
struct type_caster<torch_ckpt::python::FileName> {
  PYBIND11_TYPE_CASTER(torch_ckpt::python::FileName, const_name("str"));

  bool load(handle object, bool convert) {
    make_caster<std::filesystem::path> path;
    if (!path.load(object, convert)) return false;
    value = {cast_op<std::filesystem::path&&>(std::move(path)).native()};
    return true;
  }
};

template <>
struct type_caster<torch_ckpt::python::Bytes> {
  PYBIND11_TYPE_CASTER(torch_ckpt::python::Bytes, const_name("bytes"));

  bool load(handle object, bool) {
    if (!isinstance<bytes>(object)) return false;
    value = {std::string(reinterpret_borrow<bytes>(object))};
    return true;
  }
  static handle cast(std::string_view text, return_value_policy, handle) {
    return bytes(text).release();
  }
};

}  // namespace pybind11::detail
