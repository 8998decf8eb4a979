#include "os/priority.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <latch>
#include <thread>

namespace torch_ckpt::os {
namespace {

// The priority of the calling thread.
int nice_now() { return ::getpriority(PRIO_PROCESS, 0); }
int io_class_now() { return static_cast<int>(::syscall(SYS_ioprio_get, 1, 0)) >> 13; }
constexpr int kIdleClass = 3;

// Each test runs in a thread of its own, because a thread cannot raise its priority again.
void in_thread(const std::function<void()>& body) { std::jthread{body}; }

TEST(Priority, IsLoweredToTheRequestedNiceness) {
  in_thread([] {
    const int before = nice_now();
    lower_priority({7, false});
    EXPECT_EQ(nice_now(), std::max(before, 7));
    lower_priority({19, false});
    EXPECT_EQ(nice_now(), 19);
  });
}

TEST(Priority, IsNeverRaised) {
  in_thread([] {
    lower_priority({10, true});
    const int before = nice_now();
    lower_priority({5, false});
    EXPECT_EQ(nice_now(), before);
    lower_priority({});
    EXPECT_EQ(nice_now(), before);
    EXPECT_EQ(io_class_now(), kIdleClass);
  });
}

TEST(Priority, OfDiskAccessIsLoweredToTheIdleClass) {
  in_thread([] {
    const int nice = nice_now();
    lower_priority({0, true});
    EXPECT_EQ(io_class_now(), kIdleClass);
    EXPECT_EQ(nice_now(), nice);
  });
}

TEST(Priority, OfDiskAccessIsUnchangedByDefault) {
  in_thread([] {
    const int before = io_class_now();
    lower_priority({19, false});
    EXPECT_EQ(io_class_now(), before);
  });
}

TEST(Priority, IsUnchangedByTheDefault) {
  in_thread([] {
    const int nice = nice_now();
    const int io_class = io_class_now();
    lower_priority({});
    EXPECT_EQ(nice_now(), nice);
    EXPECT_EQ(io_class_now(), io_class);
  });
}

TEST(Priority, IsLimitedToTheLowest) {
  in_thread([] {
    lower_priority({100, false});
    EXPECT_EQ(nice_now(), 19);
  });
}

TEST(Priority, IsLoweredOnlyForTheCallingThread) {
  const int nice = nice_now();
  const int io_class = io_class_now();
  std::latch lowered(1);
  std::latch compared(1);
  const std::jthread other([&] {
    lower_priority({19, true});
    lowered.count_down();
    compared.wait();
  });
  lowered.wait();
  EXPECT_EQ(nice_now(), nice);
  EXPECT_EQ(io_class_now(), io_class);
  compared.count_down();
}

}  // namespace
}  // namespace torch_ckpt::os
