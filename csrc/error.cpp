#include "error.h"

#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

namespace torch_ckpt {

std::string_view name(Errc code) {
  switch (code) {
    case Errc::system:
      return "system";
    case Errc::invalid_argument:
      return "invalid_argument";
    case Errc::unsavable:
      return "unsavable";
    case Errc::cancelled:
      return "cancelled";
    case Errc::outside_directory:
      return "outside_directory";
    case Errc::directory_moved:
      return "directory_moved";
    case Errc::root_in_use:
      return "root_in_use";
    case Errc::range_past_end:
      return "range_past_end";
    case Errc::not_a_zip:
      return "not_a_zip";
    case Errc::zip_compressed:
      return "zip_compressed";
    case Errc::zip_inconsistent:
      return "zip_inconsistent";
    case Errc::record_missing:
      return "record_missing";
    case Errc::pickle_unknown:
      return "pickle_unknown";
    case Errc::tensor_mismatch:
      return "tensor_mismatch";
    case Errc::checksum_mismatch:
      return "checksum_mismatch";
    case Errc::table_inconsistent:
      return "table_inconsistent";
    case Errc::pickle_truncated:
      return "pickle_truncated";
    case Errc::pickle_opcode:
      return "pickle_opcode";
    case Errc::pickle_stack:
      return "pickle_stack";
    case Errc::pickle_forbidden:
      return "pickle_forbidden";
    case Errc::pickle_call:
      return "pickle_call";
    case Errc::pickle_state:
      return "pickle_state";
    case Errc::pickle_key:
      return "pickle_key";
    case Errc::pickle_shared:
      return "pickle_shared";
    case Errc::pickle_too_deep:
      return "pickle_too_deep";
    case Errc::pickle_too_large:
      return "pickle_too_large";
    case Errc::metadata_inconsistent:
      return "metadata_inconsistent";
    case Errc::wrong_base:
      return "wrong_base";
    case Errc::frame_damaged:
      return "frame_damaged";
    case Errc::store:
      return "store";
    case Errc::result_missing:
      return "result_missing";
    case Errc::internal:
      return "internal";
  }
  return "unknown";
}

std::string Error::message() const {
  std::string text = operation;
  if (!path.empty()) text += (text.empty() ? "" : " ") + path;
  if (offset != kNoOffset) text += " at byte " + std::to_string(offset);
  if (!detail.empty()) text += (text.empty() ? "" : ": ") + detail;
  if (sys_errno != 0) text += std::string(": ") + std::strerror(sys_errno);
  return subject.empty() ? text : subject + ": " + text;
}

Error system_error(int sys_errno, std::string_view operation, std::string_view path,
                   std::uint64_t offset) {
  return Error{Errc::system, sys_errno, operation, path, offset};
}

Error format_error(Errc code, std::string detail, std::uint64_t offset) {
  return Error{.code = code, .offset = offset, .detail = std::move(detail)};
}

Error exception_error(const std::exception_ptr& exception, std::string_view operation) noexcept {
  Error error;
  try {
    error.operation = operation;
    try {
      std::rethrow_exception(exception);
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& caught) {
      error.detail = caught.what();
    } catch (...) {
      error.detail = "an unknown exception";
    }
  } catch (...) {
    error.code = Errc::system;
    error.sys_errno = ENOMEM;
  }
  return error;
}

void throw_exception_from_error(const Error& error, const boost::source_location&) {
  throw Failure(error);
}

}  // namespace torch_ckpt
