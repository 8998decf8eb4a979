#include "os/directory.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

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
  ASSERT_TRUE(ok(make_directories(directory.file("a/b/c"))));
  EXPECT_TRUE(std::filesystem::is_directory(directory.file("a/b/c")));
}

TEST(MakeDirectories, LeavesWhatIsThereAlone) {
  TempDir directory;
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    EXPECT_TRUE(ok(make_directories(directory.path())));
    EXPECT_TRUE(ok(make_directories(directory.path() + "///")));
    EXPECT_TRUE(ok(make_directories("/")));
    EXPECT_TRUE(ok(make_directories(".")));
    EXPECT_TRUE(ok(make_directories("")));
  }
  EXPECT_EQ(counter.log(), Log{});
}

TEST(MakeDirectories, IsRelativeToTheWorkingDirectory) {
  TempDir directory;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(directory.path());
  const auto made = make_directories("a/b/");
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
  EXPECT_TRUE(ok(make_directories(path)));
}

TEST(MakeDirectories, WillNotReplaceAFile) {
  TempDir directory;
  write_file(directory.file("a"), "kept");
  const auto made = make_directories(directory.file("a"));
  ASSERT_FALSE(made.has_value());
  EXPECT_TRUE(is_system_error(made.error(), EEXIST, "mkdir", directory.file("a")));
  const auto below = make_directories(directory.file("a/b"));
  ASSERT_FALSE(below.has_value());
  EXPECT_EQ(read_file(directory.file("a")), "kept");
}

// The directories above, as seen from `below`, up to the root of its file system.
Log above(const std::string& below) {
  Log found;
  std::string at = below;
  struct stat here {};
  EXPECT_EQ(::stat(at.c_str(), &here), 0);
  for (;;) {
    at += "/..";
    struct stat status {};
    EXPECT_EQ(::stat(at.c_str(), &status), 0);
    if (status.st_dev != here.st_dev || status.st_ino == here.st_ino) return found;
    found.push_back("fsync_directory " + at);
    here = status;
  }
}

TEST(SyncAncestors, SyncsEachDirectoryAboveWhoeverMadeIt) {
  TempDir directory;
  ASSERT_TRUE(ok(make_directories(directory.file("a/b"))));
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    EXPECT_TRUE(ok(sync_ancestors(directory.file("a/b"))));
  }
  EXPECT_GE(counter.log().size(), 2);
  EXPECT_EQ(counter.log(), above(directory.file("a/b")));
}

TEST(SyncAncestors, OfTheRootAreNone) {
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    EXPECT_TRUE(ok(sync_ancestors("/")));
  }
  EXPECT_EQ(counter.log(), Log{});
}

TEST(SyncAncestors, AFailedSyncIsAFailure) {
  TempDir directory;
  ASSERT_TRUE(ok(make_directories(directory.file("a/b"))));
  const std::string grandparent = directory.file("a/b") + "/../..";
  ScopedFaultHook hook(
      [&](std::string_view, std::string_view path) { return path == grandparent ? EIO : 0; });
  const auto synced = sync_ancestors(directory.file("a/b"));
  ASSERT_FALSE(synced.has_value());
  EXPECT_TRUE(is_system_error(synced.error(), EIO, "fsync_directory", grandparent));
}

TEST(SyncAncestors, OneThatMayNotBeOpenedDoesNotKeepThoseAboveItFromBeingSynced) {
  TempDir directory;
  const std::string path = directory.file("a/b");
  ASSERT_TRUE(ok(make_directories(path)));
  for (const int refusal : {EACCES, EPERM}) {
    Log asked;
    {
      ScopedFaultHook hook([&](std::string_view operation, std::string_view at) {
        asked.push_back(std::string(operation) + " " + std::string(at));
        return at == path + "/.." ? refusal : 0;
      });
      EXPECT_TRUE(ok(sync_ancestors(path)));
    }
    EXPECT_EQ(asked, above(path));
  }
}

TEST(SyncAncestors, OfWhatIsNotThereFails) {
  TempDir directory;
  const auto synced = sync_ancestors(directory.file("a"));
  ASSERT_FALSE(synced.has_value());
  EXPECT_TRUE(is_system_error(synced.error(), ENOENT, "stat", directory.file("a")));
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

TEST(RenameFile, ThatMayNotReplaceLeavesTheTargetAndTheFile) {
  TempDir directory;
  write_file(directory.file("from"), "new");
  write_file(directory.file("to"), "old");
  const auto renamed = rename_file(directory.file("from"), directory.file("to"), false);
  ASSERT_FALSE(renamed.has_value());
  EXPECT_TRUE(is_system_error(renamed.error(), EEXIST, "rename", directory.file("to")));
  EXPECT_EQ(read_file(directory.file("from")), "new");
  EXPECT_EQ(read_file(directory.file("to")), "old");
}

TEST(RenameFile, ThatMayNotReplaceRenamesWhereTheNameIsFree) {
  TempDir directory;
  write_file(directory.file("from"), "new");
  EXPECT_TRUE(ok(rename_file(directory.file("from"), directory.file("to"), false)));
  EXPECT_EQ(directory.names(), Log{"to"});
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
  ASSERT_TRUE(ok(make_directories(directory.file("a"))));
  const auto removed = remove_file(directory.file("a"));
  ASSERT_FALSE(removed.has_value());
  EXPECT_TRUE(is_system_error(removed.error(), EISDIR, "unlink", directory.file("a")));
}

}  // namespace
}  // namespace torch_ckpt::os
