// Saves of several ranks to the same files.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <numeric>
#include <optional>

#include "engine/save_layout.h"
#include "engine/save_session.h"
#include "fake_device.h"
#include "format/checksum_table.h"
#include "format/convert.h"
#include "format/crc32.h"
#include "format/part_sums.h"
#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using namespace test;
using Sizes = std::vector<std::uint64_t>;

/// A tensor in a shared file, divided among ranks along one dimension.
struct Sharded {
  Sizes sizes;
  std::size_t dim = 0;  // the divided dimension
  std::size_t item_bytes = 1;
  std::size_t file = 0;
  std::uint64_t begin = 0;
  std::string contents = {};  // row-major

  std::uint64_t bytes() const {
    return std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{item_bytes},
                           std::multiplies<>());
  }
};

/// Files, and the tensors in them, of which each of the ranks has one part.
class SharedFiles {
 public:
  SharedFiles(std::size_t ranks, std::vector<Sharded> tensors, Random& random)
      : ranks_(ranks), tensors_(std::move(tensors)) {
    for (Sharded& tensor : tensors_) {
      tensor.contents = random.bytes(tensor.bytes());
      files_.resize(std::max(files_.size(), tensor.file + 1));
      SharedFile& file = files_[tensor.file];
      file.name = "file-" + std::to_string(tensor.file);
      // An odd gap, so that parts begin anywhere in a block of the disk.
      tensor.begin = file.bytes + 16;
      file.bytes = tensor.begin + tensor.bytes();
    }
  }

  /// Lets the ranks share memory, to collect the parts of all tensors.
  void collect() {
    memory_.emplace(os::MemoryFile::create().value());
    planning::CollectiveRanges ranges;
    ranges.memory = memory_->address();
    for (const Sharded& tensor : tensors_) {
      const auto file = static_cast<std::uint32_t>(tensor.file);
      if (tensor.bytes() == 0) continue;
      ranges.ranges.push_back({file, tensor.begin, tensor.begin + tensor.bytes()});
    }
    for (std::size_t i = 0; i < files_.size(); ++i) {
      files_[i].collective = CollectiveBuffer::open(ranges).value();
      files_[i].number = static_cast<std::uint32_t>(i);
    }
  }

  /// Returns the jobs of a rank. Sources on a device are uploaded.
  SaveLayout of_rank(std::size_t rank, FakeDevice* device = nullptr) {
    std::vector<SavePart> parts;
    for (const Sharded& tensor : tensors_) {
      const std::uint64_t length = tensor.sizes[tensor.dim];
      Sizes offsets(tensor.sizes.size(), 0);
      Sizes lengths = tensor.sizes;
      offsets[tensor.dim] = length * rank / ranks_;
      lengths[tensor.dim] = length * (rank + 1) / ranks_ - offsets[tensor.dim];
      auto runs = planning::BoxRuns::of(tensor.sizes, offsets, lengths, tensor.item_bytes).value();
      std::string& packed = sources_.emplace_back();
      runs.for_each(0, runs.bytes(), [&](std::uint64_t at, std::uint64_t, std::uint64_t bytes) {
        packed += tensor.contents.substr(at, bytes);
      });
      SavePart& part = parts.emplace_back();
      part.source =
          device != nullptr && !packed.empty() ? device->upload(packed) : host_source(packed);
      part.source.item_bytes = tensor.item_bytes;
      part.file = tensor.file;
      part.place = {tensor.begin, std::move(runs), {}, tensor.item_bytes};
    }
    return lay_out_parts(std::move(parts), files_);
  }

  void expect_on_disk(const TempDir& directory) const {
    for (std::size_t i = 0; i < files_.size(); ++i) {
      const std::string found = read_file(directory.file(files_[i].name));
      ASSERT_EQ(found.size(), files_[i].bytes);
      for (const Sharded& tensor : tensors_) {
        if (tensor.file != i) continue;
        EXPECT_EQ(found.substr(tensor.begin, tensor.bytes()), tensor.contents) << tensor.begin;
      }
    }
  }

  /// Expects that the results of all ranks join to the checksums of each tensor.
  void expect_checksums(const std::vector<std::vector<format::FileResult>>& results) const {
    for (std::size_t i = 0; i < files_.size(); ++i) {
      std::vector<format::PartSums> parts;
      for (const auto& of_rank : results) {
        for (const format::FileResult& file : of_rank) {
          if (file.name != files_[i].name) continue;
          const auto of_file = format::decode_part_sums(bytes_of(file.checksum_table)).value();
          parts.insert(parts.end(), of_file.begin(), of_file.end());
        }
      }
      std::vector<format::RecordSums> expected;
      for (const Sharded& tensor : tensors_) {
        if (tensor.file != i || tensor.bytes() == 0) continue;
        format::RecordSums& sums = expected.emplace_back();
        sums.offset = tensor.begin;
        sums.raw = true;
        sums.block_bytes = format::block_bytes_for(tensor.bytes());
        for (std::uint64_t at = 0; at < tensor.bytes(); at += sums.block_bytes) {
          sums.block_crcs.push_back(
              format::crc32(0, bytes_of(tensor.contents.substr(at, sums.block_bytes))));
        }
      }
      EXPECT_EQ(format::join_part_sums(parts).value(), expected);
    }
  }

  std::size_t ranks() const { return ranks_; }

 private:
  const std::size_t ranks_;
  std::vector<Sharded> tensors_;
  std::vector<SharedFile> files_;
  std::deque<std::string> sources_;
  std::optional<os::MemoryFile> memory_;
};

std::vector<Sharded> rows_and_columns() {
  return {
      {{64, 2000}, 0, 4},      // long runs
      {{600, 96}, 1, 2},       // short runs
      {{9}, 0, 8},             // small
      {{0, 7}, 1, 4},          // empty
      {{10, 3, 7000}, 1, 1},   // a middle dimension
      {{2, 150000}, 1, 2, 1},  // long runs in two rows, in another file
      {{100000}, 0, 1, 1},
  };
}

/// More than the collective buffer holds, in two files.
std::vector<Sharded> many_columns() {
  return {{{2000, 3000}, 1, 2}, {{40, 5, 60000}, 1, 2}, {{300, 10000}, 1, 4, 1}};
}

/// Long and short runs that are written by few calls.
std::vector<Sharded> few_runs() { return {{{2, 150000}, 0, 4}, {{6, 96}, 1, 2}, {{9}, 0, 8}}; }

std::shared_ptr<SaveSession> start(std::vector<FileJob> jobs, const TempDir& directory,
                                   const SaveOptions& options = {}) {
  return SaveSession::start(context(), open_directory(directory), std::move(jobs), options).value();
}

std::vector<std::shared_ptr<SaveSession>> start_all(SharedFiles& files, const TempDir& directory,
                                                    const SaveOptions& options = {}) {
  std::vector<std::shared_ptr<SaveSession>> sessions;
  for (std::size_t rank = 0; rank < files.ranks(); ++rank) {
    sessions.push_back(start(files.of_rank(rank).files, directory, options));
  }
  return sessions;
}

std::vector<format::FileResult> results_of(const std::shared_ptr<SaveSession>& session) {
  wait_for_end(*session);
  EXPECT_EQ(session->progress().bytes_written, session->progress().bytes_planned);
  return session->results().value();
}

std::vector<std::vector<format::FileResult>> results_of(
    const std::vector<std::shared_ptr<SaveSession>>& sessions) {
  std::vector<std::vector<format::FileResult>> results;
  for (const auto& session : sessions) results.push_back(results_of(session));
  return results;
}

class SharedSave : public ::testing::TestWithParam<DirectIo> {};
INSTANTIATE_TEST_SUITE_P(AllModes, SharedSave, all_direct_io(), direct_io_name);

TEST_P(SharedSave, WritesThePartsOfAllRanksToTheirPlaces) {
  Random random(1);
  for (const std::size_t chunk_bytes : {16 * std::size_t{4096}, kHostChunkBytes}) {
    for (const bool in_turn : {false, true}) {
      const TempDir directory;
      SharedFiles files(3, rows_and_columns(), random);
      std::vector<std::shared_ptr<SaveSession>> sessions;
      for (std::size_t rank = 0; rank < files.ranks(); ++rank) {
        SaveOptions options;
        options.chunk_bytes = chunk_bytes;
        options.direct_io = GetParam();
        options.snapshot = rank == 1;
        sessions.push_back(start(files.of_rank(rank).files, directory, options));
        if (in_turn) wait_for_end(*sessions.back());
      }
      const auto results = results_of(sessions);
      files.expect_on_disk(directory);
      files.expect_checksums(results);
    }
  }
}

TEST_P(SharedSave, CollectsThePartsOfRanksThatShareMemory) {
  Random random(6);
  for (const std::size_t files_at_once : {1, 2}) {
    for (const std::size_t chunk_bytes : {64 * std::size_t{4096}, kHostChunkBytes}) {
      const TempDir directory;
      SharedFiles files(3, many_columns(), random);
      files.collect();
      SaveOptions options;
      options.parallel_files = files_at_once;
      options.chunk_bytes = chunk_bytes;
      options.direct_io = GetParam();
      const auto results = results_of(start_all(files, directory, options));
      files.expect_on_disk(directory);
      files.expect_checksums(results);
    }
  }
}

TEST(CollectiveSave, WritesFewAndLargeBlocks) {
  Random random(7);
  const TempDir directory;
  SharedFiles files(2, {{{4000, 512}, 1, 2}}, random);
  files.collect();
  std::atomic<int> writes = 0;
  {
    const os::ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
      if (operation == "pwrite") ++writes;
      return 0;
    });
    results_of(start_all(files, directory));
  }
  files.expect_on_disk(directory);
  // One window, whose first and last blocks are incomplete.
  EXPECT_EQ(writes, 3);
}

// The first rank writes everything before the second one begins, so it waits in vain.
TEST(CollectiveSave, DependsOnNoOtherRank) {
  Random random(8);
  const TempDir directory;
  // Two windows more than there are blocks.
  SharedFiles files(2, {{{5000, 4000}, 1, 2}}, random);
  files.collect();
  std::vector<std::vector<format::FileResult>> results;
  for (std::size_t rank = 0; rank < files.ranks(); ++rank) {
    results.push_back(results_of(start(files.of_rank(rank).files, directory)));
  }
  files.expect_on_disk(directory);
  files.expect_checksums(results);
}

TEST(CollectiveSave, ContinuesWithoutARankThatFails) {
  Random random(9);
  const TempDir directory;
  SharedFiles files(2, {{{5000, 4000}, 1, 2}}, random);
  files.collect();
  SaveOptions options;
  options.max_bytes_per_second = 1;
  const auto failing = start(files.of_rank(0).files, directory, options);
  failing->cancel();
  wait_for_end(*failing);
  EXPECT_TRUE(ok(run_save(directory, files.of_rank(1).files, {})));
}

TEST(CollectiveSave, FailsAtEachCallThatFails) {
  Random random(10);
  for (const char* operation : {"open", "fallocate", "pwrite", "fsync", "close"}) {
    for (std::size_t n = 1;; ++n) {
      const TempDir directory;
      SharedFiles files(2, {{{400, 400}, 1, 2}}, random);
      files.collect();
      ASSERT_TRUE(ok(run_save(directory, files.of_rank(0).files, {})));
      const NthCallFails fault(operation, n, EIO);
      const os::ScopedFaultHook hook(fault);
      const auto done = run_save(directory, files.of_rank(1).files, {});
      if (!fault.hit()) {
        EXPECT_TRUE(ok(done));
        EXPECT_GT(n, 1) << operation;
        break;
      }
      ASSERT_FALSE(done) << operation << " " << n;
      EXPECT_TRUE(is_system_error(done.error(), EIO, operation, fault.path()));
    }
  }
}

TEST(SharedSaveOfADevice, WritesThePartsToTheirPlaces) {
  Random random(2);
  const TempDir directory;
  FakeDevice device;
  SharedFiles files(2, rows_and_columns(), random);
  std::vector<std::vector<format::FileResult>> results;
  for (std::size_t rank = 0; rank < files.ranks(); ++rank) {
    results.push_back(results_of(start(files.of_rank(rank, &device).files, directory)));
  }
  files.expect_on_disk(directory);
  files.expect_checksums(results);
}

TEST(SharedSave, ConvertsElements) {
  const auto* const single = format::find_dtype("float32");
  const auto* const half = format::find_dtype("bfloat16");
  std::vector<float> values(30000);
  std::iota(values.begin(), values.end(), 0.0F);
  const std::string source(reinterpret_cast<const char*>(values.data()), values.size() * 4);
  std::string expected(values.size() * 2, '\0');
  format::find_conversion(*single, *half)(reinterpret_cast<std::byte*>(expected.data()),
                                          bytes_of(source).data(), values.size());
  // The second rank has columns [70, 100) of 300 rows; its source is transposed.
  std::string transposed;
  for (std::size_t column = 70; column < 100; ++column) {
    for (std::size_t row = 0; row < 300; ++row) {
      transposed += source.substr((row * 100 + column) * 4, 4);
    }
  }
  std::string first;
  for (std::size_t row = 0; row < 300; ++row) first += source.substr(row * 400, 280);
  const auto part = [&](std::string_view bytes, std::uint64_t begin, std::uint64_t columns) {
    SavePart made;
    made.source = host_source(bytes);
    made.source.item_bytes = 4;
    made.place.runs =
        planning::BoxRuns::of(Sizes{300, 100}, Sizes{0, begin}, Sizes{300, columns}, 2).value();
    made.place.convert = format::find_conversion(*single, *half);
    made.place.item_bytes = 2;
    return made;
  };
  std::vector<SavePart> parts = {part(first, 0, 70), part(transposed, 70, 30)};
  parts[1].source.dims = {{300, 4}, {30, 1200}};
  const TempDir directory;
  const std::vector<SharedFile> files = {{"file", expected.size()}};
  for (SavePart& of_rank : parts) {
    SaveOptions options;
    options.chunk_bytes = std::size_t{4096};
    EXPECT_TRUE(ok(run_save(directory, lay_out_parts({std::move(of_rank)}, files).files, options)));
  }
  EXPECT_EQ(read_file(directory.file("file")), expected);
}

TEST(SharedSave, LeavesTheFileToTheCoordinatorAfterAFailure) {
  Random random(3);
  const TempDir directory;
  SharedFiles files(2, rows_and_columns(), random);
  ASSERT_TRUE(ok(run_save(directory, files.of_rank(0).files, {})));
  {
    const os::ScopedFaultHook hook(NthCallFails("pwrite", 3, EIO));
    EXPECT_TRUE(fails(run_save(directory, files.of_rank(1).files, {}), Errc::system));
  }
  EXPECT_EQ(directory.names(), (std::vector<std::string>{"file-0", "file-1"}));
}

TEST(SharedSave, FailsAtEachCallThatFails) {
  Random random(4);
  for (const char* operation : {"open", "fallocate", "pwrite", "fsync", "close"}) {
    for (std::size_t n = 1;; ++n) {
      const TempDir directory;
      SharedFiles files(2, few_runs(), random);
      const NthCallFails fault(operation, n, EIO);
      const os::ScopedFaultHook hook(fault);
      const auto done = run_save(directory, files.of_rank(1).files, {});
      if (!fault.hit()) {
        EXPECT_TRUE(ok(done));
        EXPECT_GT(n, 1) << operation;
        break;
      }
      ASSERT_FALSE(done) << operation << " " << n;
      EXPECT_TRUE(is_system_error(done.error(), EIO, operation, fault.path()));
    }
  }
}

TEST(SharedSave, FollowsNoLink) {
  Random random(5);
  const TempDir directory;
  const TempDir elsewhere;
  write_file(elsewhere.file("precious"), "precious");
  ASSERT_EQ(::symlink(elsewhere.file("precious").c_str(), directory.file("file-0").c_str()), 0);
  SharedFiles files(2, rows_and_columns(), random);
  EXPECT_TRUE(fails(run_save(directory, files.of_rank(0).files, {}), Errc::system));
  EXPECT_EQ(read_file(elsewhere.file("precious")), "precious");
}

}  // namespace
}  // namespace torch_ckpt::engine
