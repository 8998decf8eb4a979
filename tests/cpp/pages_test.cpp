#include "os/pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::os {
namespace {

using test::ok;

TEST(Pages, AreAlignedWritableAndPopulated) {
  auto pages = Pages::allocate(16384);
  ASSERT_TRUE(ok(pages));
  ASSERT_EQ(pages->bytes().size(), 16384);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pages->bytes().data()) % 4096, 0);
  unsigned char resident[4] = {};
  ASSERT_EQ(::mincore(pages->bytes().data(), 16384, resident), 0);
  for (const unsigned char page : resident) EXPECT_EQ(page & 1, 1);
  pages->bytes().back() = std::byte{1};
}

TEST(Pages, AreUnmappedByTheirLastOwner) {
  auto first = Pages::allocate(4096);
  ASSERT_TRUE(ok(first));
  std::byte* address = first->bytes().data();
  {
    Pages second(std::move(*first));
    EXPECT_EQ(second.bytes().data(), address);
    Pages third;
    third = std::move(second);
    EXPECT_EQ(third.bytes().data(), address);
  }
  unsigned char resident = 0;
  EXPECT_EQ(::mincore(address, 4096, &resident), -1);
  EXPECT_EQ(errno, ENOMEM);
}

TEST(Pages, AFailedAllocationReportsItsSize) {
  const auto pages = Pages::allocate(std::size_t{1} << 62);
  ASSERT_FALSE(pages.has_value());
  EXPECT_TRUE(test::is_system_error(pages.error(), ENOMEM, "mmap", ""));
  EXPECT_NE(pages.error().message().find("allocate 4611686018427387904 bytes"), std::string::npos);
}

TEST(Pages, OfTwoMebibytesAreAlignedForHugePages) {
  for (const std::size_t mebibytes : {2, 4, 6}) {
    auto pages = Pages::allocate(mebibytes << 20);
    ASSERT_TRUE(ok(pages));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pages->bytes().data()) % (2 << 20), 0);
    pages->bytes().front() = std::byte{1};
    pages->bytes().back() = std::byte{1};
  }
}

TEST(Pages, AFaultIsReported) {
  ScopedFaultHook hook(test::NthCallFails("mmap", 1, ENOMEM));
  const auto pages = Pages::allocate(4096);
  ASSERT_FALSE(pages.has_value());
  EXPECT_TRUE(test::is_system_error(pages.error(), ENOMEM, "mmap", ""));
}

TEST(Pages, AreNotUnmappedInAForkedChild) {
  auto pages = Pages::allocate(4096);
  ASSERT_TRUE(ok(pages));
  const pid_t child = ::fork();
  if (child == 0) {
    // The child does not inherit the pages and maps other memory at their address.
    void* const own = ::mmap(pages->bytes().data(), 4096, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    { const Pages gone(std::move(*pages)); }
    unsigned char resident = 0;
    ::_exit(::mincore(own, 4096, &resident) == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace torch_ckpt::os
