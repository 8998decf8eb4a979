#include "python/errors.h"

#include <cstring>
#include <string>

#include "engine/warnings.h"

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

// errno and filename are attributes of OSError, so the text repeats neither.
[[noreturn]] void throw_os_error(const Error& error, const std::string& subject) {
  std::string text = error.operation + " failed";
  if (error.offset != Error::kNoOffset) text += " at byte " + std::to_string(error.offset);
  if (!subject.empty()) text += " (" + subject + ")";
  if (!error.detail.empty()) text += ": " + error.detail;
  text += std::string(": ") + std::strerror(error.sys_errno);
  const py::object os_error = py::reinterpret_borrow<py::object>(PyExc_OSError);
  if (error.path.empty()) throw_python(os_error(error.sys_errno, os_text(text)));
  throw_python(os_error(error.sys_errno, os_text(text), os_text(error.path)));
}

}  // namespace

py::str os_text(const std::string& bytes) {
  PyObject* text =
      PyUnicode_DecodeFSDefaultAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

void raise(const Error& error, const std::string& subject) {
  if (error.sys_errno != 0) throw_os_error(error, subject);
  const std::string text = subject.empty() ? error.message() : subject + ": " + error.message();
  switch (error.code) {
    case Errc::invalid_argument:
      throw_python(py::reinterpret_borrow<py::object>(PyExc_ValueError)(os_text(text)));
    case Errc::outside_directory:
      throw_python(error_class("Unsafe")(os_text(text)));
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
      throw_python(error_class("Corrupt")(os_text(text)));
    case Errc::pickle_forbidden:
      throw_python(error_class("Unsafe")(os_text(text)));
    case Errc::system:
    case Errc::cancelled:
    case Errc::directory_moved:
    case Errc::frame_damaged:
    case Errc::result_missing:
      throw_python(error_class("CheckpointError")(os_text(text)));
    case Errc::internal:
      break;
  }
  throw_python(py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(os_text(text)));
}

void raise(const directory::PublishOutcome& outcome) {
  const bool uncertain = outcome.state == directory::PublishState::durability_uncertain;
  throw_python(error_class(uncertain ? "DurabilityUncertain" : "NotCommitted")(
      os_text(outcome.error.message()), outcome.error.sys_errno));
}

void pass_on_warnings() {
  for (const std::string& text : engine::take_warnings()) {
    py::module_::import("torch_ckpt._base.log").attr("warn")(text);
  }
}

}  // namespace torch_ckpt::python
