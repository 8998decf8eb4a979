#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace torch_ckpt::python {

/// Decodes a name, which may contain surrogates.
inline pybind11::str text_of(std::string_view bytes) {
  PyObject* text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogatepass");
  if (text == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(text);
}

inline std::string bytes_of(const pybind11::str& text) {
  const auto encoded = pybind11::reinterpret_steal<pybind11::bytes>(
      PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogatepass"));
  if (!encoded) throw pybind11::error_already_set();
  return encoded;
}

inline pybind11::tuple tuple_of(std::span<const std::int64_t> numbers) {
  pybind11::tuple made(numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) made[i] = pybind11::int_(numbers[i]);
  return made;
}

}  // namespace torch_ckpt::python
