#include "directory/root_lock.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::directory {
namespace {

using namespace test;

TEST(RootLock, AfterItsPatienceTheSecondRunsWithoutIt) {
  TempDir directory;
  auto first = RootLock::take(open_directory(directory));
  ASSERT_TRUE(ok(first));
  EXPECT_TRUE(first->is_held());
  const auto second = RootLock::take(open_directory(directory), std::chrono::milliseconds(1));
  ASSERT_TRUE(ok(second));
  EXPECT_FALSE(second->is_held());
  first->release();
  const auto third = RootLock::take(open_directory(directory));
  ASSERT_TRUE(ok(third));
  EXPECT_TRUE(third->is_held());
}

TEST(RootLock, AFileSystemWithoutLocksNeedsNone) {
  TempDir directory;
  const auto opened = open_directory(directory);
  flock_errors = {ENOSYS};
  const auto lock = RootLock::take(opened);
  flock_errors = {};
  ASSERT_TRUE(ok(lock));
  EXPECT_TRUE(lock->is_held());
}

TEST(RootLease, IsRequiredToHaveExactlyTheExpectedBytes) {
  TempDir directory;
  const auto root = open_directory(directory);
  EXPECT_TRUE(ok(require_lease(root, std::nullopt)));
  EXPECT_TRUE(ok(require_lease(root, "")));
  EXPECT_TRUE(fails(require_lease(root, "mine"), Errc::root_in_use));
  write_file(directory.file(".lease"), "mine");
  EXPECT_TRUE(ok(require_lease(root, "mine")));
  for (const std::string other : {"", "min", "mine!", "other"}) {
    EXPECT_TRUE(fails(require_lease(root, other), Errc::root_in_use)) << other;
  }
}

TEST(RootLease, ThatCannotBeReadIsNotMissing) {
  TempDir directory;
  const auto root = open_directory(directory);
  write_file(directory.file(".lease"), "mine");
  const NthCallFails fails_once("open", 1, EIO);
  const os::ScopedFaultHook hook(fails_once);
  EXPECT_EQ(require_lease(root, "").error().sys_errno, EIO);
}

}  // namespace
}  // namespace torch_ckpt::directory
