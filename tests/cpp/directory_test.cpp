#include "os/directory.h"

#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>
#include <vector>

#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::os {
namespace {

using namespace test;

using Log = std::vector<std::string>;

Directory opened(const std::string& path) {
  auto directory = Directory::open(path);
  EXPECT_TRUE(ok(directory));
  return std::move(*directory);
}

using MakeDirectoriesTest = DirectoryTest;

TEST_F(MakeDirectoriesTest, MakesEveryMissingAncestor) {
  ASSERT_TRUE(ok(make_directories(directory_.file("a/b/c"))));
  EXPECT_TRUE(std::filesystem::is_directory(directory_.file("a/b/c")));
}

TEST_F(MakeDirectoriesTest, DoesNotTouchAnExistingDirectory) {
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    EXPECT_TRUE(ok(make_directories(directory_.path())));
    EXPECT_TRUE(ok(make_directories(directory_.path() + "///")));
    EXPECT_TRUE(ok(make_directories("/")));
    EXPECT_TRUE(ok(make_directories(".")));
    EXPECT_TRUE(ok(make_directories("")));
  }
  EXPECT_EQ(counter.log(), Log{});
}

TEST_F(MakeDirectoriesTest, IsRelativeToTheWorkingDirectory) {
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(directory_.path());
  const auto made = make_directories("a/b/");
  std::filesystem::current_path(before);
  EXPECT_TRUE(ok(made));
  EXPECT_TRUE(std::filesystem::is_directory(directory_.file("a/b")));
}

TEST_F(MakeDirectoriesTest, SucceedsIfAnotherRankCreatesTheDirectoryFirst) {
  const std::string path = directory_.file("a");
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "mkdir") std::filesystem::create_directory(path);
    return 0;
  });
  EXPECT_TRUE(ok(make_directories(path)));
}

TEST_F(MakeDirectoriesTest, DoesNotReplaceAFile) {
  write_file(directory_.file("a"), "kept");
  const auto made = make_directories(directory_.file("a"));
  ASSERT_FALSE(made.has_value());
  EXPECT_TRUE(is_system_error(made.error(), EEXIST, "mkdir", directory_.file("a")));
  const auto below = make_directories(directory_.file("a/b"));
  ASSERT_FALSE(below.has_value());
  EXPECT_EQ(read_file(directory_.file("a")), "kept");
}

// The expected calls for the directories above `below`, up to the root of its file system.
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

using SyncAncestorsTest = DirectoryTest;

TEST_F(SyncAncestorsTest, SyncsEachDirectoryAbove) {
  ASSERT_TRUE(ok(make_directories(directory_.file("a/b"))));
  const Directory below = opened(directory_.file("a/b"));
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    EXPECT_TRUE(ok(below.sync_ancestors()));
  }
  EXPECT_GE(counter.log().size(), 2);
  EXPECT_EQ(counter.log(), above(directory_.file("a/b")));
}

TEST_F(SyncAncestorsTest, TheRootHasNone) {
  const Directory root = opened("/");
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    EXPECT_TRUE(ok(root.sync_ancestors()));
  }
  EXPECT_EQ(counter.log(), Log{});
}

TEST_F(SyncAncestorsTest, AFailedSyncIsReported) {
  ASSERT_TRUE(ok(make_directories(directory_.file("a/b"))));
  const std::string grandparent = directory_.file("a/b") + "/../..";
  ScopedFaultHook hook(
      [&](std::string_view, std::string_view path) { return path == grandparent ? EIO : 0; });
  const auto synced = opened(directory_.file("a/b")).sync_ancestors();
  ASSERT_FALSE(synced.has_value());
  EXPECT_TRUE(is_system_error(synced.error(), EIO, "fsync_directory", grandparent));
}

TEST_F(SyncAncestorsTest, ADirectoryWithoutPermissionIsSkipped) {
  const std::string path = directory_.file("a/b");
  ASSERT_TRUE(ok(make_directories(path)));
  const Directory below = opened(path);
  for (const int refusal : {EACCES, EPERM}) {
    Log asked;
    {
      ScopedFaultHook hook([&](std::string_view operation, std::string_view at) {
        asked.push_back(std::string(operation) + " " + std::string(at));
        return at == path + "/.." ? refusal : 0;
      });
      EXPECT_TRUE(ok(below.sync_ancestors()));
    }
    EXPECT_EQ(asked, above(path));
  }
}

TEST_F(SyncAncestorsTest, OfARenamedDirectoryAreThoseOfItsNewLocation) {
  ASSERT_TRUE(ok(make_directories(directory_.file("a/b"))));
  ASSERT_TRUE(ok(make_directories(directory_.file("elsewhere"))));
  const Directory below = opened(directory_.file("a/b"));
  std::filesystem::rename(directory_.file("a/b"), directory_.file("elsewhere/b"));
  std::filesystem::remove(directory_.file("a"));
  EXPECT_TRUE(ok(below.sync_ancestors()));
}

TEST(Directory, CannotBeOpenedIfItIsAFileOrMissing) {
  TempDir directory;
  write_file(directory.file("a"), "");
  const auto file = Directory::open(directory.file("a"));
  ASSERT_FALSE(file.has_value());
  EXPECT_TRUE(is_system_error(file.error(), ENOTDIR, "open", directory.file("a")));
  const auto missing = Directory::open(directory.file("b"));
  ASSERT_FALSE(missing.has_value());
  EXPECT_TRUE(is_system_error(missing.error(), ENOENT, "open", directory.file("b")));
}

TEST(Directory, CanBeFsynced) {
  TempDir directory;
  EXPECT_TRUE(ok(opened(directory.path()).sync()));
}

using RenameFileTest = DirectoryTest;

TEST_F(RenameFileTest, ReplacesTheTarget) {
  write_file(directory_.file("from"), "new");
  write_file(directory_.file("to"), "old");
  EXPECT_TRUE(ok(opened(directory_.path()).rename("from", "to")));
  EXPECT_EQ(directory_.names(), Log{"to"});
  EXPECT_EQ(read_file(directory_.file("to")), "new");
}

TEST_F(RenameFileTest, WithoutReplaceKeepsAnExistingTarget) {
  write_file(directory_.file("from"), "new");
  write_file(directory_.file("to"), "old");
  const auto renamed = opened(directory_.path()).rename("from", "to", false);
  ASSERT_FALSE(renamed.has_value());
  EXPECT_TRUE(is_system_error(renamed.error(), EEXIST, "rename", directory_.file("to")));
  EXPECT_EQ(read_file(directory_.file("from")), "new");
  EXPECT_EQ(read_file(directory_.file("to")), "old");
}

TEST_F(RenameFileTest, WithoutReplaceRenamesIfThereIsNoTarget) {
  write_file(directory_.file("from"), "new");
  EXPECT_TRUE(ok(opened(directory_.path()).rename("from", "to", false)));
  EXPECT_EQ(directory_.names(), Log{"to"});
}

TEST_F(RenameFileTest, OfAMissingFileFailsAndKeepsTheTarget) {
  write_file(directory_.file("to"), "old");
  const auto renamed = opened(directory_.path()).rename("from", "to");
  ASSERT_FALSE(renamed.has_value());
  EXPECT_TRUE(is_system_error(renamed.error(), ENOENT, "rename", directory_.file("to")));
  EXPECT_EQ(read_file(directory_.file("to")), "old");
}

TEST(RemoveFile, OfAMissingFileSucceeds) {
  TempDir directory;
  EXPECT_TRUE(ok(opened(directory.path()).remove("a")));
}

TEST(RemoveFile, RemovesALinkAndNotItsTarget) {
  TempDir directory;
  write_file(directory.file("target"), "kept");
  std::filesystem::create_symlink(directory.file("target"), directory.file("link"));
  EXPECT_TRUE(ok(opened(directory.path()).remove("link")));
  EXPECT_EQ(directory.names(), Log{"target"});
}

TEST(RemoveFile, OfADirectoryFails) {
  TempDir directory;
  ASSERT_TRUE(ok(make_directories(directory.file("a"))));
  const auto removed = opened(directory.path()).remove("a");
  ASSERT_FALSE(removed.has_value());
  EXPECT_TRUE(is_system_error(removed.error(), EISDIR, "unlink", directory.file("a")));
}

TEST(Directory, StaysOpenIfItIsRenamedAndItsPathIsReused) {
  TempDir above;
  ASSERT_TRUE(ok(make_directories(above.file("a"))));
  const Directory directory = opened(above.file("a"));
  std::filesystem::rename(above.file("a"), above.file("moved"));
  ASSERT_TRUE(ok(make_directories(above.file("a"))));
  write_file(above.file("a/file"), "another's");
  EXPECT_TRUE(ok(directory.create("new", IoMode::buffered)));
  EXPECT_TRUE(ok(directory.rename("new", "file")));
  EXPECT_EQ(*directory.names(), Log{"file"});
  EXPECT_TRUE(ok(directory.sync()));
  EXPECT_TRUE(ok(directory.remove("file")));
  EXPECT_EQ(read_file(above.file("a/file")), "another's");
  EXPECT_FALSE(*directory.is_at_path());
  EXPECT_EQ(directory.current_path(), above.file("moved"));
}

TEST(Directory, IsAtAPathWithALinkUntilTheLinkIsChanged) {
  TempDir above;
  ASSERT_TRUE(ok(make_directories(above.file("a"))));
  std::filesystem::create_directory_symlink("a", above.file("link"));
  const Directory directory = opened(above.file("link"));
  EXPECT_TRUE(*directory.is_at_path());
  std::filesystem::remove(above.file("link"));
  EXPECT_FALSE(*directory.is_at_path());
  std::filesystem::create_symlink("link", above.file("link"));
  EXPECT_FALSE(*directory.is_at_path());
  write_file(above.file("file"), "");
  std::filesystem::remove(above.file("link"));
  std::filesystem::create_symlink("file/below", above.file("link"));
  EXPECT_FALSE(*directory.is_at_path());
}

TEST(Directory, HasNoCurrentPathAfterItsRemoval) {
  TempDir above;
  ASSERT_TRUE(ok(make_directories(above.file("a"))));
  const Directory directory = opened(above.file("a"));
  std::filesystem::remove(above.file("a"));
  EXPECT_EQ(directory.current_path(), "");
  EXPECT_FALSE(*directory.is_at_path());
  EXPECT_EQ(*directory.names(), Log{});
}

TEST(Directory, ReopeningCreatesAnotherLockAndDuplicatingSharesIt) {
  TempDir above;
  Directory first = opened(above.path());
  Directory second = *first.reopen();
  EXPECT_TRUE(*first.try_share());
  EXPECT_TRUE(*second.try_share());
  EXPECT_FALSE(*second.try_lock_exclusive());
  {
    Directory same = *first.duplicate();
    EXPECT_TRUE(*same.identity() == *first.identity());
  }
  EXPECT_FALSE(*second.try_lock_exclusive()) << "closing a duplicate does not release the lock";
  first.close();
  EXPECT_TRUE(*second.try_lock_exclusive());
}

TEST(Directory, LockingIsRetriedAfterASignal) {
  TempDir above;
  Directory directory = opened(above.path());
  Directory other = opened(above.path());
  for (auto lock : {&Directory::try_share, &Directory::try_lock_exclusive}) {
    flock_calls = 0;
    flock_errors = {EINTR, EINTR};
    EXPECT_TRUE(*(directory.*lock)());
    EXPECT_EQ(flock_calls, 3);
    EXPECT_FALSE(*other.try_lock_exclusive());
  }
  flock_errors = {EINTR};
  EXPECT_FALSE(*other.try_share()) << "an interrupt must not count as a lock";
}

TEST(Directory, AFileSystemWithoutLocksGrantsOnlyTheSharedLock) {
  TempDir above;
  Directory directory = opened(above.path());
  for (const int refusal : {ENOSYS, EOPNOTSUPP, EINVAL}) {
    flock_errors = {refusal, refusal};
    EXPECT_TRUE(*directory.try_share());
    EXPECT_FALSE(*directory.try_lock_exclusive());
    EXPECT_FALSE(directory.has_locks());
  }
}

TEST(Directory, IfTheKernelHasNoFreeLocksOnlyTheSharedLockIsGranted) {
  TempDir above;
  Directory directory = opened(above.path());
  flock_errors = {ENOLCK, ENOLCK};
  EXPECT_TRUE(*directory.try_share());
  EXPECT_FALSE(*directory.try_lock_exclusive());
  EXPECT_TRUE(directory.has_locks());
}

TEST(Directory, AnyOtherErrorOfLockingIsReported) {
  TempDir above;
  Directory directory = opened(above.path());
  flock_errors = {EIO, EIO};
  EXPECT_TRUE(is_system_error(directory.try_share().error(), EIO, "flock", above.path()));
  EXPECT_TRUE(is_system_error(directory.try_lock_exclusive().error(), EIO, "flock", above.path()));
}

TEST(Directory, AForkedChildThatClosesItsCopyDoesNotReleaseTheLock) {
  TempDir above;
  Directory first = opened(above.path());
  ASSERT_TRUE(*first.try_share());
  const pid_t child = ::fork();
  if (child == 0) {
    first.close();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  Directory second = opened(above.path());
  EXPECT_FALSE(*second.try_lock_exclusive());
}

TEST(Directory, CallsFailAfterClose) {
  TempDir above;
  Directory directory = opened(above.path());
  directory.close();
  EXPECT_TRUE(is_system_error(directory.names().error(), EBADF, "open", above.path()));
  EXPECT_TRUE(is_system_error(directory.duplicate().error(), EBADF, "fcntl", above.path()));
  EXPECT_TRUE(is_system_error(directory.reopen().error(), EBADF, "open", above.path()));
  EXPECT_TRUE(is_system_error(directory.try_share().error(), EBADF, "flock", above.path()));
}

TEST(Directory, AFaultInEachCallIsReported) {
  TempDir above;
  Directory directory = opened(above.path());
  const auto fails = [&](const std::string& operation, const auto& call) {
    ScopedFaultHook hook(NthCallFails(operation, 1, EIO));
    const auto result = call();
    return !result && result.error().sys_errno == EIO && result.error().path == above.path();
  };
  EXPECT_TRUE(fails("open_directory", [&] { return directory.reopen(); }));
  EXPECT_TRUE(fails("fcntl", [&] { return directory.duplicate(); }));
  EXPECT_TRUE(fails("readdir", [&] { return directory.names(); }));
  EXPECT_TRUE(fails("statx", [&] { return directory.is_at_path(); }));
  EXPECT_TRUE(fails("flock", [&] { return directory.try_share(); }));
  EXPECT_TRUE(fails("fsync_directory", [&] { return directory.sync(); }));
}

}  // namespace
}  // namespace torch_ckpt::os
