#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace torch_ckpt::os {

class AnyFunction;

/// Returns the address of a function, or nullptr if there is no function of this name.
using Lookup = std::function<void*(const char* name)>;

/// Returns a lookup in a library, or an empty function if the process has not loaded the library.
/// `name` is the file name of a shared library, such as "libz.so.1".
Lookup loaded_library(const std::string& name);

/// Functions of a library that other code loads and that this library does not link.
class FunctionTable {
 public:
  /// Looks up all functions. Returns the name of the first one that is missing although it is
  /// required, or nullptr.
  const char* load(const Lookup& lookup) const;

 private:
  friend class AnyFunction;

  std::vector<const AnyFunction*> functions_;
};

enum class Presence : std::uint8_t { required, optional };

class AnyFunction {
 public:
  AnyFunction(const AnyFunction&) = delete;
  AnyFunction& operator=(const AnyFunction&) = delete;

  const char* name() const { return name_; }
  /// True if the function was found.
  explicit operator bool() const { return address_ != nullptr; }

 protected:
  AnyFunction(FunctionTable& table, const char* name, Presence presence)
      : name_(name), presence_(presence) {
    table.functions_.push_back(this);
  }
  ~AnyFunction() = default;

  mutable void* address_ = nullptr;  // set by FunctionTable::load()

 private:
  friend class FunctionTable;

  const char* const name_;
  const Presence presence_;
};

/// A function of a table, as `inline const Function<int(double)> round(table, "round");`. May be
/// called after FunctionTable::load(), if it was found.
template <class Signature>
class Function;
template <class Result, class... Arguments>
class Function<Result(Arguments...)> final : public AnyFunction {
 public:
  explicit Function(FunctionTable& table, const char* name, Presence presence = Presence::required)
      : AnyFunction(table, name, presence) {}

  Result operator()(Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(address_)(arguments...);
  }
};

}  // namespace torch_ckpt::os
