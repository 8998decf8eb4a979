#include "python/errors.h"

#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "engine/context.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

py::object error_class(const char* name) {
  return py::module_::import("torch_ckpt.errors").attr(name);
}

[[noreturn]] void throw_python(const py::object& exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw py::error_already_set();
}

// The text omits errno and filename, which OSError adds.
[[noreturn]] void throw_os_error(const Error& error) {
  std::string text = error.operation + " failed";
  if (error.offset != Error::kNoOffset) text += " at byte " + std::to_string(error.offset);
  if (!error.subject.empty()) text += " (" + error.subject + ")";
  if (!error.detail.empty()) text += ": " + error.detail;
  text += std::string(": ") + std::strerror(error.sys_errno);
  const py::handle os_error = PyExc_OSError;
  if (error.path.empty()) throw_python(os_error(error.sys_errno, os_text(text)));
  throw_python(os_error(error.sys_errno, os_text(text), os_text(error.path)));
}

py::object class_of(Errc code) {
  switch (code) {
    case Errc::invalid_argument:
      return py::reinterpret_borrow<py::object>(PyExc_ValueError);
    case Errc::outside_directory:
    case Errc::pickle_forbidden:
      return error_class("Unsafe");
    case Errc::root_in_use:
      return error_class("RootInUse");
    case Errc::range_past_end:
    case Errc::not_a_zip:
    case Errc::zip_compressed:
    case Errc::zip_inconsistent:
    case Errc::record_missing:
    case Errc::pickle_unknown:
    case Errc::tensor_mismatch:
    case Errc::checksum_mismatch:
    case Errc::table_inconsistent:
    case Errc::pickle_truncated:
    case Errc::pickle_opcode:
    case Errc::pickle_stack:
    case Errc::pickle_call:
    case Errc::pickle_state:
    case Errc::pickle_key:
    case Errc::pickle_shared:
    case Errc::pickle_too_deep:
    case Errc::pickle_too_large:
    case Errc::metadata_inconsistent:
      return error_class("Corrupt");
    case Errc::system:
    case Errc::unsavable:
    case Errc::cancelled:
    case Errc::directory_moved:
    case Errc::wrong_base:
    case Errc::frame_damaged:
    case Errc::store:
    case Errc::result_missing:
      return error_class("CheckpointError");
    case Errc::internal:
      break;
  }
  return py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
}

[[noreturn]] void raise(const Error& error) {
  if (error.sys_errno != 0) throw_os_error(error);
  throw_python(class_of(error.code)(os_text(error.message())));
}

}  // namespace

py::str os_text(const std::string& bytes) {
  PyObject* text =
      PyUnicode_DecodeFSDefaultAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

void bind_errors() {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(std::move(thrown));
    } catch (const Failure& failure) {
      try {
        raise(failure.error());
      } catch (py::error_already_set& error) {
        error.restore();
      }
    }
  });
}

void raise(const directory::PublishOutcome& outcome) {
  const bool uncertain = outcome.state == directory::PublishState::durability_uncertain;
  throw_python(error_class(uncertain ? "DurabilityUncertain" : "NotCommitted")(
      os_text(outcome.error.message()), outcome.error.sys_errno));
}

void pass_on_warnings() {
  for (const std::string& text : engine::Context::process().warnings.take()) {
    py::module_::import("torch_ckpt._base.log").attr("warn")(text);
  }
}

}  // namespace torch_ckpt::python
