#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <string>

#include "directory/lease.h"
#include "directory/model_save.h"
#include "os/directory.h"
#include "support.h"

namespace torch_ckpt::directory {
namespace {

using namespace test;

using Names = std::vector<std::string>;

constexpr const char* kOther = "__0_5f0c19ab_0.distcp";

Result<> keep_waiting() { return {}; }

/// In these tests, metadata is the name of one file.
Result<std::set<std::string>> named(const os::Directory& directory, const std::string& name) {
  const std::string path = directory.path_of(name);
  if (!std::filesystem::exists(path)) return system_error(ENOENT, "open", path);
  return std::set{read_file(path)};
}

/// The lock of a process on another host, whose lock on the directory itself is invisible.
class ForeignLock {
 public:
  ForeignLock(const TempDir& directory, int kind)
      : fd_(::open(directory.file(std::string(os::kLockName)).c_str(), O_RDWR | O_CREAT, 0666)) {
    EXPECT_EQ(::flock(fd_, kind | LOCK_NB), 0);
  }
  ForeignLock(const ForeignLock&) = delete;
  ForeignLock& operator=(const ForeignLock&) = delete;
  ~ForeignLock() { ::close(fd_); }

 private:
  int fd_;
};

class NetworkDirectoryTest : public ::testing::Test {
 protected:
  NetworkDirectoryTest() { is_network_file_system = true; }
  ~NetworkDirectoryTest() override { is_network_file_system = false; }

  DirectoryLease take() {
    auto lease = DirectoryLease::take(open_directory(directory_), {}, 0.0, keep_waiting);
    EXPECT_TRUE(ok(lease));
    return std::move(*lease);
  }
  void has(const std::string& name, std::string_view contents = "") {
    write_file(directory_.file(name), contents);
  }
  /// Makes a file two hours older than the newest file.
  void age(const std::string& name) {
    const auto now = std::filesystem::file_time_type::clock::now();
    std::filesystem::last_write_time(directory_.file(name), now - std::chrono::hours(2));
  }
  /// Saves one file. Returns its name.
  std::string save() {
    DirectoryLease lease = take();
    std::string file = "__0_" + lease.tag() + "0.distcp";
    has(file, "new");
    const std::string_view contents = file;
    const auto outcome = lease.commit({&contents, 1}, {file}, {}, named, warnings_);
    EXPECT_EQ(outcome.state, PublishState::published);
    return file;
  }
  bool has_file(const std::string& name) { return std::filesystem::exists(directory_.file(name)); }

  TempDir directory_;
  Warnings warnings_;
};

TEST_F(NetworkDirectoryTest, IsLocalOnlyByTheTypeOfItsFileSystem) {
  EXPECT_FALSE(open_directory(directory_).is_local());
  is_network_file_system = false;
  EXPECT_TRUE(open_directory(directory_).is_local());
}

TEST_F(NetworkDirectoryTest, IsNotLockedIfAProcessOnAnotherHostHasTheLock) {
  const ForeignLock other(directory_, LOCK_EX);
  auto opened = open_directory(directory_);
  EXPECT_FALSE(*opened.try_share());
  EXPECT_FALSE(*opened.try_lock_exclusive());
}

TEST_F(NetworkDirectoryTest, IsLockedAlthoughAnotherHostCreatesTheLockFileAtTheSameTime) {
  has(".lock");
  has_racing_host = true;
  const auto is_locked = open_directory(directory_).try_lock_exclusive();
  has_racing_host = false;
  EXPECT_TRUE(ok(is_locked) && *is_locked);
}

TEST_F(NetworkDirectoryTest, AFileIsOpenedAlthoughAnotherHostCreatesItAtTheSameTime) {
  has(kOther, "of the other host");
  has_racing_host = true;
  const auto opened = open_directory(directory_).open_or_create(kOther, os::IoMode::buffered);
  has_racing_host = false;
  EXPECT_TRUE(ok(opened));
  EXPECT_EQ(read_file(directory_.file(kOther)), "of the other host");
}

TEST_F(NetworkDirectoryTest, IsLockedOnlyByTheFileThatItHasNow) {
  auto opened = open_directory(directory_);
  ASSERT_TRUE(*opened.try_lock_exclusive());
  std::filesystem::rename(directory_.file(".lock"), directory_.file("replaced"));
  has(".lock");
  EXPECT_FALSE(*opened.try_lock_exclusive());
  EXPECT_TRUE(*opened.try_lock_exclusive());
}

TEST_F(NetworkDirectoryTest, LookingUpANameAgainCreatesNothing) {
  open_directory(directory_).refresh("absent");
  EXPECT_FALSE(has_file("absent"));
}

TEST_F(NetworkDirectoryTest, IsSharedWithALoadOnAnotherHost) {
  const ForeignLock other(directory_, LOCK_SH);
  auto opened = open_directory(directory_);
  EXPECT_TRUE(*opened.try_share());
  EXPECT_FALSE(*opened.try_lock_exclusive());
}

TEST_F(NetworkDirectoryTest, AFailedLockLeavesTheDirectoryUnlocked) {
  auto opened = open_directory(directory_);
  {
    const ForeignLock other(directory_, LOCK_EX);
    EXPECT_FALSE(*opened.try_share());
  }
  EXPECT_TRUE(*open_directory(directory_).try_lock_exclusive());
}

TEST_F(NetworkDirectoryTest, OnlyTheExclusiveLockCreatesAFile) {
  EXPECT_TRUE(*open_directory(directory_).try_share());
  EXPECT_EQ(directory_.names(), Names());
  EXPECT_TRUE(*open_directory(directory_).try_lock_exclusive());
  EXPECT_EQ(directory_.names(), (Names{".lock"}));
}

TEST_F(NetworkDirectoryTest, ALockOnARemovedFileDoesNotExclude) {
  const ForeignLock other(directory_, LOCK_EX);
  auto opened = open_directory(directory_);
  EXPECT_FALSE(*opened.try_lock_exclusive());
  std::filesystem::remove(directory_.file(".lock"));
  EXPECT_TRUE(*opened.try_lock_exclusive());
}

TEST_F(NetworkDirectoryTest, ALocalDirectoryGetsNoFile) {
  is_network_file_system = false;
  EXPECT_TRUE(*open_directory(directory_).try_lock_exclusive());
  EXPECT_EQ(directory_.names(), Names());
}

TEST_F(NetworkDirectoryTest, EverySaveHasATag) { EXPECT_EQ(take().tag().size(), 9); }

TEST_F(NetworkDirectoryTest, ACommitSparesTheFilesOfASaveOnAnotherHost) {
  has(kOther, "being written");
  has(".metadata.tmp-0123456789abcdef0123456789abcdef");
  save();
  EXPECT_TRUE(has_file(kOther));
  EXPECT_TRUE(has_file(".metadata.tmp-0123456789abcdef0123456789abcdef"));
}

TEST_F(NetworkDirectoryTest, ACommitRemovesFilesThatAreAnHourOlder) {
  has(kOther, "left by a dead save");
  age(kOther);
  save();
  EXPECT_FALSE(has_file(kOther));
}

TEST_F(NetworkDirectoryTest, ACommitRemovesTheFilesOfTheCheckpointThatItReplaces) {
  const std::string replaced = save();
  const std::string current = save();
  EXPECT_FALSE(has_file(replaced));
  EXPECT_TRUE(has_file(current));
}

TEST_F(NetworkDirectoryTest, AFailedSaveRemovesOnlyItsOwnFiles) {
  has(kOther, "being written");
  DirectoryLease lease = take();
  const std::string own = "__3_" + lease.tag() + "0.distcp";
  has(own);
  lease.discard(named, warnings_);
  EXPECT_FALSE(has_file(own));
  EXPECT_TRUE(has_file(kOther));
}

TEST_F(NetworkDirectoryTest, LeftoversAreRemovedAfterAnHour) {
  const std::string old = "__1_0.distcp";
  save();
  has(kOther);
  has(old);
  age(old);
  auto opened = open_directory(directory_);
  const auto removed = remove_leftovers(opened, named);
  ASSERT_TRUE(ok(removed));
  EXPECT_EQ(**removed, (Names{old}));
}

TEST_F(NetworkDirectoryTest, AModelThatIsBeingSavedIsNoLeftover) {
  const os::Directory parent = open_directory(directory_);
  auto first = ModelSave::begin(parent, "model", false, {}, warnings_);
  ASSERT_TRUE(ok(first));
  auto second = ModelSave::begin(parent, "model", false, {}, warnings_);
  ASSERT_TRUE(ok(second));
  EXPECT_TRUE(has_file(first->temporary()));
  EXPECT_EQ(warnings_, Warnings());
}

}  // namespace
}  // namespace torch_ckpt::directory
