#include "directory/lease.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <stdexcept>

#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::directory {
namespace {

using os::ScopedFaultHook;
using namespace test;

using Names = std::vector<std::string>;

// In these tests metadata is a list of file names, one per line. "damaged" cannot be read.
Result<std::set<std::string>> named(const os::Directory& directory, const std::string& name) {
  const std::string contents = read_file(directory.path_of(name));
  if (contents == "damaged") return format_error(Errc::pickle_truncated, "cannot be read");
  std::set<std::string> files;
  for (std::size_t begin = 0; begin < contents.size();) {
    const std::size_t end = contents.find('\n', begin);
    files.insert(contents.substr(begin, end - begin));
    begin = end + 1;
  }
  return files;
}

Result<> keep_waiting() { return {}; }

class LeaseTest : public ::testing::Test {
 protected:
  DirectoryLease take(std::optional<int> rank = {}) {
    auto lease = DirectoryLease::take(open_directory(directory_), rank, 0.0, keep_waiting);
    EXPECT_TRUE(ok(lease));
    return std::move(*lease);
  }
  void has(const std::string& name, std::string_view contents = "") {
    write_file(directory_.file(name), contents);
  }
  /// A checkpoint of one file, and the file of the next save.
  void has_old_and_new() {
    has("__0_0.distcp", "old");
    has(".metadata", "__0_0.distcp\n");
    has("__0_5f0c19ab_0.distcp", "new");
  }
  PublishOutcome commit_new(PublishMode mode = {}) {
    return commit(take(), "__0_5f0c19ab_0.distcp\n", {"__0_5f0c19ab_0.distcp"}, mode);
  }
  PublishOutcome commit(DirectoryLease lease, std::string_view contents,
                        const std::set<std::string>& files, PublishMode mode = {}) {
    return lease.commit({&contents, 1}, files, mode, named, warnings_);
  }
  bool is_free() {
    auto directory = open_directory(directory_);
    return *directory.try_lock_exclusive();
  }

  TempDir directory_;
  Warnings warnings_;
};

TEST_F(LeaseTest, HasNoTagInAnEmptyDirectory) { EXPECT_EQ(take().tag(), ""); }

TEST_F(LeaseTest, HasATagIfTheDirectoryHasFilesOfACheckpoint) {
  for (const char* name : {".metadata", "__0_0.distcp", "__5.metadata"}) {
    has(name);
    EXPECT_EQ(take().tag().size(), 9) << name;
    EXPECT_EQ(take().tag().back(), '_') << name;
    ASSERT_TRUE(ok(open_directory(directory_).remove(name)));
  }
}

TEST_F(LeaseTest, HasATagIfThereIsAnotherLease) {
  const DirectoryLease first = take();
  const DirectoryLease second = take();
  EXPECT_EQ(first.tag(), "");
  EXPECT_NE(second.tag(), "");
}

TEST_F(LeaseTest, PreventsTheExclusiveLockUntilItEnds) {
  DirectoryLease lease = take();
  EXPECT_FALSE(is_free());
  lease.close();
  EXPECT_TRUE(is_free());
}

TEST_F(LeaseTest, CannotBeTakenWhileAnotherProcessHasTheExclusiveLock) {
  auto other = open_directory(directory_);
  ASSERT_TRUE(*other.try_lock_exclusive());
  const auto lease = DirectoryLease::take(open_directory(directory_), {}, 0.0, keep_waiting);
  ASSERT_TRUE(fails(lease, Errc::system));
  EXPECT_NE(lease.error().detail.str().find("held the exclusive lock for 0 s"), std::string::npos);
}

TEST_F(LeaseTest, WaitsForTheReleaseOfTheExclusiveLock) {
  auto other = open_directory(directory_);
  ASSERT_TRUE(*other.try_lock_exclusive());
  const auto lease = DirectoryLease::take(open_directory(directory_), {}, 60.0, [&]() -> Result<> {
    other.close();
    return {};
  });
  EXPECT_TRUE(ok(lease));
}

TEST_F(LeaseTest, StopsWaitingAfterAnInterrupt) {
  auto other = open_directory(directory_);
  ASSERT_TRUE(*other.try_lock_exclusive());
  const auto lease = DirectoryLease::take(open_directory(directory_), {}, 60.0, []() -> Result<> {
    return format_error(Errc::cancelled, "interrupted");
  });
  EXPECT_TRUE(fails(lease, Errc::cancelled));
}

TEST_F(LeaseTest, ACommitRemovesFilesThatNoMetadataNames) {
  has_old_and_new();
  has("__1_0.distcp", "left by a dead save");
  has(".metadata.tmp", "left, too");
  has("notes.txt", "of a user");
  const auto outcome = commit_new();
  EXPECT_EQ(outcome.state, PublishState::published);
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__0_5f0c19ab_0.distcp", "notes.txt"}));
  EXPECT_EQ(warnings_, Warnings());
  EXPECT_TRUE(is_free());
}

TEST_F(LeaseTest, ACommitRemovesNothingDuringAnotherSave) {
  has("__0_0.distcp", "of the other");
  const DirectoryLease other = take();
  has("__1_0.distcp", "new");
  EXPECT_EQ(commit(take(), "__1_0.distcp\n", {"__1_0.distcp"}).state, PublishState::published);
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__0_0.distcp", "__1_0.distcp"}));
}

TEST_F(LeaseTest, ACommitOfAllRanksRemovesTheMetadataOfSingleRanks) {
  has("__3_0.distcp", "old");
  has("__3.metadata", "__3_0.distcp\n");
  has("__0_0.distcp", "new");
  EXPECT_EQ(commit(take(), "__0_0.distcp\n", {"__0_0.distcp"}).state, PublishState::published);
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__0_0.distcp"}));
}

TEST_F(LeaseTest, ACommitOfOneRankKeepsTheFilesOfOtherRanks) {
  has("__3_0.distcp", "left by a dead save of rank 3");
  has("__4_0.distcp", "being written, perhaps");
  has("__3_5f0c19ab_0.distcp", "new");
  EXPECT_EQ(commit(take(3), "__3_5f0c19ab_0.distcp\n", {"__3_5f0c19ab_0.distcp"}).state,
            PublishState::published);
  EXPECT_EQ(directory_.names(), (Names{"__3.metadata", "__3_5f0c19ab_0.distcp", "__4_0.distcp"}));
}

TEST_F(LeaseTest, ACommitKeepsTheFilesOfALaterCommit) {
  has("__0_0.distcp", "mine");
  has("__1_0.distcp", "of the other");
  has(".metadata", "");
  bool is_replaced = false;
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    // The removal begins with this lock.
    if (operation == "flock" && read_file(directory_.file(".metadata")) == "__0_0.distcp\n") {
      is_replaced = true;
      has(".metadata", "__1_0.distcp\n");
    }
    return 0;
  });
  EXPECT_EQ(commit(take(), "__0_0.distcp\n", {"__0_0.distcp"}).state, PublishState::published);
  EXPECT_TRUE(is_replaced);
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__1_0.distcp"}));
}

TEST_F(LeaseTest, WithoutLocksACommitKeepsTheFilesOfOtherSaves) {
  for (const int refusal : {ENOSYS, EOPNOTSUPP, EINVAL, ENOLCK}) {
    test::flock_errors.assign(100, refusal);
    DirectoryLease first = take();
    DirectoryLease second = take();
    EXPECT_NE(first.tag(), second.tag());
    const std::string mine = "__0_" + first.tag() + "0.distcp";
    const std::string other = "__1_" + second.tag() + "0.distcp";
    has(mine, "new");
    has(other, "being written");
    EXPECT_EQ(commit(std::move(first), mine + "\n", {mine}).state, PublishState::published);
    EXPECT_EQ(read_file(directory_.file(other)), "being written") << refusal;
    EXPECT_EQ(commit(std::move(second), other + "\n", {other}).state, PublishState::published);
    EXPECT_EQ(read_file(directory_.file(other)), "being written") << refusal;
  }
  test::flock_errors.clear();
}

TEST_F(LeaseTest, ACommitWithAMissingFileFailsAndNamesTheFile) {
  has_old_and_new();
  const auto outcome = commit(take(), "__0_5f0c19ab_0.distcp\n__1_5f0c19ab_0.distcp\n",
                              {"__0_5f0c19ab_0.distcp", "__1_5f0c19ab_0.distcp"});
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_TRUE(test::is_system_error(outcome.error, ENOENT, "commit",
                                    directory_.file("__1_5f0c19ab_0.distcp")));
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__0_0.distcp"}));
  EXPECT_EQ(read_file(directory_.file(".metadata")), "__0_0.distcp\n");
}

TEST_F(LeaseTest, ACommitChecksFilesInSubdirectories) {
  std::filesystem::create_directory(directory_.file("below"));
  has("below/data", "new");
  EXPECT_EQ(commit(take(), "below/data\n", {"below/data"}).state, PublishState::published);
  EXPECT_EQ(commit(take(), "below/none\n", {"below/none"}).state, PublishState::not_published);
}

TEST_F(LeaseTest, AFailedCommitRemovesTheFilesOfTheSave) {
  has_old_and_new();
  const auto outcome = commit_new({.replace = false});
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_EQ(outcome.error.sys_errno, EEXIST);
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__0_0.distcp"}));
  EXPECT_TRUE(is_free());
}

TEST_F(LeaseTest, ACommitThatMayNotBeDurableRemovesNothing) {
  has_old_and_new();
  bool is_renamed = false;
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    is_renamed = is_renamed || operation == "rename";
    return is_renamed && operation == "fsync_directory" ? EIO : 0;
  });
  const auto outcome = commit_new();
  EXPECT_EQ(outcome.state, PublishState::durability_uncertain);
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__0_0.distcp", "__0_5f0c19ab_0.distcp"}));
  EXPECT_TRUE(is_free());
}

TEST_F(LeaseTest, ACommitWhoseCompletedRenameReportsAnErrorKeepsItsFiles) {
  has_old_and_new();
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation != "rename") return 0;
    for (const std::string& name : directory_.names()) {
      if (!name.starts_with(".metadata.tmp-")) continue;
      std::filesystem::rename(directory_.file(name), directory_.file(".metadata"));
    }
    return ENOENT;
  });
  const auto outcome = commit_new();
  EXPECT_EQ(outcome.state, PublishState::published) << outcome.error.message();
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__0_5f0c19ab_0.distcp"}));
}

TEST_F(LeaseTest, ACommitWhoseRenameMayStillBeCarriedOutRemovesNothing) {
  has_old_and_new();
  ScopedFaultHook hook(NthCallFails("rename", 1, EIO));
  const auto outcome = commit_new();
  EXPECT_EQ(outcome.state, PublishState::durability_uncertain);
  EXPECT_EQ(directory_.names().size(), 4) << "the new metadata's temporary file is the fourth";
  EXPECT_EQ(read_file(directory_.file(".metadata")), "__0_0.distcp\n");
  EXPECT_TRUE(is_free());
}

TEST_F(LeaseTest, DiscardingRemovesTheFilesOfTheSaveOnly) {
  has("__0_0.distcp", "old");
  has(".metadata", "__0_0.distcp\n");
  DirectoryLease lease = take();
  has("__0_" + lease.tag() + "0.distcp", "new");
  lease.discard(named, warnings_);
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__0_0.distcp"}));
  EXPECT_EQ(warnings_, Warnings());
}

TEST_F(LeaseTest, NothingIsRemovedIfMetadataCannotBeRead) {
  has("__0_0.distcp", "perhaps named");
  has("__7.metadata", "damaged");
  take().discard(named, warnings_);
  EXPECT_EQ(directory_.names(), (Names{"__0_0.distcp", "__7.metadata"}));
  ASSERT_EQ(warnings_.size(), 1);
  EXPECT_EQ(warnings_[0], "unused files are left in " + directory_.path() + ": cannot be read");
}

TEST_F(LeaseTest, NothingIsRemovedBeforeTheDirectoryIsDurable) {
  has("__0_0.distcp", "perhaps named by metadata that a power cut brings back");
  ScopedFaultHook hook(NthCallFails("fsync_directory", 1, EIO));
  take().discard(named, warnings_);
  EXPECT_EQ(directory_.names(), Names{"__0_0.distcp"});
  EXPECT_EQ(warnings_.size(), 1);
}

TEST_F(LeaseTest, AFileThatCannotBeRemovedIsAWarningAndOtherFilesAreRemoved) {
  has("__0_0.distcp");
  has("__1_0.distcp");
  ScopedFaultHook hook(NthCallFails("unlink", 1, EACCES));
  take().discard(named, warnings_);
  EXPECT_EQ(directory_.names(), Names{"__0_0.distcp"});
  ASSERT_EQ(warnings_.size(), 1);
  EXPECT_TRUE(warnings_[0].starts_with("an unused file could not be removed: unlink " +
                                       directory_.file("__0_0.distcp")))
      << warnings_[0];
}

TEST_F(LeaseTest, RemoveOwnKeepsNamedFilesAndFilesOfOtherSaves) {
  has("__0_0.distcp");
  has("__0_1.distcp");
  has("__1_0.distcp");
  has(".metadata", "__0_1.distcp\n");
  remove_own(open_directory(directory_), {"__0_0.distcp", "__0_1.distcp"}, named, warnings_);
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__0_1.distcp", "__1_0.distcp"}));
}

TEST_F(LeaseTest, AnExceptionDuringTheRemovalIsAWarning) {
  has("__0_0.distcp");
  has(".metadata");
  const NamedFiles throws = [](const os::Directory&,
                               const std::string&) -> Result<std::set<std::string>> {
    throw std::runtime_error("thrown");
  };
  remove_own(open_directory(directory_), {"__0_0.distcp"}, throws, warnings_);
  take().discard(throws, warnings_);
  EXPECT_EQ(warnings_, (Warnings(2, "unused files are left in " + directory_.path() +
                                        ": removing them: thrown")));
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__0_0.distcp"}));
  EXPECT_TRUE(is_free());
}

TEST_F(LeaseTest, RemoveOwnDoesNothingDuringAnotherSave) {
  has("__0_0.distcp");
  const DirectoryLease other = take();
  remove_own(open_directory(directory_), {"__0_0.distcp"}, named, warnings_);
  EXPECT_EQ(directory_.names(), Names{"__0_0.distcp"});
  EXPECT_EQ(warnings_, Warnings());
}

TEST_F(LeaseTest, RemoveLeftoversReturnsTheRemovedFiles) {
  has("__1_0.distcp");
  has("__0_0.distcp");
  has(".metadata", "__1_0.distcp\n");
  auto directory = open_directory(directory_);
  const auto removed = remove_leftovers(directory, named);
  ASSERT_TRUE(ok(removed));
  EXPECT_EQ(*removed, Names{"__0_0.distcp"});
  EXPECT_EQ(directory_.names(), (Names{".metadata", "__1_0.distcp"}));
}

TEST_F(LeaseTest, RemoveLeftoversRemovesNothingDuringASave) {
  has("__0_0.distcp");
  const DirectoryLease other = take();
  auto directory = open_directory(directory_);
  const auto removed = remove_leftovers(directory, named);
  ASSERT_TRUE(ok(removed));
  EXPECT_FALSE(removed->has_value());
  EXPECT_EQ(directory_.names(), Names{"__0_0.distcp"});
}

}  // namespace
}  // namespace torch_ckpt::directory
