#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/load_session.h"
#include "format/checksum_table.h"
#include "format/tensor_pickle.h"
#include "support.h"

namespace torch_ckpt::test {

// Writes data files, collects requests with room for what they read, and runs them.
class Reads {
 public:
  explicit Reads(const TempDir& directory) : directory_(directory) {}

  /// Adds a file of records one behind the other; returns its number.
  std::size_t add_file(const std::vector<std::string>& records);
  std::size_t add_raw_file(std::string_view contents);
  /// A file that is there already.
  void use_file(std::string_view name) { files_.push_back({std::string(name), {}}); }
  void set_table(std::size_t file, std::string table) {
    files_[file].checksum_table = std::move(table);
  }

  /// A request of any kind for bytes [begin, begin + bytes) of what `kind` reads.
  engine::ReadRequest& add(engine::ReadKind kind, std::size_t file, std::uint64_t offset,
                           std::uint64_t length, const format::TensorHeader& header,
                           std::uint64_t begin, std::uint64_t bytes);
  /// The whole of a tensor of uint8, whose record is all of the file.
  engine::ReadRequest& add_whole(std::size_t file, std::string_view payload);
  /// A request as it is, but for its target on the host: `bytes` question marks, of which
  /// target.address is the one at `origin`.
  engine::ReadRequest& add_to_host(engine::ReadRequest request, std::size_t bytes,
                                   std::size_t origin = 0);
  /// A request as it is, its target included.
  engine::ReadRequest& add_as_it_is(engine::ReadRequest request);

  /// All of the target's memory, where it is on the host.
  std::string_view result(std::size_t request) const {
    return {targets_[request].memory.get(), targets_[request].bytes};
  }
  const std::string& name(std::size_t file) const { return files_[file].name; }
  std::string path(std::size_t file) const { return directory_.file(name(file)); }
  const engine::ReadRequest& request(std::size_t number) const { return requests_[number]; }
  std::size_t count() const { return requests_.size(); }
  std::uint64_t bytes() const;

  std::shared_ptr<engine::LoadSession> start(const engine::LoadOptions& options = {}) const;
  std::shared_ptr<engine::LoadSession> run(const engine::LoadOptions& options = {}) const;
  /// Runs what must succeed.
  void run_all(const engine::LoadOptions& options = {}) const;

 private:
  struct Memory {
    std::unique_ptr<char[]> memory;
    std::size_t bytes = 0;
  };

  const TempDir& directory_;
  std::vector<engine::LoadFile> files_;
  std::vector<engine::ReadRequest> requests_;
  std::vector<Memory> targets_;
};

/// Whether the load has failed with `code`, and by `request`.
::testing::AssertionResult failed(const engine::LoadSession& session, Errc code,
                                  std::size_t request);

inline engine::LoadOptions load_options(engine::DirectIo mode) {
  engine::LoadOptions options;
  options.direct_io = mode;
  return options;
}

/// As stored at `offset` of its file, and what a checksum table says of it.
struct Stored {
  format::TensorHeader header;
  std::string payload;
  std::string record;
  std::uint64_t payload_at = 0;  // in the record
  format::RecordSums sums;

  std::uint64_t offset() const { return sums.offset; }
  engine::ReadRequest request(engine::ReadKind kind) const;
};

/// A tensor's record; blocks of the usual size where `block_bytes` is 0.
Stored store(const format::TensorHeader& header, std::string payload, std::uint64_t offset = 0,
             std::uint64_t block_bytes = 0);
/// Bytes as they are.
Stored store_raw(std::string bytes, std::uint64_t offset = 0, std::uint64_t block_bytes = 0);

/// A conversion from items of two bytes to items of four: the second half is the first, inverted.
void widen(std::byte* out, const std::byte* in, std::size_t count);
std::string widened(std::string_view items);

/// A record of one tensor that the decoder does not know: its pickle calls another function.
std::string unknown_record(std::string_view payload);

}  // namespace torch_ckpt::test
