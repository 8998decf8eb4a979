#include "os/fault.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <latch>
#include <thread>

#include "support.h"

namespace torch_ckpt::os {
namespace {

TEST(FaultHook, WithoutAHookNoCallFails) { EXPECT_EQ(injected_fault("open", "/a"), 0); }

TEST(FaultHook, ReceivesOperationAndPath) {
  ScopedFaultHook hook([](std::string_view operation, std::string_view path) {
    return operation == "open" && path == "/a" ? EACCES : 0;
  });
  EXPECT_EQ(injected_fault("open", "/a"), EACCES);
  EXPECT_EQ(injected_fault("open", "/b"), 0);
  EXPECT_EQ(injected_fault("close", "/a"), 0);
}

TEST(FaultHook, EndsWithItsScope) {
  {
    ScopedFaultHook hook([](auto, auto) { return EIO; });
  }
  EXPECT_EQ(injected_fault("open", "/a"), 0);
}

TEST(FaultHook, MayWaitForAHookOfAnotherThread) {
  std::latch both(2);
  ScopedFaultHook hook([&](auto, auto) {
    both.arrive_and_wait();
    return 0;
  });
  std::thread other([] { EXPECT_EQ(injected_fault("open", "/a"), 0); });
  EXPECT_EQ(injected_fault("open", "/b"), 0);
  other.join();
}

TEST(FaultHook, FailsOnlyTheNthCall) {
  test::NthCallFails fault("open", 2, EIO);
  ScopedFaultHook hook(fault);
  EXPECT_EQ(injected_fault("open", "/a"), 0);
  EXPECT_FALSE(fault.hit());
  EXPECT_EQ(injected_fault("close", "/a"), 0);
  EXPECT_EQ(injected_fault("open", "/b"), EIO);
  EXPECT_TRUE(fault.hit());
  EXPECT_EQ(fault.path(), "/b");
  EXPECT_EQ(injected_fault("open", "/c"), 0);
}

}  // namespace
}  // namespace torch_ckpt::os
