#include "os/shared_memory.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::os {
namespace {

using namespace test;

TEST(SharedMemory, IsSharedByAllProcessesThatMapTheFile) {
  const auto file = MemoryFile::create().value();
  const auto mine = SharedMemory::map(file.address(), 10000).value();
  EXPECT_TRUE(std::ranges::all_of(mine.bytes(), [](std::byte b) { return b == std::byte{}; }));
  const pid_t child = ::fork();
  if (child == 0) {
    const auto other = SharedMemory::map(file.address(), 10000);
    if (other) other->bytes()[9999] = std::byte{7};
    ::_exit(other ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(mine.bytes()[9999], std::byte{7});
}

TEST(SharedMemory, OutlivesItsFile) {
  auto file = std::make_unique<MemoryFile>(MemoryFile::create().value());
  const auto memory = SharedMemory::map(file->address(), 4096).value();
  file.reset();
  memory.bytes()[0] = std::byte{1};
  EXPECT_EQ(memory.bytes()[0], std::byte{1});
}

TEST(SharedMemory, IsNotAnotherFileWithTheSameDescriptor) {
  auto file = std::make_unique<MemoryFile>(MemoryFile::create().value());
  const MemoryFile::Address address = file->address();
  file.reset();
  const auto other = MemoryFile::create().value();
  ASSERT_EQ(other.address().descriptor, address.descriptor);
  EXPECT_TRUE(fails(SharedMemory::map(address, 4096), Errc::system));
}

TEST(SharedMemory, FailsAtEachCallThatFails) {
  const auto file = MemoryFile::create().value();
  for (const char* operation : {"open", "statx", "fallocate", "mmap"}) {
    const ScopedFaultHook hook(NthCallFails(operation, 1, ENOMEM));
    EXPECT_TRUE(fails(SharedMemory::map(file.address(), 4096), Errc::system)) << operation;
  }
  const ScopedFaultHook hook(NthCallFails("memfd_create", 1, EMFILE));
  EXPECT_TRUE(fails(MemoryFile::create(), Errc::system));
}

TEST(MemoryFile, IsRefusedIfOthersCannotOpenTheProcess) {
  ASSERT_EQ(::prctl(PR_SET_DUMPABLE, 0), 0);
  const auto file = MemoryFile::create();
  ASSERT_EQ(::prctl(PR_SET_DUMPABLE, 1), 0);
  EXPECT_TRUE(fails(file, Errc::system));
}

}  // namespace
}  // namespace torch_ckpt::os
