#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "engine/save_session.h"
#include "format/result_frame.h"
#include "staging/source.h"
#include "support.h"

namespace torch_ckpt::test {

inline constexpr std::size_t kPage = 4096;

// Files to save, the payloads that they point to and their expected contents.
class Files {
 public:
  explicit Files(const TempDir& directory) : directory_(&directory) {}

  void begin_file();
  void add_bytes(std::string payload);
  void add_tensor(std::string payload);
  /// Adds a tensor with the payload `bytes`, which `source` points to.
  void add_tensor_at(const staging::Source& source, std::string_view payload);
  /// Adds a tensor of `rows` times `columns` bytes that is stored column by column.
  void add_transposed(std::string storage, std::size_t rows, std::size_t columns);
  /// Adds a file with one item of bytes.
  void add_file(std::string contents);

  const std::vector<engine::FileJob>& jobs() const { return jobs_; }
  std::uint64_t bytes() const;
  /// The number of chunks that the files fill.
  std::size_t chunks(std::size_t chunk_bytes) const;
  /// The expected result of a file.
  format::FileResult result(std::size_t file) const;
  void expect_result(const engine::SaveSession& session, std::size_t file) const;

  /// Overwrites the payloads in host memory and frees them.
  void destroy_sources();

  void expect_on_disk() const { expect_in(*directory_); }
  /// Expects the files with these names in another directory.
  void expect_in(const TempDir& directory) const;

 private:
  const TempDir* directory_;
  std::deque<std::string> payloads_;
  std::vector<engine::FileJob> jobs_;
  std::vector<std::string> expected_;
  std::vector<std::vector<std::uint32_t>> checksums_;
};

/// Starts a save of the files.
std::shared_ptr<engine::SaveSession> start(const TempDir& directory, const Files& files,
                                           const engine::SaveOptions& options);

// Fixture with files in a new directory.
class FilesTest : public DirectoryTest {
 protected:
  // A refill of the chunk pool after a save must not disturb the next test.
  ~FilesTest() override { context().executor.join(); }

  Files files_{directory_};
};

// Items of all kinds, of sizes around those of blocks and chunks.
void add_assorted_files(Files& files, Random& random, std::size_t count);

// An operation that fails.
struct Fault {
  std::string operation;
  int sys_errno;
};

// For GoogleTest's messages.
inline void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.operation; }

// Saves in which system calls fail.
class SaveFaults : public ::testing::TestWithParam<Fault> {
 public:
  static std::string name(const ::testing::TestParamInfo<Fault>& fault) {
    return fault.param.operation;
  }

 protected:
  /// Adds files that are small enough to fail each system call in turn.
  static void add_files(Files& files);
  /// Fails the first call of the operation in a first save, the second in a second save, and so
  /// on, until a save makes fewer calls. Each failed save must report its call and leave no file.
  static void fail_each_call(
      const std::function<Result<>(const TempDir& directory, const Files& files)>& save);
};

}  // namespace torch_ckpt::test
