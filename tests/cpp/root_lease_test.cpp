#include "directory/root_lease.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "directory/root_lock.h"
#include "os/fault.h"
#include "os/process.h"
#include "support.h"

namespace torch_ckpt::directory {
namespace {

namespace fs = std::filesystem;
using namespace test;

/// Times without waits: a lease of another host is declared dead at once.
constexpr LeaseTimes kUsual{.renew_s = 10.0, .expiry_s = 60.0};
constexpr LeaseTimes kAtOnce{.renew_s = 10.0, .expiry_s = -1.0};

class RootLeaseTest : public ::testing::Test {
 protected:
  Result<std::shared_ptr<RootLease>> try_take(bool takeover = false, LeaseTimes times = kUsual) {
    LeaseRequest request(root_.file("run"), takeover, times);
    return request.try_take();
  }
  std::string path() const { return root_.file("run/.lease"); }
  /// Writes the lease of another process.
  void has(std::string_view record) {
    fs::create_directories(root_.file("run"));
    write_file(path(), record);
  }
  static std::string space() {
    const os::ProcessSpace own = os::own_process_space();
    return R"("host": ")" + own.host + R"(", "boot": ")" + own.boot + R"(", "pids": ")" + own.pids +
           R"(")";
  }

  TempDir root_;
};

TEST_F(RootLeaseTest, TheLastReleaseRemovesTheLeaseAndTheRoot) {
  const auto lease = try_take();
  ASSERT_TRUE(ok(lease));
  EXPECT_TRUE(ok((*lease)->require()));
  const auto again = try_take();
  ASSERT_TRUE(ok(again));
  EXPECT_EQ(*again, *lease);
  (*again)->release();
  EXPECT_TRUE(fs::exists(path()));
  (*lease)->release();
  EXPECT_FALSE(fs::exists(root_.file("run")));
  (*lease)->release();
}

TEST_F(RootLeaseTest, ARootWithAStepStays) {
  const auto lease = try_take();
  ASSERT_TRUE(ok(lease));
  fs::create_directory(root_.file("run/0000000001"));
  (*lease)->release();
  EXPECT_EQ(root_.names(), (std::vector<std::string>{"run", "run/0000000001"}));
}

TEST_F(RootLeaseTest, ARunningProcessIsNamedWithItsTime) {
  const os::ProcessId parent{::getppid(), 0};
  // The start time of the parent is read as this process reads its own.
  const std::string stat = read_file("/proc/" + std::to_string(parent.number) + "/stat");
  std::istringstream fields(stat.substr(stat.rfind(')') + 1));
  std::string start;
  for (int field = 3; field <= 22; ++field) fields >> start;
  has("{" + space() + R"(, "pid": )" + std::to_string(parent.number) + R"(, "start": ")" + start +
      R"(", "began_at": 1000000000.5})");
  const auto taken = try_take();
  ASSERT_TRUE(fails(taken, Errc::root_in_use));
  const std::string message = taken.error().message();
  EXPECT_NE(message.find("process " + std::to_string(parent.number) + " on host "),
            std::string::npos);
  EXPECT_NE(message.find(", since Sun Sep  9 "), std::string::npos) << message;
  const auto takeover = try_take(true);
  ASSERT_TRUE(ok(takeover));
  (*takeover)->release();
}

TEST_F(RootLeaseTest, TheLeaseOfADeadOrReplacedProcessIsTaken) {
  const std::string own = std::to_string(os::own_process().number);
  for (const std::string& fields :
       {std::string(R"(, "pid": 1, "start": "1")"), R"(, "pid": )" + own + R"(, "start": "1")",
        std::string(R"(, "pid": "none", "start": "1")"), std::string(R"(, "pid": 1)"),
        std::string(R"(, "pid": 1, "start": null)")}) {
    has("{" + space() + fields + "}");
    const auto taken = try_take();
    ASSERT_TRUE(ok(taken)) << fields;
    ASSERT_NE(*taken, nullptr) << fields;
    (*taken)->release();
  }
}

TEST_F(RootLeaseTest, TheLeaseOfAnotherHostIsTakenOnceItHasExpired) {
  has(R"({"host": "else\u0077here", "pid": 123})");
  LeaseRequest request(root_.file("run"), false, kUsual);
  const auto waits = request.try_take();
  ASSERT_TRUE(ok(waits));
  EXPECT_EQ(*waits, nullptr);
  EXPECT_EQ(request.holder(), "process 123 on host elsewhere");
  EXPECT_EQ(root_.names(), (std::vector<std::string>{"run", "run/.lease"}));
  const auto taken = try_take(false, kAtOnce);
  ASSERT_TRUE(ok(taken));
  ASSERT_NE(*taken, nullptr);
  (*taken)->release();
}

TEST_F(RootLeaseTest, ALeaseThatIsTouchedBetweenTwoTriesIsAlive) {
  has(R"({"host": "elsewhere", "pid": 123})");
  LeaseRequest request(root_.file("run"), false, kUsual);
  EXPECT_EQ(*request.try_take(), nullptr);
  EXPECT_EQ(*request.try_take(), nullptr);
  fs::last_write_time(path(), fs::last_write_time(path()) + std::chrono::seconds(1));
  EXPECT_TRUE(fails(request.try_take(), Errc::root_in_use));
}

TEST_F(RootLeaseTest, AnythingButARecordIsNoLeaseOfARun) {
  for (const std::string& contents :
       {std::string(), std::string("[1]"), std::string("\xff"), std::string(100'000, '{'),
        std::string(R"({"host)"), std::string(R"({"host": )"), std::string(R"({"a": "\u12"})"),
        std::string(R"({"a": {"b": 1}})"), std::string("{}"), std::string(R"({"a": "b")")}) {
    has(contents);
    const auto taken = try_take();
    ASSERT_TRUE(ok(taken)) << contents.substr(0, 20);
    ASSERT_NE(*taken, nullptr) << contents.substr(0, 20);
    EXPECT_NE(read_file(path()).find("\"pid\": "), std::string::npos);
    (*taken)->release();
  }
}

TEST_F(RootLeaseTest, ALockedLeaseIsAlive) {
  has(R"({"host": "elsewhere", "pid": 123})");
  auto held = open_for_read(path());
  ASSERT_TRUE(ok(held));
  ASSERT_TRUE(*held->try_lock());
  EXPECT_TRUE(fails(try_take(false, kAtOnce), Errc::root_in_use));
}

TEST_F(RootLeaseTest, ATakenOverLeaseIsNoLongerHeldAndStays) {
  const auto lease = try_take();
  ASSERT_TRUE(ok(lease));
  fs::remove(path());
  EXPECT_TRUE(ok((*lease)->require()));
  has(R"({"host": "elsewhere", "pid": 123})");
  const auto held = (*lease)->require();
  ASSERT_TRUE(fails(held, Errc::root_in_use));
  EXPECT_NE(held.error().message().find("process 123 on host elsewhere has taken over"),
            std::string::npos);
  (*lease)->release();
  EXPECT_TRUE(fs::exists(path()));
}

TEST_F(RootLeaseTest, ALeaseIsTouchedUntilItIsReleased) {
  const auto lease = try_take(false, {.renew_s = 0.001});
  ASSERT_TRUE(ok(lease));
  const auto long_ago = fs::file_time_type::clock::now() - std::chrono::hours(1);
  fs::last_write_time(path(), long_ago);
  while (fs::last_write_time(path()) <= long_ago) std::this_thread::yield();
  (*lease)->release();
}

TEST_F(RootLeaseTest, AFailedCallLeavesNoLeaseAndNoTemporaryFile) {
  fs::create_directory(root_.file("run"));
  write_file(root_.file("run/.lease.5f0c19ab"), "of a killed process");
  int failures = 0;
  for (const std::string operation : {"open_directory", "open", "pwrite", "fsync", "rename",
                                      "statx", "pthread_create", "flock"}) {
    const NthCallFails fails_once(operation, 1, EIO);
    {
      const os::ScopedFaultHook hook(fails_once);
      const auto taken = try_take();
      EXPECT_FALSE(taken) << operation;
    }
    failures += fails_once.hit() ? 1 : 0;
    if (failures > 3) {
      EXPECT_EQ(root_.names(), std::vector<std::string>{"run"}) << operation;
    }
  }
  EXPECT_EQ(failures, 8);
}

TEST(RootLock, AfterItsPatienceTheSecondRunsWithoutIt) {
  TempDir directory;
  auto first = RootLock::take(open_directory(directory));
  ASSERT_TRUE(ok(first));
  EXPECT_TRUE(first->is_held());
  const auto second = RootLock::take(open_directory(directory));
  ASSERT_TRUE(ok(second));
  EXPECT_FALSE(second->is_held());
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

}  // namespace
}  // namespace torch_ckpt::directory
