#include "engine/store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <latch>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "engine/load_session.h"
#include "engine/safetensors_files.h"
#include "engine/save_session.h"
#include "engine/verify_session.h"
#include "format/safetensors.h"
#include "reads.h"
#include "save_files.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using namespace test;

constexpr std::size_t kMebi = std::size_t{1} << 20;

/// Keeps its files in a directory.
class DirectoryStore : public Store {
 public:
  explicit DirectoryStore(const TempDir& directory) : directory_(directory) {}

  std::string path() const override { return "store"; }

  Result<> write(const std::string& name, const FilePiece& piece,
                 std::unique_ptr<staging::Chunk>& chunk, const std::function<bool()>&) override {
    const std::lock_guard lock(mutex_);
    std::string& contents = files_[name];
    contents.resize(piece.file_bytes);
    offsets_[name].push_back(piece.offset);
    if (piece.bytes > 0) {
      std::memcpy(contents.data() + piece.offset, chunk->bytes().data(), piece.bytes);
    }
    if (piece.is_last()) write_file(directory_.file(name), contents);
    return {};
  }

  Result<std::uint64_t> size(const std::string& name) override {
    return read_file(directory_.file(name)).size();
  }

  Result<ReadBytes> read(const std::string& name, std::uint64_t offset,
                         std::size_t bytes) override {
    return copy_of(read_file(directory_.file(name)).substr(offset, bytes));
  }

  const std::map<std::string, std::vector<std::uint64_t>>& offsets() const { return offsets_; }

 private:
  const TempDir& directory_;
  std::mutex mutex_;
  std::map<std::string, std::string> files_;
  std::map<std::string, std::vector<std::uint64_t>> offsets_;
};

Result<std::shared_ptr<SaveSession>> save_to(std::shared_ptr<Store> store, const Files& files,
                                             const SaveOptions& options) {
  return SaveSession::start(context(), Folder(std::move(store)), files.jobs(), options);
}

class StoreTest : public FilesTest {
 protected:
  SaveOptions in_small_pieces() const {
    SaveOptions options;
    options.chunk_bytes = 5 * kMebi + 3 * kPage;
    return options;
  }
};

TEST_F(StoreTest, AStoreReceivesTheBytesOfAllFiles) {
  Random random(1);
  add_assorted_files(files_, random, 8);
  files_.begin_file();
  files_.add_tensor(random.bytes(23 * kMebi + 17));
  const auto store = std::make_shared<DirectoryStore>(directory_);
  const auto session = save_to(store, files_, in_small_pieces()).value();
  wait_for_end(*session);
  ASSERT_TRUE(ok(session->results()));
  files_.expect_on_disk();
  for (std::size_t i = 0; i < files_.jobs().size(); ++i) files_.expect_result(*session, i);
}

TEST_F(StoreTest, ThePiecesOfAFileHaveTheSameSizeExceptTheLast) {
  Random random(2);
  files_.begin_file();
  files_.add_tensor(random.bytes(23 * kMebi + 17));
  const auto store = std::make_shared<DirectoryStore>(directory_);
  const SaveOptions options = in_small_pieces();
  const auto session = save_to(store, files_, options).value();
  wait_for_end(*session);
  std::vector<std::uint64_t> offsets = store->offsets().at(files_.jobs()[0].name);
  std::ranges::sort(offsets);
  for (std::size_t i = 0; i < offsets.size(); ++i) EXPECT_EQ(offsets[i], i * options.chunk_bytes);
  EXPECT_EQ(offsets.size(), 5U);
}

TEST_F(StoreTest, ABudgetBelowOnePartIsRefused) {
  files_.add_file(std::string(6 * kMebi, 'x'));
  SaveOptions options;
  options.max_host_bytes = 4 * kMebi;
  const auto session = save_to(std::make_shared<DirectoryStore>(directory_), files_, options);
  ASSERT_FALSE(session);
  EXPECT_EQ(session.error().code, Errc::invalid_argument);
}

TEST_F(StoreTest, FilesOfATerabyteHaveFewerThan10000Pieces) {
  constexpr std::uint64_t kTerabyte = 1'000'000'000'000;
  const std::uint64_t piece = piece_bytes_in_store(kTerabyte);
  EXPECT_LT((kTerabyte + piece - 1) / piece, 10'000U);
  EXPECT_EQ(piece_bytes_in_store(1), 16 * kMebi);
}

/// Fails the write of each second piece, and keeps the chunk of the piece.
class KeepsChunks final : public DirectoryStore {
 public:
  using DirectoryStore::DirectoryStore;

  Result<> write(const std::string&, const FilePiece&, std::unique_ptr<staging::Chunk>& chunk,
                 const std::function<bool()>&) override {
    const std::lock_guard lock(mutex_);
    kept_.push_back(std::move(chunk));
    return system_error(ECONNRESET, "write", "store/file");
  }
  ~KeepsChunks() override {
    for (auto& chunk : kept_) context().chunks.give_back(std::move(chunk));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<staging::Chunk>> kept_;
};

TEST_F(StoreTest, ASaveFailsWithTheErrorOfAStoreThatKeepsTheChunk) {
  files_.add_file(std::string(23 * kMebi, 'x'));
  files_.add_file(std::string(23 * kMebi, 'y'));
  const auto session =
      save_to(std::make_shared<KeepsChunks>(directory_), files_, in_small_pieces()).value();
  wait_for_end(*session);
  ASSERT_FALSE(session->outcome());
  EXPECT_EQ(session->outcome().error().sys_errno, ECONNRESET);
}

/// Does not answer until the save is cancelled.
class NeverAnswers final : public DirectoryStore {
 public:
  using DirectoryStore::DirectoryStore;

  Result<> write(const std::string&, const FilePiece&, std::unique_ptr<staging::Chunk>&,
                 const std::function<bool()>& is_cancelled) override {
    if (!has_begun_.try_wait()) has_begun_.count_down();
    while (!is_cancelled()) std::this_thread::yield();
    return system_error(EINTR, "write", "store/file");
  }
  void wait_until_begun() { has_begun_.wait(); }

 private:
  std::latch has_begun_{1};
};

TEST_F(StoreTest, ACancelledSaveDoesNotWaitForTheStore) {
  files_.add_file("hello");
  const auto store = std::make_shared<NeverAnswers>(directory_);
  const auto session = save_to(store, files_, {}).value();
  store->wait_until_begun();
  session->cancel();
  wait_for_end(*session);
  EXPECT_EQ(session->outcome().error().code, Errc::cancelled);
}

using StoreReads = ReadsTest;

TEST_F(StoreReads, TensorsAreReadFromAStore) {
  Random random(3);
  std::vector<std::string> expected;
  for (const std::size_t bytes : {std::size_t{100}, 40 * kMebi + 4321, std::size_t{0}}) {
    expected.push_back(random.bytes(bytes));
    reads_.add_file({byte_record(expected.back())});
    reads_.add_whole(expected.size() - 1, expected.back());
  }
  const auto store = std::make_shared<DirectoryStore>(directory_);
  const auto session = reads_.start_in(Folder(store), {});
  wait_for_end(*session);
  ASSERT_FALSE(session->failure().has_value());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(reads_.result(i) == expected[i]);
}

TEST_F(StoreReads, ALoadFromAStoreToTheHostTakesNoScratchMemory) {
  context().chunks.trim(0);
  const std::string expected = Random(3).bytes(20 * kMebi);
  reads_.add_file({byte_record(expected)});
  reads_.add_whole(0, expected);
  const auto session = reads_.start_in(Folder(std::make_shared<DirectoryStore>(directory_)), {});
  wait_for_end(*session);
  ASSERT_FALSE(session->failure().has_value());
  EXPECT_TRUE(reads_.result(0) == expected);
  EXPECT_EQ(context().chunks.idle_bytes(), 0U);
}

class FailsReads final : public DirectoryStore {
 public:
  using DirectoryStore::DirectoryStore;

  Result<ReadBytes> read(const std::string& name, std::uint64_t offset, std::size_t) override {
    ++reads_;
    return system_error(ETIMEDOUT, "read", path_of(name), offset);
  }
  int reads() const { return reads_; }

 private:
  std::atomic<int> reads_{0};
};

TEST_F(StoreReads, AFailedReadIsReportedWithPathAndOffset) {
  reads_.add_file({byte_record("hello")});
  reads_.add_whole(0, "hello");
  const auto session = reads_.start_in(Folder(std::make_shared<FailsReads>(directory_)), {});
  wait_for_end(*session);
  ASSERT_TRUE(session->failure().has_value());
  EXPECT_EQ(session->failure()->path.str(), "store/f0");
  EXPECT_EQ(session->failure()->sys_errno, ETIMEDOUT);
}

class StoreVerifications : public testing::Test {
 protected:
  std::shared_ptr<VerifySession> verify(std::shared_ptr<Store> store) {
    auto session = VerifySession::start(context(), Folder(std::move(store)), {{"a", {}}},
                                        {stored_.described()}, {});
    EXPECT_TRUE(ok(session));
    EXPECT_TRUE((*session)->wait_for(std::chrono::minutes(2)));
    return *session;
  }

  TempDir directory_;
  const Stored stored_ = store(row_major("uint8", {100 * kMebi}), Random(4).bytes(100 * kMebi));
};

TEST_F(StoreVerifications, DamageInAStoreIsFound) {
  std::string contents = stored_.record;
  contents[50 * kMebi] = static_cast<char>(contents[50 * kMebi] ^ 1);
  write_file(directory_.file("a"), contents);
  const auto session = verify(std::make_shared<DirectoryStore>(directory_));
  EXPECT_FALSE(session->failure().has_value());
  EXPECT_EQ(session->findings().size(), 1U);
}

TEST_F(StoreVerifications, AFailureOfTheStoreEndsTheVerification) {
  write_file(directory_.file("a"), stored_.record);
  const auto store = std::make_shared<FailsReads>(directory_);
  const auto session = verify(store);
  ASSERT_TRUE(session->failure().has_value());
  EXPECT_EQ(session->failure()->sys_errno, ETIMEDOUT);
  // A store has already repeated a request that fails.
  EXPECT_EQ(store->reads(), 1);
}

/// Counts the reads.
class CountsReads final : public DirectoryStore {
 public:
  using DirectoryStore::DirectoryStore;

  Result<std::uint64_t> size(const std::string& name) override {
    if (name == "torch_ckpt.checksums") return system_error(ENOENT, "open", path_of(name));
    return DirectoryStore::size(name);
  }
  Result<ReadBytes> read(const std::string& name, std::uint64_t offset,
                         std::size_t bytes) override {
    ++reads_;
    return DirectoryStore::read(name, offset, bytes);
  }
  int reads() const { return reads_; }

 private:
  std::atomic<int> reads_{0};
};

TEST(StoreHeaders, TheHeaderOfASafetensorsFileIsReadInOneRequest) {
  TempDir directory;
  std::vector<format::SafeTensor> tensors(1);
  tensors[0].name = "x";
  tensors[0].dtype = format::find_dtype("uint8");
  tensors[0].sizes = {kMebi};
  const std::string header = format::encode_safetensors_header(tensors, {}, 8).value();
  write_file(directory.file("a.safetensors"), header + std::string(kMebi, 'x'));
  const auto store = std::make_shared<CountsReads>(directory);
  const auto read = read_safetensors(Folder(store), "a.safetensors");
  ASSERT_TRUE(ok(read));
  EXPECT_TRUE(read->index.find("x").has_value());
  EXPECT_EQ(store->reads(), 1);
}

}  // namespace
}  // namespace torch_ckpt::engine
