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

// One code per defect, so that a caller can tell them apart without reading the text.
// docs/design.md maps each to the Python class that the edge raises.
enum class Errc {
  // The system refused an operation; Error::sys_errno says why.
  system,
  // Options that contradict each other or are out of range.
  invalid_argument,
  // Another part of the same save failed first; this part stopped.
  cancelled,
  // A file's name, or a link in its place, leads out of the checkpoint's directory.
  outside_directory,
  // The path of the checkpoint's directory leads elsewhere than when it was opened.
  directory_moved,
  // A data file ends before the range that the metadata promises.
  range_past_end,
  // The bytes are not a torch.save archive of one plain tensor.
  not_a_zip,
  zip_compressed,
  zip_inconsistent,
  record_missing,
  pickle_unknown,
  // A known record of a tensor other than the metadata says.
  tensor_mismatch,
  // The stored checksum and the bytes disagree.
  checksum_mismatch,
  // Intact, but not a checksum table that this version reads.
  table_inconsistent,
  // The pickle of the metadata is not a program that makes metadata. Each has a code of its own:
  // it ends before STOP, or within an opcode,
  pickle_truncated,
  // an opcode that metadata does not need,
  pickle_opcode,
  // values other than an opcode takes, or none,
  pickle_stack,
  // a name that is not on the list of what metadata may contain,
  pickle_forbidden,
  // a call of something that is not a function, or not with these arguments,
  pickle_call,
  // a state for what takes none, or not of this form,
  pickle_state,
  // a key that no dict of metadata has,
  pickle_key,
  // a change of what others may hold already,
  pickle_shared,
  // values within values without end,
  pickle_too_deep,
  // more than a limit allows.
  pickle_too_large,
  // The metadata is a program that makes metadata, and what it says cannot be.
  metadata_inconsistent,
  // A message from another process was cut short or changed on its way.
  frame_damaged,
  // A process ended, or had no memory, before it sent its result.
  result_missing,
  // Something that must not happen by construction; a bug here.
  internal,
};

std::string_view name(Errc code);

// Words of an error. Copies share them, so that an error can be told where there is no memory.
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

/// What failed, on which object, at which byte, and the system's reason. The core never throws it.
struct Error {
  Errc code = Errc::internal;
  int sys_errno = 0;
  Text operation = {};  // the system call, or the step that failed
  Text path = {};
  std::uint64_t offset = kNoOffset;
  Text detail = {};   // one clause for the reader; empty where errno says it all
  Text subject = {};  // the item that it happened to, where it is one

  static constexpr std::uint64_t kNoOffset = ~std::uint64_t{0};

  /// "weight: pwrite /ckpt/__0_1.distcp at byte 8388608: No space left on device"
  std::string message() const;
};

Error system_error(int sys_errno, std::string_view operation, std::string_view path,
                   std::uint64_t offset = Error::kNoOffset);
Error format_error(Errc code, std::string detail, std::uint64_t offset = Error::kNoOffset);

/// What an exception says, as an error of `operation`; ENOMEM where there is no memory to say it.
Error exception_error(const std::exception_ptr& exception, std::string_view operation) noexcept;

template <class T = void>
using Result = boost::system::result<T, Error>;

/// An Error where ATen throws as well: csrc/torch and csrc/python take results by value(), and
/// csrc/python turns it into Python's exception.
class Failure : public std::logic_error {
 public:
  explicit Failure(Error error) : std::logic_error(error.message()), error_(std::move(error)) {}

  const Error& error() const { return error_; }

 private:
  Error error_;
};

// What boost::system::result::value() calls; throws Failure.
[[noreturn]] void throw_exception_from_error(const Error& error, const boost::source_location&);

}  // namespace torch_ckpt
