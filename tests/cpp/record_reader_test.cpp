#include "engine/record_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>

#include "os/fault.h"
#include "staging/chunk_pool.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using namespace test;

class DataFileModes : public ::testing::TestWithParam<DirectIo> {};

TEST_P(DataFileModes, FetchesAnyRangeIntoAnyScratchMemory) {
  Random random(1);
  TempDir directory;
  const std::string contents = random.bytes(300'001);
  test::write_file(directory.file("a"), contents);
  const auto file = DataFile::open(open_directory(directory), "a", GetParam());
  ASSERT_TRUE(ok(file));
  EXPECT_EQ(file->bytes(), contents.size());
  for (int round = 0; round < 200; ++round) {
    auto scratch = staging::Chunk::allocate(4096 * random.between(1, 20));
    ASSERT_TRUE(ok(scratch));
    const std::uint64_t offset = random.between(0, contents.size());
    const std::uint64_t most = std::min(contents.size() - offset, (*scratch)->bytes().size());
    const std::uint64_t length = random.any_scale(most);
    const auto bytes = file->fetch((*scratch)->bytes(), offset, length, random.coin());
    ASSERT_TRUE(ok(bytes));
    ASSERT_EQ(text_of(bytes->bytes), std::string_view(contents).substr(offset, length))
        << "round " << round << ", offset " << offset;
  }
}

TEST_P(DataFileModes, ReportsTheEndOfTheFileWhenReadingBeyondIt) {
  TempDir directory;
  test::write_file(directory.file("a"), std::string(200'000, 'x'));
  const auto file = DataFile::open(open_directory(directory), "a", GetParam());
  ASSERT_TRUE(ok(file));
  auto scratch = staging::Chunk::allocate(256 << 10);
  ASSERT_TRUE(ok(scratch));
  for (const bool direct : {false, true}) {
    const auto read = file->fetch((*scratch)->bytes(), 100'000, 150'000, direct);
    ASSERT_TRUE(fails(read, Errc::range_past_end));
    EXPECT_EQ(read.error().path, directory.file("a"));
    EXPECT_EQ(read.error().offset, 200'000);
  }
}

TEST_P(DataFileModes, ReadsIntoMemoryOfAnyAlignment) {
  Random random(3);
  TempDir directory;
  const std::string contents = random.bytes(100'001);
  test::write_file(directory.file("a"), contents);
  const auto file = DataFile::open(open_directory(directory), "a", GetParam());
  ASSERT_TRUE(ok(file));
  std::string out(50'000, '?');
  ASSERT_TRUE(ok(file->read(std::as_writable_bytes(std::span(out)).subspan(1), 7)));
  EXPECT_TRUE(out == "?" + contents.substr(7, 49'999));
}

INSTANTIATE_TEST_SUITE_P(AllModes, DataFileModes, test::all_direct_io(), test::direct_io_name);

using DataFileTest = DirectoryTest;

TEST_F(DataFileTest, PrefersDirectReadsOnlyIfItWasOpenedForThem) {
  test::write_file(directory_.file("a"), std::string(1 << 20, 'x'));
  const auto buffered = DataFile::open(open_directory(directory_), "a", DirectIo::off);
  const auto direct = DataFile::open(open_directory(directory_), "a", DirectIo::on);
  ASSERT_TRUE(ok(buffered));
  ASSERT_TRUE(ok(direct));
  EXPECT_FALSE(buffered->prefers_direct_read(0, 1 << 20));
  EXPECT_TRUE(direct->prefers_direct_read(0, 1 << 20));
  EXPECT_TRUE(direct->prefers_direct_read(5, 1));
}

TEST_F(DataFileTest, PrefersBufferedReadsForSmallAndForCachedRanges) {
  test::write_file(directory_.file("a"), std::string(1 << 20, 'x'));
  const auto file = DataFile::open(open_directory(directory_), "a", DirectIo::automatic);
  ASSERT_TRUE(ok(file));
  EXPECT_FALSE(file->prefers_direct_read(0, 1000));
  std::string out(1 << 20, '?');
  ASSERT_TRUE(ok(file->read(std::as_writable_bytes(std::span(out)), 0)));
  EXPECT_FALSE(file->prefers_direct_read(0, 1 << 20));
}

TEST_F(DataFileTest, ReadsBufferedIfScratchMemoryIsTooSmallForFullBlocks) {
  const std::string contents = Random(4).bytes(20'000);
  test::write_file(directory_.file("a"), contents);
  const auto file = DataFile::open(open_directory(directory_), "a", DirectIo::on);
  ASSERT_TRUE(ok(file));
  auto scratch = staging::Chunk::allocate(4096);
  ASSERT_TRUE(ok(scratch));
  const auto bytes = file->fetch((*scratch)->bytes(), 1, 4096, true);
  ASSERT_TRUE(ok(bytes));
  EXPECT_EQ(text_of(bytes->bytes), std::string_view(contents).substr(1, 4096));
}

TEST_F(DataFileTest, ReportsAMissingFileAsASystemError) {
  const auto file = DataFile::open(open_directory(directory_), "a", DirectIo::automatic);
  ASSERT_FALSE(file.has_value());
  EXPECT_TRUE(test::is_system_error(file.error(), ENOENT, "open", directory_.file("a")));
}

TEST(RecordInFile, ReturnsAnyPartOfARecord) {
  Random random(2);
  TempDir directory;
  const std::string contents = random.bytes(30'000);
  test::write_file(directory.file("a"), contents);
  const auto file = DataFile::open(open_directory(directory), "a", DirectIo::off);
  ASSERT_TRUE(ok(file));
  for (const std::uint64_t bytes : {0, 1, 4096, 5000, 8192, 20'000}) {
    const std::uint64_t begin = random.between(0, contents.size() - bytes);
    RecordInFile record(*file, begin, bytes);
    ASSERT_EQ(record.size(), bytes);
    for (int round = 0; round < 300; ++round) {
      const std::uint64_t offset = random.between(0, bytes);
      const std::uint64_t length = random.any_scale(bytes - offset);
      const auto part = record.at(offset, length);
      ASSERT_TRUE(ok(part));
      ASSERT_EQ(text_of(*part), std::string_view(contents).substr(begin + offset, length))
          << offset << "+" << length << " of " << bytes;
    }
  }
}

TEST(RecordInFile, ReadsEachEndOnce) {
  TempDir directory;
  test::write_file(directory.file("a"), std::string(100'000, 'x'));
  const auto file = DataFile::open(open_directory(directory), "a", DirectIo::off);
  ASSERT_TRUE(ok(file));
  test::CallCounter counter;
  os::ScopedFaultHook hook(counter);
  RecordInFile record(*file, 0, 100'000);
  for (const std::uint64_t offset : {99'978, 99'950, 0, 30, 600, 99'900}) {
    ASSERT_TRUE(ok(record.at(offset, 20)));
  }
  EXPECT_EQ(counter.calls("pread"), 2);
}

// A store with one file, which counts the reads.
class CountingStore final : public Store {
 public:
  explicit CountingStore(std::string contents) : contents_(std::move(contents)) {}
  std::string path() const override { return "memory://folder"; }
  Result<> write(const std::string&, const FilePiece&, std::unique_ptr<staging::Chunk>&,
                 const std::function<bool()>&) override {
    return format_error(Errc::invalid_argument, "read-only");
  }
  Result<std::uint64_t> size(const std::string&) override { return contents_.size(); }
  Result<ReadBytes> read(const std::string&, std::uint64_t offset, std::size_t bytes) override {
    ++reads;
    return copy_of(std::string_view(contents_).substr(offset, bytes));
  }

  int reads = 0;

 private:
  std::string contents_;
};

TEST(RecordInFile, ReadsTheTailOfARecordInAStoreTogetherWithTheNextHead) {
  Random random(3);
  const std::uint64_t bytes = 100'000, records = 5;
  const std::string contents = random.bytes(records * bytes);
  const auto store = std::make_shared<CountingStore>(contents);
  const Folder folder(store);
  const auto file = DataFile::open(folder, "a", DirectIo::automatic);
  ASSERT_TRUE(ok(file));
  for (std::uint64_t number = 0; number < records; ++number) {
    RecordInFile record(*file, number * bytes, bytes);
    for (const std::uint64_t offset : {bytes - 20'000, std::uint64_t{0}, std::uint64_t{16'000}}) {
      const auto part = record.at(offset, 1000);
      ASSERT_TRUE(ok(part));
      EXPECT_EQ(text_of(*part), std::string_view(contents).substr(number * bytes + offset, 1000));
    }
  }
  EXPECT_EQ(store->reads, records + 1);
}

TEST(RecordInFile, RejectsPartsOutsideTheRecordButInsideTheFile) {
  TempDir directory;
  test::write_file(directory.file("a"), std::string(1000, 'x'));
  const auto file = DataFile::open(open_directory(directory), "a", DirectIo::off);
  ASSERT_TRUE(ok(file));
  RecordInFile record(*file, 100, 200);
  EXPECT_TRUE(fails(record.at(150, 51), Errc::zip_inconsistent));
  EXPECT_TRUE(fails(record.at(~std::uint64_t{0}, 2), Errc::zip_inconsistent));
}

TEST(RecordInMemory, RejectsPartsOutsideTheRecord) {
  RecordInMemory record(test::bytes_of("hello"));
  ASSERT_TRUE(ok(record.at(1, 4)));
  EXPECT_EQ(text_of(*record.at(1, 4)), "ello");
  EXPECT_TRUE(fails(record.at(1, 5), Errc::zip_inconsistent));
  EXPECT_TRUE(fails(record.at(~std::uint64_t{0}, 2), Errc::zip_inconsistent));
}

}  // namespace
}  // namespace torch_ckpt::engine
