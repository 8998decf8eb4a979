#pragma once

#include <pybind11/pybind11.h>

#include "engine/save_session.h"

namespace torch_ckpt::python {

/// True, False or "auto", as the public options spell it.
inline engine::DirectIo direct_io_option(const pybind11::object& value) {
  if (pybind11::isinstance<pybind11::bool_>(value)) {
    return value.cast<bool>() ? engine::DirectIo::on : engine::DirectIo::off;
  }
  if (pybind11::isinstance<pybind11::str>(value) && value.cast<std::string>() == "auto") {
    return engine::DirectIo::automatic;
  }
  throw pybind11::value_error("direct_io must be True, False or \"auto\", got " +
                              std::string(pybind11::repr(value)));
}

}  // namespace torch_ckpt::python
