#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/context.h"
#include "engine/load_session.h"
#include "engine/save_session.h"
#include "engine/store.h"
#include "error.h"
#include "format/checksum_table.h"
#include "format/tensor_pickle.h"
#include "os/directory.h"
#include "os/file.h"
#include "staging/source.h"

namespace torch_ckpt {

/// The context of the process. Tests share it and need not restore its state.
engine::Context& context();

// Prints values in GoogleTest's messages.
std::ostream& operator<<(std::ostream& out, Errc code);
namespace engine {
std::ostream& operator<<(std::ostream& out, DirectIo mode);
}

}  // namespace torch_ckpt

namespace torch_ckpt::test {

/// For EXPECT_TRUE(ok(result)), which prints the error.
template <class T>
::testing::AssertionResult ok(const Result<T>& result) {
  if (result.has_value()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << result.error().code << ": " << result.error().message();
}

/// For EXPECT_TRUE(fails(result, code)).
template <class T>
::testing::AssertionResult fails(const Result<T>& result, Errc code) {
  if (result.has_value()) return ::testing::AssertionFailure() << "succeeded";
  if (result.error().code == code) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << result.error().code << ": " << result.error().message();
}

/// For EXPECT_TRUE(): succeeds for a system error with this errno, operation and path.
::testing::AssertionResult is_system_error(const Error& error, int sys_errno,
                                           std::string_view operation, std::string_view path);

/// Errors of the next calls of flock in this thread; the last element fails the next call.
extern thread_local std::vector<int> flock_errors;
/// Number of calls of flock in this thread.
extern thread_local int flock_calls;

/// If true, every file system looks like a network file system in this thread.
extern thread_local bool is_network_file_system;

/// If true, open() with O_CREAT fails in this thread if the file exists, also without O_EXCL.
extern thread_local bool has_racing_host;

/// If set, every direct write is refused with EINVAL, once this number of threads have begun one.
extern std::atomic<std::barrier<>*> refusing_direct_writes;

/// An InterruptCheck for calls that nothing interrupts.
inline Result<> never_interrupted() { return {}; }

// A new directory under $TMPDIR or /tmp; the destructor removes it with its contents.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string file(std::string_view name) const { return path_ + "/" + std::string(name); }
  /// Relative names of all files and directories below, sorted.
  std::vector<std::string> names() const;

 private:
  std::string path_;
};

// Fixture with a new directory.
class DirectoryTest : public ::testing::Test {
 protected:
  TempDir directory_;
};

/// Opens the directory as a session does.
os::Directory open_directory(const TempDir& directory);

/// Opens a file in its directory, as a load does.
Result<os::File> open_for_read(const std::string& path, os::IoMode mode = os::IoMode::buffered);

std::string read_file(const std::string& path);
void write_file(const std::string& path, std::string_view contents);

std::span<const std::byte> bytes_of(std::string_view text);
std::string_view text_of(std::span<const std::byte> bytes);

/// Returns bytes that a store has read, in memory of their own.
inline engine::ReadBytes copy_of(std::string_view contents) {
  const auto copy = std::make_shared<const std::string>(contents);
  return {std::as_bytes(std::span(*copy)), copy};
}

// Deterministic random numbers. GoogleTest prints the seed with a failure.
class Random {
 public:
  explicit Random(std::uint64_t seed)
      : engine_(seed), trace_(__FILE__, __LINE__, "seed " + std::to_string(seed)) {}
  /// Uniform in [low, high].
  std::uint64_t between(std::uint64_t low, std::uint64_t high);
  /// In [0, high]; small values are as likely as large ones.
  std::uint64_t any_scale(std::uint64_t high);
  bool coin() { return between(0, 1) == 1; }
  std::string bytes(std::size_t count);
  /// For std::shuffle.
  std::mt19937_64& generator() { return engine_; }

 private:
  std::mt19937_64 engine_;
  ::testing::ScopedTrace trace_;
};

// A fault hook that fails the n-th call (from 1) of one operation and no other call.
// Safe for concurrent use by multiple threads; copies share their state.
class NthCallFails {
 public:
  NthCallFails(std::string operation, std::size_t n, int sys_errno);
  int operator()(std::string_view operation, std::string_view path) const;
  bool hit() const;
  /// The path of the call that failed.
  std::string path() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// A fault hook that fails no call and records all calls.
// Safe for concurrent use by multiple threads; copies share their state.
class CallCounter {
 public:
  CallCounter();
  int operator()(std::string_view operation, std::string_view path) const;
  std::size_t calls(std::string_view operation) const;
  std::vector<std::string> log() const;  // "operation path", in order

 private:
  struct State;
  std::shared_ptr<State> state_;
};

staging::Source host_source(std::string_view payload);

format::TensorHeader row_major(std::string_view dtype, std::vector<std::uint64_t> sizes);

/// The record that torch.save writes for a tensor, made by the encoder that torch_record_test.cpp
/// checks.
std::string record_of(const format::TensorHeader& header, std::string_view payload);
/// A record of a row of uint8.
std::string byte_record(std::string_view payload);

/// The expected checksum table entry of an item that is stored as `bytes`.
format::RecordSums sums_of(const engine::ImageItem& item, std::string_view bytes);

/// For INSTANTIATE_TEST_SUITE_P.
inline auto all_direct_io() {
  return ::testing::Values(engine::DirectIo::automatic, engine::DirectIo::on,
                           engine::DirectIo::off);
}
std::string direct_io_name(const ::testing::TestParamInfo<engine::DirectIo>& mode);

/// Runs a save to its end; `files` are in `directory`.
Result<> run_save(const TempDir& directory, std::vector<engine::FileJob> files,
                  const engine::SaveOptions& options);
/// Waits until a session has ended; fails the test if it does not end.
void wait_for_end(engine::SaveSession& session);
void wait_for_end(engine::LoadSession& session);

}  // namespace torch_ckpt::test
