#include "engine/new_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string>

#include "os/fault.h"
#include "os/pages.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using namespace test;

constexpr std::uint64_t kBytes = (std::uint64_t{2} << 20) + 100;

class NewFileTest : public DirectoryTest {
 protected:
  Result<NewFile> create(DirectIo direct_io = DirectIo::automatic) {
    return NewFile::create(open_directory(directory_), "a", kBytes, direct_io);
  }
};

TEST_F(NewFileTest, HasTheBytesThatWereWritten) {
  for (const DirectIo direct_io : {DirectIo::automatic, DirectIo::off}) {
    auto pages = os::Pages::allocate(1 << 20);
    ASSERT_TRUE(ok(pages));
    auto file = create(direct_io);
    ASSERT_TRUE(ok(file));
    std::string expected;
    for (const char letter : {'a', 'b'}) {
      std::fill(pages->bytes().begin(), pages->bytes().end(), std::byte(letter));
      expected += std::string(1 << 20, letter);
      EXPECT_TRUE(ok(file->write(pages->bytes())));
    }
    EXPECT_TRUE(ok(file->write(pages->bytes().first(100))));
    EXPECT_TRUE(ok(std::move(*file).finish(true)));
    EXPECT_EQ(read_file(directory_.file("a")), expected + std::string(100, 'b'));
    std::filesystem::remove(directory_.file("a"));
  }
}

TEST_F(NewFileTest, DoesNotReplaceAFile) {
  write_file(directory_.file("a"), "old");
  const auto file = create();
  ASSERT_FALSE(file);
  EXPECT_TRUE(is_system_error(file.error(), EEXIST, "open", directory_.file("a")));
  EXPECT_EQ(read_file(directory_.file("a")), "old");
}

TEST_F(NewFileTest, ReportsThatItCannotBeFsynced) {
  auto file = create();
  ASSERT_TRUE(ok(file));
  const os::ScopedFaultHook hook(
      [](std::string_view operation, std::string_view) { return operation == "fsync" ? EIO : 0; });
  const auto finished = std::move(*file).finish(true);
  ASSERT_FALSE(finished);
  EXPECT_TRUE(is_system_error(finished.error(), EIO, "fsync", directory_.file("a")));
}

}  // namespace
}  // namespace torch_ckpt::engine
