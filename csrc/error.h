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

// One code per kind of failure, so that callers need not parse messages. docs/design.md lists the
// Python exception that the bindings raise for each code.
enum class Errc {
  // A system call failed; Error::sys_errno gives the reason.
  system,
  // Options contradict each other or are out of range.
  invalid_argument,
  // The states of ranks contradict each other, or a format cannot hold a value.
  unsavable,
  // Another part of the same save failed first, so this part stopped.
  cancelled,
  // A file name or a link leads out of the checkpoint's directory.
  outside_directory,
  // The path of the checkpoint no longer refers to the directory that was opened.
  directory_moved,
  // Another run holds the lease on the root, or has taken it over.
  root_in_use,
  // A range in the metadata extends past the end of the data file.
  range_past_end,
  // The record is not a torch.save archive of one plain tensor.
  not_a_zip,
  zip_compressed,
  zip_inconsistent,
  record_missing,
  pickle_unknown,
  // The tensor in the record differs from its description in the metadata.
  tensor_mismatch,
  // The bytes do not match the stored checksum.
  checksum_mismatch,
  // The checksum table is intact, but this version cannot read it.
  table_inconsistent,
  // The metadata pickle is refused because
  // - it ends before STOP or within an opcode,
  pickle_truncated,
  // - it has an opcode that metadata does not need,
  pickle_opcode,
  // - an operand is missing from the stack or has the wrong type,
  pickle_stack,
  // - it refers to a name that is not allow-listed,
  pickle_forbidden,
  // - it calls something other than a function, or passes unsupported arguments,
  pickle_call,
  // - it sets the state of an object that accepts none, or a state of an unsupported form,
  pickle_state,
  // - a dict has a key of a type that metadata does not use,
  pickle_key,
  // - it changes a value to which other values may already refer,
  pickle_shared,
  // - its values are nested too deeply, or
  pickle_too_deep,
  // - it exceeds another limit.
  pickle_too_large,
  // The metadata can be decoded, but contradicts itself.
  metadata_inconsistent,
  // A delta was applied to tensors other than its base.
  wrong_base,
  // A message from another process is truncated or damaged.
  frame_damaged,
  // A store has refused or failed a request.
  store,
  // A process ended, or ran out of memory, before it sent its result.
  result_missing,
  // A bug in this library.
  internal,
};

std::string_view name(Errc code);

// Text of an error. Copies share the characters, so copying an error allocates no memory.
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

/// Describes a failure: the operation, file, offset and reason. The core returns errors; it never
/// throws them.
struct Error {
  Errc code = Errc::internal;
  int sys_errno = 0;
  Text operation = {};  // system call or step that failed
  Text path = {};
  std::uint64_t offset = kNoOffset;
  Text detail = {};   // explains the failure in one clause; empty if errno suffices
  Text subject = {};  // name of the affected item; may be empty

  static constexpr std::uint64_t kNoOffset = ~std::uint64_t{0};

  /// "weight: pwrite /ckpt/__0_1.distcp at byte 8388608: No space left on device"
  std::string message() const;
};

Error system_error(int sys_errno, std::string_view operation, std::string_view path,
                   std::uint64_t offset = Error::kNoOffset);
Error format_error(Errc code, std::string detail, std::uint64_t offset = Error::kNoOffset);

/// Converts an exception to an error of `operation`. Returns ENOMEM if memory for the text cannot
/// be allocated.
Error exception_error(const std::exception_ptr& exception, std::string_view operation) noexcept;

/// A value or an Error. The compiler refuses code that drops a result, because an error would be
/// lost. Write `std::ignore = f();` with the reason if the error does not matter.
template <class T = void>
class [[nodiscard]] Result : public boost::system::result<T, Error> {
 public:
  using boost::system::result<T, Error>::result;
};

/// Evaluates an expression of type Result. If it is an error, returns the error from the function.
#define TC_TRY(...) \
  if (auto tried = (__VA_ARGS__); !tried) return std::move(tried).error()

/// An Error as an exception, for code that also handles ATen's exceptions: csrc/torch and
/// csrc/python call value() on results, and csrc/python converts Failures to Python exceptions.
class Failure : public std::logic_error {
 public:
  explicit Failure(Error error) : std::logic_error(error.message()), error_(std::move(error)) {}

  const Error& error() const { return error_; }

 private:
  Error error_;
};

// Throws a Failure. Called by boost::system::result::value().
[[noreturn]] void throw_exception_from_error(const Error& error, const boost::source_location&);

}  // namespace torch_ckpt
