#include "os/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <barrier>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <thread>

#include "os/fault.h"
#include "os/pages.h"
#include "support.h"

namespace torch_ckpt::os {
namespace {

using namespace test;

// Sets a soft limit of the file size and ignores the signal of exceeding it.
class ScopedFileSizeLimit {
 public:
  explicit ScopedFileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
  }
  ~ScopedFileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  ScopedFileSizeLimit(const ScopedFileSizeLimit&) = delete;
  ScopedFileSizeLimit& operator=(const ScopedFileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

class FileModes : public ::testing::TestWithParam<IoMode> {
 protected:
  TempDir directory_;
  const std::string path_ = directory_.file("a");
};

TEST_P(FileModes, WritesBlocksAtTheirOffsets) {
  auto pages = Pages::allocate(8192);
  ASSERT_TRUE(ok(pages));
  std::fill(pages->bytes().begin(), pages->bytes().end(), std::byte{'x'});
  auto file = File::create(path_, GetParam());
  ASSERT_TRUE(ok(file));
  EXPECT_TRUE(ok(file->write_at(pages->bytes(), 8192)));
  EXPECT_TRUE(ok(file->write_at(pages->bytes().first(4096), 0)));
  EXPECT_TRUE(ok(file->sync()));
  EXPECT_TRUE(ok(std::move(*file).close()));
  EXPECT_EQ(read_file(path_),
            std::string(4096, 'x') + std::string(4096, '\0') + std::string(8192, 'x'));
}

TEST_P(FileModes, WritesUnalignedData) {
  Random random(1);
  const std::string contents = random.bytes(10'001);
  auto file = File::create(path_, GetParam());
  ASSERT_TRUE(ok(file));
  EXPECT_TRUE(ok(file->write_at(bytes_of(contents).subspan(1), 1)));
  EXPECT_TRUE(ok(file->write_at(bytes_of(contents).first(1), 0)));
  EXPECT_TRUE(ok(std::move(*file).close()));
  EXPECT_EQ(read_file(path_), contents);
}

TEST_P(FileModes, AFailedWriteReportsTheOffsetThatItReached) {
  auto pages = Pages::allocate(32768);
  ASSERT_TRUE(ok(pages));
  auto file = File::create(path_, GetParam());
  ASSERT_TRUE(ok(file));
  for (const std::uint64_t size : {16384, 16384 + 512, 16384 + 100}) {
    Result<> written;
    {
      ScopedFileSizeLimit limit(size);
      written = file->write_at(pages->bytes(), 4096);
    }
    ASSERT_FALSE(written.has_value());
    EXPECT_TRUE(is_system_error(written.error(), EFBIG, "pwrite", path_));
    EXPECT_EQ(written.error().offset, size);
  }
}

TEST_P(FileModes, ReadsExactlyTheRange) {
  Random random(2);
  const std::string contents = random.bytes(20'000);
  write_file(path_, contents);
  const auto file = test::open_for_read(path_, GetParam());
  ASSERT_TRUE(ok(file));
  auto pages = Pages::allocate(8192);
  ASSERT_TRUE(ok(pages));
  ASSERT_TRUE(ok(file->read_at(pages->bytes(), 4096)));
  EXPECT_EQ(text_of(pages->bytes()), contents.substr(4096, 8192));
}

TEST_P(FileModes, ReadingStopsAtTheEndOfTheFile) {
  write_file(path_, std::string(5000, 'x'));
  const auto file = test::open_for_read(path_, GetParam());
  ASSERT_TRUE(ok(file));
  auto pages = Pages::allocate(8192);
  ASSERT_TRUE(ok(pages));
  const auto some = file->read_some_at(pages->bytes(), 0);
  ASSERT_TRUE(ok(some));
  EXPECT_EQ(*some, 5000);
  const auto none = file->read_some_at(pages->bytes(), 8192);
  ASSERT_TRUE(ok(none));
  EXPECT_EQ(*none, 0);
}

TEST_P(FileModes, AReadPastTheEndReportsTheEndOfTheFile) {
  write_file(path_, std::string(5000, 'x'));
  const auto file = test::open_for_read(path_, GetParam());
  ASSERT_TRUE(ok(file));
  auto pages = Pages::allocate(8192);
  ASSERT_TRUE(ok(pages));
  const auto read = file->read_at(pages->bytes(), 0);
  ASSERT_TRUE(fails(read, Errc::range_past_end));
  EXPECT_EQ(read.error().operation, "pread");
  EXPECT_EQ(read.error().path, path_);
  EXPECT_EQ(read.error().offset, 5000);
}

TEST_P(FileModes, CreatingAnExistingFileFailsAndKeepsIt) {
  write_file(path_, "old");
  const auto file = File::create(path_, GetParam());
  ASSERT_FALSE(file.has_value());
  EXPECT_TRUE(is_system_error(file.error(), EEXIST, "open", path_));
  EXPECT_EQ(read_file(path_), "old");
}

TEST_P(FileModes, CreatingNeverFollowsALink) {
  const std::string victim = directory_.file("victim");
  std::filesystem::create_symlink(victim, path_);
  const auto file = File::create(path_, GetParam());
  ASSERT_FALSE(file.has_value());
  EXPECT_TRUE(is_system_error(file.error(), EEXIST, "open", path_));
  EXPECT_FALSE(std::filesystem::exists(victim));
}

INSTANTIATE_TEST_SUITE_P(AllModes, FileModes, ::testing::Values(IoMode::buffered, IoMode::direct),
                         [](const auto& mode) {
                           return mode.param == IoMode::direct ? "Direct" : "Buffered";
                         });

using FileTest = DirectoryTest;

TEST_F(FileTest, IsCreatedWithTheUsersUmask) {
  const mode_t before = ::umask(0027);
  const auto file = File::create(directory_.file("a"), IoMode::buffered);
  ::umask(before);
  ASSERT_TRUE(ok(file));
  struct stat status {};
  ASSERT_EQ(::stat(directory_.file("a").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0640);
}

TEST_F(FileTest, IsNotInheritedByStartedPrograms) {
  const int next_fd = ::dup(0);
  ::close(next_fd);
  {
    const auto file = File::create(directory_.file("a"), IoMode::buffered);
    ASSERT_TRUE(ok(file));
    EXPECT_EQ(::fcntl(next_fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  }
  const auto file = test::open_for_read(directory_.file("a"));
  ASSERT_TRUE(ok(file));
  EXPECT_EQ(::fcntl(next_fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST_F(FileTest, HasASize) {
  write_file(directory_.file("a"), "12345");
  const auto file = test::open_for_read(directory_.file("a"));
  ASSERT_TRUE(ok(file));
  const auto size = file->size();
  ASSERT_TRUE(ok(size));
  EXPECT_EQ(*size, 5);
}

TEST_F(FileTest, RefusesToReadDirectoriesPipesAndDevices) {
  const std::string pipe = directory_.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {directory_.path(), pipe, std::string("/dev/zero")}) {
    const auto file = test::open_for_read(path);
    ASSERT_TRUE(fails(file, Errc::invalid_argument));
    EXPECT_EQ(file.error().path, path);
  }
}

TEST_F(FileTest, IsCachedAfterABufferedWrite) {
  write_file(directory_.file("a"), std::string(50'000, 'x'));
  const auto file = test::open_for_read(directory_.file("a"));
  ASSERT_TRUE(ok(file));
  EXPECT_EQ(file->cached_fraction(0, 50'000), 1.0);
  EXPECT_EQ(file->cached_fraction(4097, 10), 1.0);
  EXPECT_EQ(file->cached_fraction(50'000, 0), 1.0);
}

TEST_F(FileTest, IsNotDirectAfterAnUnalignedWrite) {
  auto file = File::create(directory_.file("a"), IoMode::direct);
  ASSERT_TRUE(ok(file));
  if (!file->is_direct()) GTEST_SKIP() << "no direct I/O in " << directory_.path();
  ASSERT_TRUE(ok(file->write_at(bytes_of("1234"), 0)));
  EXPECT_FALSE(file->is_direct());
}

TEST_F(FileTest, HasTheBytesOfConcurrentDirectWritesThatAreRefused) {
  auto pages = os::Pages::allocate(2 * kDirectAlignment);
  ASSERT_TRUE(ok(pages));
  std::memset(pages->bytes().data(), 'x', 2 * kDirectAlignment);
  auto file = File::create(directory_.file("a"), IoMode::direct);
  ASSERT_TRUE(ok(file));
  if (!file->is_direct()) GTEST_SKIP() << "no direct I/O in " << directory_.path();
  std::barrier<> both(2);
  test::refusing_direct_writes = &both;
  const auto write = [&](std::uint64_t offset) {
    EXPECT_TRUE(ok(file->write_at(pages->bytes().subspan(offset, kDirectAlignment), offset)));
  };
  {
    const std::jthread other(write, kDirectAlignment);
    write(0);
  }
  test::refusing_direct_writes = nullptr;
  EXPECT_TRUE(read_file(directory_.file("a")) == std::string(2 * kDirectAlignment, 'x'));
}

TEST_F(FileTest, IsNotCachedAfterADirectWrite) {
  auto pages = Pages::allocate(65536);
  ASSERT_TRUE(ok(pages));
  auto file = File::create(directory_.file("a"), IoMode::direct);
  ASSERT_TRUE(ok(file));
  if (!file->is_direct()) GTEST_SKIP() << "no direct I/O in " << directory_.path();
  ASSERT_TRUE(ok(file->write_at(pages->bytes(), 0)));
  const auto read = test::open_for_read(directory_.file("a"));
  ASSERT_TRUE(ok(read));
  if (read->cached_fraction(0, 65536) == 1.0) GTEST_SKIP() << "a file system in memory";
  EXPECT_EQ(read->cached_fraction(0, 65536), 0.0);
  std::vector<std::byte> page(4096);
  ASSERT_TRUE(ok(read->read_at(page, 0)));
  EXPECT_GT(read->cached_fraction(0, 65536), 0.0);
}

TEST_F(FileTest, IsTruncated) {
  auto file = File::create(directory_.file("a"), IoMode::buffered);
  ASSERT_TRUE(ok(file));
  ASSERT_TRUE(ok(file->write_at(bytes_of("1234567890"), 0)));
  EXPECT_TRUE(ok(file->truncate(4)));
  EXPECT_EQ(read_file(directory_.file("a")), "1234");
}

TEST_F(FileTest, AFailedReservationIsReported) {
  auto file = File::create(directory_.file("a"), IoMode::buffered);
  ASSERT_TRUE(ok(file));
  ScopedFileSizeLimit limit(4096);
  const auto reserved = file->reserve(8192);
  ASSERT_FALSE(reserved.has_value());
  EXPECT_TRUE(is_system_error(reserved.error(), EFBIG, "fallocate", directory_.file("a")));
}

TEST_F(FileTest, ReservesZeroBytes) {
  auto file = File::create(directory_.file("a"), IoMode::buffered);
  ASSERT_TRUE(ok(file));
  EXPECT_TRUE(ok(file->reserve(0)));
}

TEST_F(FileTest, CanBeWrittenByManyThreadsAtOnce) {
  auto file = File::create(directory_.file("a"), IoMode::buffered);
  ASSERT_TRUE(ok(file));
  std::vector<std::thread> threads;
  for (char letter = 'a'; letter < 'i'; ++letter) {
    threads.emplace_back([&file, letter] {
      const std::string block(1000, letter);
      const auto offset = static_cast<std::uint64_t>(letter - 'a') * 1000;
      EXPECT_TRUE(ok(file->write_at(bytes_of(block), offset)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string expected;
  for (char letter = 'a'; letter < 'i'; ++letter) expected += std::string(1000, letter);
  EXPECT_EQ(read_file(directory_.file("a")), expected);
}

TEST_F(FileTest, MovesItsDescriptor) {
  auto first = File::create(directory_.file("a"), IoMode::buffered);
  auto second = File::create(directory_.file("b"), IoMode::buffered);
  ASSERT_TRUE(ok(first));
  ASSERT_TRUE(ok(second));
  *second = std::move(*first);
  EXPECT_EQ(second->path(), directory_.file("a"));
  EXPECT_TRUE(ok(second->write_at(bytes_of("hello"), 0)));
  File third(std::move(*second));
  EXPECT_TRUE(ok(std::move(third).close()));
  EXPECT_EQ(read_file(directory_.file("a")), "hello");
}

// An operation, and the offset that its error has.
struct Operation {
  std::string name;
  std::uint64_t offset;
  Result<> (*run)(File& written, const File& read);
};

class FileFaults : public ::testing::TestWithParam<Operation> {};

TEST_P(FileFaults, AreReportedWithErrnoAndPath) {
  TempDir directory;
  write_file(directory.file("read"), std::string(8192, 'x'));
  auto written = File::create(directory.file("written"), IoMode::buffered);
  const auto read = test::open_for_read(directory.file("read"));
  ASSERT_TRUE(ok(written));
  ASSERT_TRUE(ok(read));
  NthCallFails fault(GetParam().name, 1, EIO);
  ScopedFaultHook hook(fault);
  const auto done = GetParam().run(*written, *read);
  ASSERT_FALSE(done.has_value());
  EXPECT_TRUE(is_system_error(done.error(), EIO, GetParam().name, fault.path()));
  EXPECT_EQ(done.error().offset, GetParam().offset);
}

INSTANTIATE_TEST_SUITE_P(
    Operations, FileFaults,
    ::testing::Values(
        Operation{"pwrite", 4096,
                  [](File& written, const File&) { return written.write_at(bytes_of("x"), 4096); }},
        Operation{"fallocate", Error::kNoOffset,
                  [](File& written, const File&) { return written.reserve(1); }},
        Operation{"ftruncate", 7, [](File& written, const File&) { return written.truncate(7); }},
        Operation{"fsync", Error::kNoOffset,
                  [](File& written, const File&) { return written.sync(); }},
        Operation{"close", Error::kNoOffset,
                  [](File& written, const File&) { return std::move(written).close(); }},
        Operation{"pread", 4096,
                  [](File&, const File& read) -> Result<> {
                    std::byte byte{};
                    return read.read_at({&byte, 1}, 4096);
                  }},
        Operation{"fstat", Error::kNoOffset,
                  [](File&, const File& read) -> Result<> {
                    const auto size = read.size();
                    if (!size) return size.error();
                    return {};
                  }},
        Operation{"open", Error::kNoOffset,
                  [](File&, const File& read) -> Result<> {
                    const auto again = test::open_for_read(read.path());
                    if (!again) return again.error();
                    return {};
                  }}),
    [](const auto& operation) { return operation.param.name; });

TEST(FileFaults, AFailedCloseHasReleasedTheDescriptor) {
  TempDir directory;
  const int next_fd = ::dup(0);
  ::close(next_fd);
  auto file = File::create(directory.file("a"), IoMode::buffered);
  ASSERT_TRUE(ok(file));
  ScopedFaultHook hook(NthCallFails("close", 1, EIO));
  ASSERT_FALSE(std::move(*file).close().has_value());
  EXPECT_EQ(::fcntl(next_fd, F_GETFD), -1);
}

TEST(FileIdentity, IsUnchangedByARename) {
  TempDir directory;
  auto file = File::create(directory.file("a"), IoMode::buffered);
  ASSERT_TRUE(ok(file));
  const auto before = file->identity();
  ASSERT_TRUE(ok(before));
  std::filesystem::rename(directory.file("a"), directory.file("b"));
  EXPECT_TRUE(*file->identity() == *before);
  EXPECT_TRUE(ok(test::open_directory(directory).remove("b", *before)));
  EXPECT_EQ(directory.names(), std::vector<std::string>{});
}

TEST(FileIdentity, DiffersForTheNextFileOfTheSameName) {
  TempDir directory;
  const std::string path = directory.file("a");
  const auto made_anew = [&] {
    std::filesystem::remove(path);
    return *File::create(path, IoMode::buffered)->identity();
  };
  // File systems reuse free inode numbers, and their clocks tick only every few milliseconds.
  const FileIdentity first = made_anew();
  while (made_anew() == first) {
  }
  write_file(path, "of another save");
  EXPECT_TRUE(ok(test::open_directory(directory).remove("a", first)));
  EXPECT_EQ(read_file(path), "of another save");
}

TEST(FileIdentity, RemovingAMissingFileByItsIdentitySucceeds) {
  TempDir directory;
  auto file = File::create(directory.file("a"), IoMode::buffered);
  ASSERT_TRUE(ok(file));
  std::filesystem::remove(directory.file("a"));
  EXPECT_TRUE(ok(test::open_directory(directory).remove("a", *file->identity())));
}

}  // namespace
}  // namespace torch_ckpt::os
