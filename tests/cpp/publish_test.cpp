#include "directory/publish.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <functional>

#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::directory {
namespace {

namespace fs = std::filesystem;
using os::ScopedFaultHook;
using namespace test;

using Names = std::vector<std::string>;

constexpr std::string_view kNewContents = "new";
constexpr Pieces kNew(&kNewContents, 1);

PublishOutcome commit(const TempDir& directory, std::string_view contents, PublishMode mode = {}) {
  return publish_contents(open_directory(directory), ".metadata", {&contents, 1}, mode);
}

using PublishTest = DirectoryTest;

TEST_F(PublishTest, CreatesTheMetadata) {
  const auto outcome = commit(directory_, "contents");
  EXPECT_EQ(outcome.state, PublishState::published) << outcome.error.message();
  EXPECT_EQ(directory_.names(), Names{".metadata"});
  EXPECT_EQ(read_file(directory_.file(".metadata")), "contents");
}

TEST_F(PublishTest, ReplacesTheOldMetadata) {
  write_file(directory_.file(".metadata"), "old and longer");
  EXPECT_EQ(commit(directory_, "new").state, PublishState::published);
  EXPECT_EQ(directory_.names(), Names{".metadata"});
  EXPECT_EQ(read_file(directory_.file(".metadata")), "new");
}

TEST_F(PublishTest, KeepsTheOldContentsUntilTheNewOnesAreComplete) {
  const std::string path = directory_.file(".metadata");
  write_file(path, "old");
  int checks = 0;
  ScopedFaultHook hook([&](std::string_view operation, std::string_view at) {
    const bool renamed = operation == "fsync_directory" && at == directory_.path();
    EXPECT_EQ(read_file(path), renamed ? "new" : "old") << operation;
    ++checks;
    return 0;
  });
  EXPECT_EQ(commit(directory_, "new").state, PublishState::published);
  EXPECT_GE(checks, 6);
}

TEST_F(PublishTest, SyncsTheFileAndTheDirectoriesAboveThenRenamesAndSyncsTheDirectory) {
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    EXPECT_EQ(commit(directory_, "contents").state, PublishState::published);
  }
  Names operations;
  for (const std::string& line : counter.log()) {
    const std::string operation = line.substr(0, line.find(' '));
    if (operations.empty() || operations.back() != operation) operations.push_back(operation);
  }
  ASSERT_EQ(operations, (Names{"open_directory", "open", "statx", "pwrite", "fsync", "close",
                               "fsync_directory", "statx", "rename", "fsync_directory"}));
  EXPECT_EQ(counter.log()[6], "fsync_directory " + directory_.path() + "/..");
  EXPECT_EQ(counter.log().back(), "fsync_directory " + directory_.path());
}

TEST_F(PublishTest, WithoutSyncCallsNoFsync) {
  write_file(directory_.file(".metadata"), "old");
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    EXPECT_EQ(commit(directory_, "new", {.sync = false}).state, PublishState::published);
  }
  EXPECT_EQ(counter.calls("fsync"), 0);
  EXPECT_EQ(counter.calls("fsync_directory"), 0);
  EXPECT_EQ(read_file(directory_.file(".metadata")), "new");
}

TEST_F(PublishTest, CreatesAnEmptyFileForEmptyContents) {
  EXPECT_EQ(commit(directory_, "").state, PublishState::published);
  EXPECT_EQ(read_file(directory_.file(".metadata")), "");
}

TEST_F(PublishTest, FailsInARemovedDirectory) {
  fs::create_directory(directory_.file("gone"));
  const auto opened = os::Directory::open(directory_.file("gone"));
  fs::remove(directory_.file("gone"));
  const auto outcome = publish_contents(*opened, ".metadata", kNew, {});
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_EQ(outcome.error.sys_errno, ENOENT);
}

// Changes of the directory's path during a save.
class PathChange : public ::testing::Test {
 protected:
  PathChange() {
    fs::create_directories(above_.file("a"));
    fs::create_directories(above_.file("unrelated"));
    write_file(above_.file("unrelated/.metadata"), "unrelated");
  }

  void expect_not_committed(const std::string& path, const std::function<void()>& change,
                            const std::string& now) {
    const auto opened = os::Directory::open(path);
    ASSERT_TRUE(test::ok(opened));
    change();
    const auto outcome = publish_contents(*opened, ".metadata", kNew, {});
    EXPECT_EQ(outcome.state, PublishState::not_published);
    EXPECT_EQ(outcome.error.code, Errc::directory_moved);
    EXPECT_EQ(outcome.error.path, path);
    EXPECT_NE(outcome.error.detail.str().find("is now " + now), std::string::npos)
        << outcome.error.detail;
    EXPECT_FALSE(fs::exists(now + "/.metadata"));
    EXPECT_TRUE(fs::is_empty(now));
  }

  TempDir above_;
};

TEST_F(PathChange, ToAnotherDirectoryPreventsTheCommit) {
  expect_not_committed(
      above_.file("a"),
      [&] {
        fs::rename(above_.file("a"), above_.file("moved"));
        fs::rename(above_.file("unrelated"), above_.file("a"));
      },
      above_.file("moved"));
  EXPECT_EQ(read_file(above_.file("a/.metadata")), "unrelated");
  EXPECT_EQ(above_.names().size(), 3) << "a temporary file is left";
}

TEST_F(PathChange, ByALinkPreventsTheCommit) {
  fs::create_directory_symlink("a", above_.file("link"));
  expect_not_committed(
      above_.file("link"),
      [&] {
        fs::remove(above_.file("link"));
        fs::create_directory_symlink("unrelated", above_.file("link"));
      },
      above_.file("a"));
  EXPECT_EQ(read_file(above_.file("unrelated/.metadata")), "unrelated");
}

TEST_F(PathChange, ToNothingPreventsTheCommit) {
  expect_not_committed(
      above_.file("a"), [&] { fs::rename(above_.file("a"), above_.file("moved")); },
      above_.file("moved"));
}

TEST_F(PublishTest, ReportsAFailureToCheckThePath) {
  ScopedFaultHook hook(NthCallFails("statx", 2, EIO));
  const auto outcome = commit(directory_, "new");
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_TRUE(is_system_error(outcome.error, EIO, "statx", directory_.path()));
  EXPECT_EQ(directory_.names(), Names{});
}

// The operations before the commit point, in order.
class FaultBeforeTheCommitPoint : public ::testing::TestWithParam<const char*> {};

TEST_P(FaultBeforeTheCommitPoint, KeepsTheOldMetadataAndNothingElse) {
  TempDir directory;
  write_file(directory.file(".metadata"), "old");
  NthCallFails fault(GetParam(), 1, ENOSPC);
  ScopedFaultHook hook(fault);
  const auto outcome = commit(directory, "new");
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_TRUE(is_system_error(outcome.error, ENOSPC, GetParam(), fault.path()));
  EXPECT_EQ(directory.names(), Names{".metadata"});
  EXPECT_EQ(read_file(directory.file(".metadata")), "old");
}

TEST_P(FaultBeforeTheCommitPoint, LeavesAnEmptyDirectoryEmpty) {
  TempDir directory;
  ScopedFaultHook hook(NthCallFails(GetParam(), 1, EDQUOT));
  EXPECT_EQ(commit(directory, "new").state, PublishState::not_published);
  EXPECT_EQ(directory.names(), Names{});
}

INSTANTIATE_TEST_SUITE_P(Operations, FaultBeforeTheCommitPoint,
                         ::testing::Values("open", "pwrite", "fsync", "close", "fsync_directory",
                                           "rename"),
                         [](const auto& operation) { return std::string(operation.param); });

// A rename that reports an error, as on a network file system, and may be carried out all the same.
class RenameWithAnError {
 public:
  RenameWithAnError(std::string above, int sys_errno, std::function<void()> carry_out)
      : above_(std::move(above)), sys_errno_(sys_errno), carry_out_(std::move(carry_out)) {}

  int operator()(std::string_view operation, std::string_view path) const {
    if (operation != "rename" || path != above_) return 0;
    if (carry_out_) carry_out_();
    return sys_errno_;
  }

 private:
  std::string above_;
  int sys_errno_;
  std::function<void()> carry_out_;
};

/// Renames the temporary file of the metadata.
void rename_temporary(const TempDir& directory) {
  for (const std::string& name : directory.names()) {
    if (name.starts_with(".metadata.tmp-")) {
      fs::rename(directory.file(name), directory.file(".metadata"));
    }
  }
}

TEST_F(PublishTest, ACompletedRenameThatReportsAnErrorIsPublishedAndMadeDurable) {
  for (const int failed : {EIO, ETIMEDOUT, EINTR, ENOENT, ESTALE}) {
    TempDir directory;
    write_file(directory.file(".metadata"), "old");
    CallCounter counter;
    const RenameWithAnError fault(directory.file(".metadata"), failed,
                                  [&] { rename_temporary(directory); });
    ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
      counter(operation, path);
      return fault(operation, path);
    });
    const auto outcome = commit(directory, "new");
    EXPECT_EQ(outcome.state, PublishState::published) << outcome.error.message();
    EXPECT_EQ(read_file(directory.file(".metadata")), "new");
    EXPECT_EQ(counter.log().back(), "fsync_directory " + directory.path());
  }
}

TEST_F(PublishTest, ARenameWithAnAmbiguousErrorIsUncertainAndNothingIsRemoved) {
  for (const int failed : {EIO, ETIMEDOUT, EINTR}) {
    TempDir directory;
    write_file(directory.file(".metadata"), "old");
    ScopedFaultHook hook(RenameWithAnError(directory.file(".metadata"), failed, {}));
    const auto outcome = commit(directory, "new");
    EXPECT_EQ(outcome.state, PublishState::durability_uncertain);
    EXPECT_EQ(outcome.error.sys_errno, failed);
    EXPECT_EQ(outcome.error.detail, "it is unknown whether the rename was carried out");
    EXPECT_EQ(directory.names().size(), 2) << "the temporary file was removed";
    EXPECT_EQ(read_file(directory.file(".metadata")), "old");
  }
}

TEST_F(PublishTest, AFailedRenameIsUncertainIfItsTargetCannotBeChecked) {
  const std::string path = directory_.file(".metadata");
  ScopedFaultHook hook([&](std::string_view operation, std::string_view at) {
    if (at != path) return 0;
    return operation == "rename" ? ESTALE : operation == "statx" ? EACCES : 0;
  });
  EXPECT_EQ(commit(directory_, "new").state, PublishState::durability_uncertain);
  EXPECT_EQ(directory_.names().size(), 1) << "the temporary file was removed";
}

TEST_F(PublishTest, TheFirstErrorIsReportedIfTheTemporaryFileCannotBeRemovedEither) {
  ScopedFaultHook hook([](std::string_view operation, std::string_view) {
    if (operation == "fsync") return EIO;
    return operation == "unlink" ? EROFS : 0;
  });
  const auto outcome = commit(directory_, "new");
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_EQ(outcome.error.sys_errno, EIO);
}

TEST_F(PublishTest, AFailedSyncAfterTheRenameIsUncertainAndKeepsTheNewMetadata) {
  write_file(directory_.file(".metadata"), "old");
  ScopedFaultHook hook([&](std::string_view operation, std::string_view at) {
    return operation == "fsync_directory" && at == directory_.path() ? EIO : 0;
  });
  const auto outcome = commit(directory_, "new");
  EXPECT_EQ(outcome.state, PublishState::durability_uncertain);
  EXPECT_TRUE(is_system_error(outcome.error, EIO, "fsync_directory", directory_.path()));
  EXPECT_EQ(directory_.names(), Names{".metadata"});
  EXPECT_EQ(read_file(directory_.file(".metadata")), "new");
}

TEST_F(PublishTest, AParentWithoutPermissionIsNotSynced) {
  for (const int refusal : {EACCES, EPERM}) {
    ScopedFaultHook hook(NthCallFails("fsync_directory", 1, refusal));
    EXPECT_EQ(commit(directory_, "new").state, PublishState::published);
  }
}

TEST_F(PublishTest, WithoutReplaceKeepsTheOldMetadata) {
  write_file(directory_.file(".metadata"), "old");
  const auto outcome = commit(directory_, "new", {.replace = false});
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_TRUE(is_system_error(outcome.error, EEXIST, "rename", directory_.file(".metadata")));
  EXPECT_EQ(directory_.names(), Names{".metadata"});
  EXPECT_EQ(read_file(directory_.file(".metadata")), "old");
}

TEST_F(PublishTest, WithoutReplaceCreatesTheMetadata) {
  EXPECT_EQ(commit(directory_, "new", {.replace = false}).state, PublishState::published);
  EXPECT_EQ(directory_.names(), Names{".metadata"});
  EXPECT_EQ(read_file(directory_.file(".metadata")), "new");
}

TEST_F(PublishTest, ALinkWithTheNameOfTheMetadataIsReplaced) {
  TempDir elsewhere;
  write_file(elsewhere.file("victim"), "untouched");
  fs::create_symlink(elsewhere.file("victim"), directory_.file(".metadata"));
  EXPECT_EQ(commit(directory_, "new").state, PublishState::published);
  EXPECT_EQ(read_file(elsewhere.file("victim")), "untouched");
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(directory_.file(".metadata"))));
  EXPECT_EQ(read_file(directory_.file(".metadata")), "new");
}

TEST_F(PublishTest, ALinkWithTheTemporaryNameIsNotFollowed) {
  TempDir elsewhere;
  write_file(elsewhere.file("victim"), "untouched");
  // An attacker guesses the name and creates a link just before the file is created.
  ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    if (operation == "open") fs::create_symlink(elsewhere.file("victim"), fs::path(path));
    return 0;
  });
  const auto outcome = commit(directory_, "new");
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_EQ(outcome.error.sys_errno, EEXIST);
  EXPECT_EQ(read_file(elsewhere.file("victim")), "untouched");
}

TEST_F(PublishTest, UsesAnotherTemporaryNameEachTime) {
  Names seen;
  ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    if (operation == "open") seen.emplace_back(path);
    return 0;
  });
  EXPECT_EQ(commit(directory_, "one").state, PublishState::published);
  EXPECT_EQ(commit(directory_, "two").state, PublishState::published);
  ASSERT_EQ(seen.size(), 2);
  EXPECT_NE(seen[0], seen[1]);
  for (const std::string& path : seen) {
    EXPECT_TRUE(path.starts_with(directory_.file(".metadata.tmp-"))) << path;
  }
}

TEST_F(PublishTest, FollowsALinkInThePathOfTheDirectory) {
  TempDir elsewhere;
  fs::create_directory(elsewhere.file("real"));
  fs::create_directory_symlink(elsewhere.file("real"), directory_.file("link"));
  const auto opened = os::Directory::open(directory_.file("link"));
  EXPECT_EQ(publish_contents(*opened, ".metadata", kNew, {}).state, PublishState::published);
  EXPECT_EQ(read_file(elsewhere.file("real/.metadata")), "new");
}

// A complete directory with a temporary name, and optionally an old one that has its final name.
class DirectoryToPublish : public ::testing::Test {
 protected:
  DirectoryToPublish() {
    fs::create_directory(above_.file("new"));
    write_file(above_.file("new/file"), "new");
  }
  void has_old() {
    fs::create_directory(above_.file("name"));
    write_file(above_.file("name/file"), "old");
  }
  Publication publication() {
    const auto written = os::Directory::open(above_.file("new"));
    return {"new", "name", "aside", *written->identity()};
  }

  TempDir above_;
};

TEST_F(DirectoryToPublish, IsRenamed) {
  const auto outcome = publish(open_directory(above_), publication(), {});
  EXPECT_EQ(outcome.state, PublishState::published);
  EXPECT_EQ(above_.names(), (Names{"name", "name/file"}));
}

TEST_F(DirectoryToPublish, ReplacesAnOldDirectoryWhichIsMovedAside) {
  has_old();
  const auto outcome = publish(open_directory(above_), publication(), {});
  EXPECT_EQ(outcome.state, PublishState::published);
  EXPECT_EQ(read_file(above_.file("name/file")), "new");
  EXPECT_EQ(read_file(above_.file("aside/file")), "old");
  EXPECT_FALSE(fs::exists(above_.file("new")));
}

TEST_F(DirectoryToPublish, LeavesTheOldDirectoryInPlaceIfARenameFails) {
  for (int failing = 1; failing <= 2; ++failing) {
    TempDir above;
    for (const char* name : {"new", "name"}) {
      fs::create_directory(above.file(name));
      write_file(above.file(name) + "/file", name);
    }
    ScopedFaultHook hook(NthCallFails("rename", failing, EIO));
    const auto outcome = publish(open_directory(above), {"new", "name", "aside", {}}, {});
    EXPECT_EQ(outcome.state, PublishState::not_published) << "the name is taken";
    EXPECT_EQ(outcome.error.sys_errno, EIO);
    EXPECT_EQ(read_file(above.file("name/file")), "name");
    EXPECT_EQ(read_file(above.file("new/file")), "new");
  }
}

TEST_F(DirectoryToPublish, ReportsTheLocationOfTheOldDirectoryIfItCannotBeMovedBack) {
  has_old();
  int renames = 0;
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    return operation == "rename" && ++renames > 1 ? ENOSPC : 0;
  });
  const auto outcome = publish(open_directory(above_), publication(), {});
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_NE(outcome.error.detail.str().find("name is now named aside"), std::string::npos);
  EXPECT_EQ(read_file(above_.file("aside/file")), "old");
  EXPECT_EQ(read_file(above_.file("new/file")), "new");
}

TEST_F(DirectoryToPublish, IsPublishedByCompletedRenamesThatReportErrors) {
  has_old();
  const RenameWithAnError puts(above_.file("aside"), EIO,
                               [&] { fs::rename(above_.file("name"), above_.file("aside")); });
  const RenameWithAnError names(above_.file("name"), EIO,
                                [&] { fs::rename(above_.file("new"), above_.file("name")); });
  ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    const int put = puts(operation, path);
    return put != 0 ? put : names(operation, path);
  });
  const auto outcome = publish(open_directory(above_), publication(), {});
  EXPECT_EQ(outcome.state, PublishState::published) << outcome.error.message();
  EXPECT_EQ(read_file(above_.file("name/file")), "new");
  EXPECT_EQ(read_file(above_.file("aside/file")), "old");
}

TEST_F(DirectoryToPublish, IsUncertainAfterARenameWithAnAmbiguousError) {
  ScopedFaultHook hook(RenameWithAnError(above_.file("name"), ETIMEDOUT, {}));
  const auto outcome = publish(open_directory(above_), publication(), {});
  EXPECT_EQ(outcome.state, PublishState::durability_uncertain);
  EXPECT_EQ(outcome.error.sys_errno, ETIMEDOUT);
  EXPECT_EQ(read_file(above_.file("new/file")), "new");
}

TEST_F(DirectoryToPublish, MovesNothingAsideWithoutReplace) {
  has_old();
  const auto outcome = publish(open_directory(above_), publication(), {.replace = false});
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_EQ(outcome.error.code, Errc::invalid_argument);
  EXPECT_EQ(read_file(above_.file("name/file")), "old");
  EXPECT_EQ(read_file(above_.file("new/file")), "new");
}

TEST_F(DirectoryToPublish, IsNotPublishedIfAnotherDirectoryHasItsTemporaryName) {
  has_old();
  const Publication of = publication();
  fs::rename(above_.file("new"), above_.file("elsewhere"));
  fs::create_directory(above_.file("new"));
  const auto outcome = publish(open_directory(above_), of, {});
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_EQ(outcome.error.code, Errc::directory_moved);
  EXPECT_EQ(read_file(above_.file("name/file")), "old");
  EXPECT_FALSE(fs::exists(above_.file("aside")));
}

TEST_F(DirectoryToPublish, IsRolledBackIfAnotherDirectoryWasRenamedInItsPlace) {
  has_old();
  const Publication of = publication();
  int renames = 0;
  bool is_exchanged = false;
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "rename" && ++renames == 2 && !is_exchanged) {
      is_exchanged = true;
      fs::rename(above_.file("new"), above_.file("elsewhere"));
      fs::create_directory(above_.file("new"));
    }
    return 0;
  });
  const auto outcome = publish(open_directory(above_), of, {});
  EXPECT_TRUE(is_exchanged);
  EXPECT_EQ(outcome.error.code, Errc::directory_moved);
  EXPECT_EQ(read_file(above_.file("name/file")), "old");
  EXPECT_EQ(read_file(above_.file("elsewhere/file")), "new");
  EXPECT_TRUE(fs::is_empty(above_.file("new")));
}

TEST_F(DirectoryToPublish, IsUncertainIfTheLastFsyncFails) {
  ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    return operation == "fsync_directory" && path == above_.path() ? EIO : 0;
  });
  const auto outcome = publish(open_directory(above_), publication(), {});
  EXPECT_EQ(outcome.state, PublishState::durability_uncertain);
  EXPECT_EQ(read_file(above_.file("name/file")), "new");
}

TEST_F(DirectoryToPublish, DoesNotSyncDurableDirectoriesAbove) {
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    EXPECT_EQ(publish(open_directory(above_), publication(), {.sync_above = false}).state,
              PublishState::published);
  }
  EXPECT_EQ(counter.calls("fsync_directory"), 1);
}

TEST(PublishFile, WithoutReplaceKeepsAnExistingFile) {
  TempDir directory;
  write_file(directory.file("new"), "new");
  write_file(directory.file("name"), "old");
  const auto outcome =
      publish(open_directory(directory), {"new", "name", {}, {}}, {.replace = false});
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_EQ(outcome.error.sys_errno, EEXIST);
  EXPECT_EQ(read_file(directory.file("name")), "old");
}

TEST(PublishFile, IsPublishedByACompletedRenameThatReportsAnError) {
  TempDir directory;
  write_file(directory.file("new"), "new");
  ScopedFaultHook hook(RenameWithAnError(directory.file("name"), EIO, [&] {
    fs::rename(directory.file("new"), directory.file("name"));
  }));
  EXPECT_EQ(publish(open_directory(directory), {"new", "name", {}, {}}, {}).state,
            PublishState::published);
}

TEST(PublishFile, ReplacesAnExistingFile) {
  TempDir directory;
  write_file(directory.file("new"), "new");
  write_file(directory.file("name"), "old");
  EXPECT_EQ(publish(open_directory(directory), {"new", "name", {}, {}}, {}).state,
            PublishState::published);
  EXPECT_EQ(directory.names(), Names{"name"});
  EXPECT_EQ(read_file(directory.file("name")), "new");
}

}  // namespace
}  // namespace torch_ckpt::directory
