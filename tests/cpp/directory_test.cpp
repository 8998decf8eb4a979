#include "os/directory.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::os {
namespace {

using test::CallCounter;
using test::is_system_error;
using test::NthCallFails;
using test::ok;
using test::read_file;
using test::TempDir;
using test::write_file;

using Log = std::vector<std::string>;

TEST(MakeDirectories, MakesEveryMissingAncestor) {
  TempDir directory;
  ASSERT_TRUE(ok(make_directories(directory.file("a/b/c"), true)));
  EXPECT_TRUE(std::filesystem::is_directory(directory.file("a/b/c")));
}

TEST(MakeDirectories, SyncsEachNewEntryIntoItsParentInThatOrder) {
  TempDir directory;
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    ASSERT_TRUE(ok(make_directories(directory.file("a/b"), true)));
  }
  EXPECT_EQ(counter.log(),
            (Log{"mkdir " + directory.file("a"), "fsync_directory " + directory.path(),
                 "mkdir " + directory.file("a/b"), "fsync_directory " + directory.file("a")}));
}

TEST(MakeDirectories, SyncsNothingWhereThatIsNotWanted) {
  TempDir directory;
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    ASSERT_TRUE(ok(make_directories(directory.file("a/b"), false)));
  }
  EXPECT_EQ(counter.calls("fsync_directory"), 0);
}

TEST(MakeDirectories, LeavesWhatIsThereAlone) {
  TempDir directory;
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    EXPECT_TRUE(ok(make_directories(directory.path(), true)));
    EXPECT_TRUE(ok(make_directories(directory.path() + "///", true)));
    EXPECT_TRUE(ok(make_directories("/", true)));
    EXPECT_TRUE(ok(make_directories(".", true)));
    EXPECT_TRUE(ok(make_directories("", true)));
  }
  EXPECT_EQ(counter.log(), Log{});
}

TEST(MakeDirectories, IsRelativeToTheWorkingDirectory) {
  TempDir directory;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(directory.path());
  const auto made = make_directories("a/b/", true);
  std::filesystem::current_path(before);
  EXPECT_TRUE(ok(made));
  EXPECT_TRUE(std::filesystem::is_directory(directory.file("a/b")));
}

TEST(MakeDirectories, DoesNotMindThatAnotherRankIsFaster) {
  TempDir directory;
  const std::string path = directory.file("a");
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "mkdir") std::filesystem::create_directory(path);
    return 0;
  });
  EXPECT_TRUE(ok(make_directories(path, true)));
}

TEST(MakeDirectories, WillNotReplaceAFile) {
  TempDir directory;
  write_file(directory.file("a"), "kept");
  const auto made = make_directories(directory.file("a"), true);
  ASSERT_FALSE(made.has_value());
  EXPECT_TRUE(is_system_error(made.error(), EEXIST, "mkdir", directory.file("a")));
  const auto below = make_directories(directory.file("a/b"), true);
  ASSERT_FALSE(below.has_value());
  EXPECT_EQ(read_file(directory.file("a")), "kept");
}

TEST(MakeDirectories, AFailedSyncOfTheParentIsAFailure) {
  TempDir directory;
  ScopedFaultHook hook(NthCallFails("fsync_directory", 1, EIO));
  const auto made = make_directories(directory.file("a"), true);
  ASSERT_FALSE(made.has_value());
  EXPECT_TRUE(is_system_error(made.error(), EIO, "fsync_directory", directory.path()));
}

TEST(SyncDirectory, OfWhatIsNotADirectoryFails) {
  TempDir directory;
  write_file(directory.file("a"), "");
  const auto file = sync_directory(directory.file("a"));
  ASSERT_FALSE(file.has_value());
  EXPECT_TRUE(is_system_error(file.error(), ENOTDIR, "open", directory.file("a")));
  const auto missing = sync_directory(directory.file("b"));
  ASSERT_FALSE(missing.has_value());
  EXPECT_TRUE(is_system_error(missing.error(), ENOENT, "open", directory.file("b")));
}

TEST(SyncDirectory, OfADirectorySucceeds) {
  TempDir directory;
  EXPECT_TRUE(ok(sync_directory(directory.path())));
}

TEST(RenameFile, ReplacesTheTarget) {
  TempDir directory;
  write_file(directory.file("from"), "new");
  write_file(directory.file("to"), "old");
  EXPECT_TRUE(ok(rename_file(directory.file("from"), directory.file("to"))));
  EXPECT_EQ(directory.names(), Log{"to"});
  EXPECT_EQ(read_file(directory.file("to")), "new");
}

TEST(RenameFile, OfAMissingFileFailsAndKeepsTheTarget) {
  TempDir directory;
  write_file(directory.file("to"), "old");
  const auto renamed = rename_file(directory.file("from"), directory.file("to"));
  ASSERT_FALSE(renamed.has_value());
  EXPECT_TRUE(is_system_error(renamed.error(), ENOENT, "rename", directory.file("to")));
  EXPECT_EQ(read_file(directory.file("to")), "old");
}

TEST(RemoveFile, OfAMissingFileIsNoError) {
  TempDir directory;
  EXPECT_TRUE(ok(remove_file(directory.file("a"))));
}

TEST(RemoveFile, RemovesALinkAndNotItsTarget) {
  TempDir directory;
  write_file(directory.file("target"), "kept");
  std::filesystem::create_symlink(directory.file("target"), directory.file("link"));
  EXPECT_TRUE(ok(remove_file(directory.file("link"))));
  EXPECT_EQ(directory.names(), Log{"target"});
}

TEST(RemoveFile, OfADirectoryFails) {
  TempDir directory;
  ASSERT_TRUE(ok(make_directories(directory.file("a"), false)));
  const auto removed = remove_file(directory.file("a"));
  ASSERT_FALSE(removed.has_value());
  EXPECT_TRUE(is_system_error(removed.error(), EISDIR, "unlink", directory.file("a")));
}

}  // namespace
}  // namespace torch_ckpt::os
