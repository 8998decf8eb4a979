#include "directory/version.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include "directory/step.h"
#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::directory {
namespace {

namespace fs = std::filesystem;
using namespace test;

class LatestTest : public DirectoryTest {
 protected:
  void add(const std::string& name, bool is_complete = true) {
    fs::create_directory(directory_.file(name));
    if (is_complete) write_file(directory_.file(name + "/" + std::string(kMarkerName)), "{}");
  }

  /// Returns the target of the link; "-" if there is none.
  std::string latest() const {
    const fs::path link = directory_.file("latest");
    return fs::is_symlink(link) ? fs::read_symlink(link).string() : "-";
  }

  os::Directory root_ = open_directory(directory_);
};

TEST_F(LatestTest, LeadsToTheNewestCompleteVersion) {
  EXPECT_TRUE(ok(update_latest(root_, true)));
  EXPECT_EQ(latest(), "-");
  add("0000000009");
  add("0000000010");
  add("0000000011", false);
  add("0000000012.tmp-0123abcd");
  write_file(directory_.file("0000000013"), "a file");
  EXPECT_TRUE(ok(update_latest(root_, true)));
  EXPECT_EQ(latest(), "0000000010");
  add("0000000014");
  EXPECT_TRUE(ok(update_latest(root_, true)));
  EXPECT_EQ(latest(), "0000000014");
}

TEST_F(LatestTest, IsNotWrittenAgainIfUpToDate) {
  add("0000000001");
  EXPECT_TRUE(ok(update_latest(root_, true)));
  CallCounter counter;
  const os::ScopedFaultHook hook(counter);
  EXPECT_TRUE(ok(update_latest(root_, true)));
  EXPECT_EQ(counter.calls("symlink"), 0);
}

TEST_F(LatestTest, DoesNotReplaceWhatIsNotALink) {
  add("0000000001");
  write_file(directory_.file("latest"), "precious");
  const auto refused = update_latest(root_, true);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().sys_errno, EEXIST);
  EXPECT_EQ(read_file(directory_.file("latest")), "precious");
}

TEST_F(LatestTest, RemovesLeftoversOfInterruptedUpdates) {
  add("0000000001");
  fs::create_symlink("0000000000", directory_.file(".latest.tmp-" + std::string(32, 'a')));
  EXPECT_TRUE(ok(update_latest(root_, true)));
  EXPECT_EQ(directory_.names(),
            (std::vector<std::string>{"0000000001", "0000000001/write_completed", "latest"}));
}

TEST_F(LatestTest, LeadsToTheOldOrTheNewVersionAfterAFailedCall) {
  add("0000000001");
  ASSERT_TRUE(ok(update_latest(root_, true)));
  add("0000000002");
  for (const char* call : {"readdir", "readlink", "symlink", "rename", "fsync_directory"}) {
    const NthCallFails fault(call, 1, EIO);
    {
      const os::ScopedFaultHook hook(fault);
      EXPECT_FALSE(update_latest(root_, true)) << call;
    }
    EXPECT_TRUE(fault.hit()) << call;
    const bool is_moved = std::string(call) == "fsync_directory";
    EXPECT_EQ(latest(), is_moved ? "0000000002" : "0000000001") << call;
    EXPECT_EQ(directory_.names().size(), 5) << call;
  }
}

}  // namespace
}  // namespace torch_ckpt::directory
