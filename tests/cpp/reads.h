#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/load_session.h"
#include "format/checksum_table.h"
#include "format/tensor_pickle.h"
#include "support.h"

namespace torch_ckpt::test {

/// A read and its record. Reads sets the pointer between them when the read is added.
struct OwnedRead : engine::RegionRead {
  planning::StoredRecord stored;
};

// Writes data files, collects requests with memory for their results, and runs them.
class Reads {
 public:
  explicit Reads(const TempDir& directory) : directory_(directory) {}

  /// Adds a file of records, back to back; returns its number.
  std::size_t add_file(const std::vector<std::string>& records);
  std::size_t add_raw_file(std::string_view contents);
  /// Adds an existing file.
  void use_file(std::string_view name) { files_.push_back({std::string(name), {}}); }
  void set_table(std::size_t file, std::string table) {
    files_[file].checksum_table = std::move(table);
  }

  /// Adds a request of any kind for bytes [begin, begin + bytes) of the record or the payload.
  OwnedRead& add(engine::ReadKind kind, std::size_t file, std::uint64_t offset,
                 std::uint64_t length, const format::TensorHeader& header, std::uint64_t begin,
                 std::uint64_t bytes);
  /// Adds a request for an entire tensor of uint8, whose record fills the file.
  OwnedRead& add_whole(std::size_t file, std::string_view payload);
  /// Adds `count` files of one small tensor each, and a request for each.
  void add_small_files(std::size_t count);
  /// Adds a request with a target on the host: memory of `bytes` question marks, with
  /// target.address at `origin`.
  OwnedRead& add_to_host(OwnedRead request, std::size_t bytes, std::size_t origin = 0);
  /// Adds a request with its target.
  OwnedRead& add_as_it_is(OwnedRead request);

  /// All memory of a target on the host.
  std::string_view result(std::size_t request) const {
    return {targets_[request].memory.get(), targets_[request].bytes};
  }
  const std::string& name(std::size_t file) const { return files_[file].name; }
  std::string path(std::size_t file) const { return directory_.file(name(file)); }
  const OwnedRead& request(std::size_t number) const { return requests_[number]; }
  std::size_t count() const { return requests_.size(); }
  std::uint64_t bytes() const;

  std::shared_ptr<engine::LoadSession> start(const engine::LoadOptions& options = {}) const;
  /// Starts the requests in another folder with the same files.
  std::shared_ptr<engine::LoadSession> start_in(engine::Folder folder,
                                                const engine::LoadOptions& options) const;
  std::shared_ptr<engine::LoadSession> run(const engine::LoadOptions& options = {}) const;
  /// Runs the requests, which must succeed.
  void run_all(const engine::LoadOptions& options = {}) const;

 private:
  struct Memory {
    std::unique_ptr<char[]> memory;
    std::size_t bytes = 0;
  };

  const TempDir& directory_;
  std::vector<engine::LoadFile> files_;
  std::deque<OwnedRead> requests_;  // named by their numbers
  std::vector<Memory> targets_;
};

// Fixture with reads in a new directory.
class ReadsTest : public DirectoryTest {
 protected:
  Reads reads_{directory_};
};

template <class Parameter>
class ReadsTestWith : public ReadsTest, public ::testing::WithParamInterface<Parameter> {};

/// True if the load has failed with `code`, because of `request`.
::testing::AssertionResult failed(const engine::LoadSession& session, Errc code,
                                  std::size_t request);
::testing::AssertionResult failed(const engine::LoadSession& session, Errc code,
                                  std::string_view subject);

inline engine::LoadOptions load_options(engine::DirectIo mode) {
  engine::LoadOptions options;
  options.direct_io = mode;
  return options;
}

/// A record at `offset` of its file, and its entry in a checksum table.
struct Stored {
  format::TensorHeader header;
  std::string payload;
  std::string record;
  std::uint64_t payload_at = 0;  // in the record
  format::RecordSums sums;

  std::uint64_t offset() const { return sums.offset; }
  /// The record as the metadata describes it.
  planning::StoredRecord described() const;
  OwnedRead request(engine::ReadKind kind) const;
};

/// A tensor's record; `block_bytes` 0: blocks of the usual size.
Stored store(const format::TensorHeader& header, std::string payload, std::uint64_t offset = 0,
             std::uint64_t block_bytes = 0);
/// A record of raw bytes.
Stored store_raw(std::string bytes, std::uint64_t offset = 0, std::uint64_t block_bytes = 0);

/// Converts items of two bytes to items of four: the second half is the first, inverted.
void widen(std::byte* out, const std::byte* in, std::size_t count);
std::string widened(std::string_view items);

/// A record of one tensor that the decoder does not know: its pickle calls another function.
std::string unknown_record(std::string_view payload);

}  // namespace torch_ckpt::test
