#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <iterator>
#include <utility>

namespace torch_ckpt::python {

/// Returns a list of make(value) for each value.
template <class Values, class Make>
auto list_of(const Values& values, Make make) {
  pybind11::list made(values.size());
  std::size_t i = 0;
  for (const auto& value : values) made[i++] = make(value);
  return pybind11::typing::List<decltype(make(*std::begin(values)))>(std::move(made));
}

}  // namespace torch_ckpt::python
