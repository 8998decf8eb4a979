#include "os/cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <thread>

#include "support.h"

namespace torch_ckpt::os {
namespace {

class Cores : public ::testing::Test {
 protected:
  void add(const std::string& group, const std::string& name, std::string_view contents) {
    std::filesystem::create_directories(directory_.file(group));
    test::write_file(directory_.file(group) + "/" + name, std::string(contents));
  }
  std::optional<std::size_t> find(std::string_view groups) const {
    return cores_of_quota(groups, directory_.path());
  }

  test::TempDir directory_;
};

TEST_F(Cores, RoundUpTheQuota) {
  add("", "cpu.max", "250000 100000\n");
  EXPECT_EQ(find("0::/\n"), 3);
  add("", "cpu.max", "10000 100000\n");
  EXPECT_EQ(find("0::/\n"), 1);
}

TEST_F(Cores, UseTheSmallestQuotaOfTheAncestors) {
  add("a", "cpu.max", "200000 100000\n");
  add("a/b", "cpu.max", "max 100000\n");
  add("a/b/c", "cpu.max", "800000 100000\n");
  EXPECT_EQ(find("0::/a/b/c\n"), 2);
  EXPECT_EQ(find("0::/a/b\n"), 2);
  EXPECT_EQ(find("0::/\n"), std::nullopt);
}

TEST_F(Cores, AreReadFromTheRootIfTheGroupIsNotMounted) {
  add("", "cpu.max", "400000 100000\n");
  EXPECT_EQ(find("0::/docker/0123\n"), 4);
}

TEST_F(Cores, AreThoseOfAQuotaOfVersionOne) {
  add("cpu/job", "cpu.cfs_quota_us", "350000\n");
  add("cpu/job", "cpu.cfs_period_us", "100000\n");
  add("cpu", "cpu.cfs_quota_us", "-1\n");
  add("cpu", "cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(find("5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n"), 4);
  EXPECT_EQ(find("4:cpuacct,cpuset:/job\n"), std::nullopt);
}

TEST_F(Cores, AreNotLimitedByAnUnreadableQuota) {
  EXPECT_EQ(find(""), std::nullopt);
  EXPECT_EQ(find("nothing\n0:\n0::\n"), std::nullopt);
  for (const std::string_view contents : {"", "\n", "max", "x y", "-5 100000", "100000 0"}) {
    add("", "cpu.max", contents);
    EXPECT_EQ(find("0::/\n"), std::nullopt) << contents;
  }
}

TEST_F(Cores, AreLimitedByTheAffinityMask) {
  cpu_set_t all;
  ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
  // On a new thread, so that other tests keep their mask.
  std::jthread([&] {
    for (int core = 0, left = 1; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &all) && left-- <= 0) CPU_CLR(core, &all);
    }
    ASSERT_EQ(::sched_setaffinity(0, sizeof all, &all), 0);
    EXPECT_EQ(usable_cores(), 1);
  });
}

}  // namespace
}  // namespace torch_ckpt::os
