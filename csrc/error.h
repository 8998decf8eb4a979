#pragma once

#include <boost/system/result.hpp>
#include <cstdint>
#include <exception>
#include <memory>
#include <ostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace torch_ckpt {

// One code per kind of failure, so that callers need not parse the text. docs/design.md maps each
// to the Python exception that the bindings raise.
enum class Errc {
  // A system call failed with Error::sys_errno.
  system,
  // Options contradict each other or are out of range.
  invalid_argument,
  // Another part of the same save failed first; this part stopped.
  cancelled,
  // A file's name, or a link, leads out of the checkpoint's directory.
  outside_directory,
  // The path of the checkpoint's directory no longer leads to the opened directory.
  directory_moved,
  // A data file ends before the range that the metadata gives.
  range_past_end,
  // The bytes are not a torch.save archive of one plain tensor.
  not_a_zip,
  zip_compressed,
  zip_inconsistent,
  record_missing,
  pickle_unknown,
  // The record's tensor differs from the metadata.
  tensor_mismatch,
  // The bytes do not match the stored checksum.
  checksum_mismatch,
  // The checksum table is intact, but this version cannot read it.
  table_inconsistent,
  // The pickle of the metadata is refused:
  // it ends before STOP, or within an opcode;
  pickle_truncated,
  // it has an opcode that metadata does not need;
  pickle_opcode,
  // the stack lacks the operands of an opcode, or they have wrong types;
  pickle_stack,
  // it refers to a name that is not allow-listed;
  pickle_forbidden,
  // it calls a value that is not a function, or with unsupported arguments;
  pickle_call,
  // it sets the state of an object that accepts none, or a state of unsupported form;
  pickle_state,
  // a dict has a key that metadata does not use;
  pickle_key,
  // it changes a value to which other values may already refer;
  pickle_shared,
  // its values are nested too deeply;
  pickle_too_deep,
  // it exceeds a limit.
  pickle_too_large,
  // The pickle is valid metadata, but its content contradicts itself.
  metadata_inconsistent,
  // A message from another process is truncated or damaged.
  frame_damaged,
  // A process ended, or ran out of memory, before it sent its result.
  result_missing,
  // A bug in this library.
  internal,
};

std::string_view name(Errc code);

// Text of an error. Copies share the characters, so that copying an error needs no memory.
class Text {
 public:
  Text() = default;
  Text(std::string text) {
    if (!text.empty()) text_ = std::make_shared<const std::string>(std::move(text));
  }
  Text(std::string_view text) : Text(std::string(text)) {}
  Text(const char* text) : Text(std::string(text)) {}

  const std::string& str() const noexcept {
    static const std::string none;
    return text_ == nullptr ? none : *text_;
  }
  operator const std::string&() const noexcept { return str(); }
  Text& operator+=(std::string_view more) { return *this = *this + more; }
  bool empty() const noexcept { return text_ == nullptr; }
  friend bool operator==(const Text& text, std::string_view other) { return text.str() == other; }
  friend std::string operator+(const Text& text, std::string_view other) {
    return text.str() + std::string(other);
  }
  friend std::string operator+(std::string_view other, const Text& text) {
    return std::string(other) + text.str();
  }
  friend std::ostream& operator<<(std::ostream& stream, const Text& text) {
    return stream << text.str();
  }

 private:
  std::shared_ptr<const std::string> text_;
};

/// Describes a failure: the operation, the file, the offset and the system's reason. The core
/// returns errors and never throws them.
struct Error {
  Errc code = Errc::internal;
  int sys_errno = 0;
  Text operation = {};  // the system call or step that failed
  Text path = {};
  std::uint64_t offset = kNoOffset;
  Text detail = {};   // one clause for the reader; empty if errno is sufficient
  Text subject = {};  // the affected item; may be empty

  static constexpr std::uint64_t kNoOffset = ~std::uint64_t{0};

  /// "weight: pwrite /ckpt/__0_1.distcp at byte 8388608: No space left on device"
  std::string message() const;
};

Error system_error(int sys_errno, std::string_view operation, std::string_view path,
                   std::uint64_t offset = Error::kNoOffset);
Error format_error(Errc code, std::string detail, std::uint64_t offset = Error::kNoOffset);

/// Converts an exception to an error of `operation`; to ENOMEM if there is no memory for its text.
Error exception_error(const std::exception_ptr& exception, std::string_view operation) noexcept;

template <class T = void>
using Result = boost::system::result<T, Error>;

/// An Error as an exception, for code that also handles exceptions of ATen: csrc/torch and
/// csrc/python call value() on results, and csrc/python converts a Failure to a Python exception.
class Failure : public std::logic_error {
 public:
  explicit Failure(Error error) : std::logic_error(error.message()), error_(std::move(error)) {}

  const Error& error() const { return error_; }

 private:
  Error error_;
};

// Throws Failure. Called by boost::system::result::value().
[[noreturn]] void throw_exception_from_error(const Error& error, const boost::source_location&);

}  // namespace torch_ckpt
