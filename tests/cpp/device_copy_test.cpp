#include "staging/device_copy.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "fake_device.h"
#include "staging/chunk_pool.h"
#include "support.h"

namespace torch_ckpt::staging {
namespace {

using test::ok;

TEST(DeviceCopy, HasNoSupportWithoutADevice) {
  test::NoDevice none;
  EXPECT_EQ(device_support(), nullptr);
}

TEST(DeviceCopy, UsesTheRegisteredSupport) {
  test::FakeDevice device;
  const Source source = device.upload("0123456789");
  ASSERT_NE(device_support(), nullptr);
  auto copier = device_support()->make_copier({}, {});
  std::string out(4, '?');
  const DeviceRun run{&source, 3, std::as_writable_bytes(std::span(out))};
  ASSERT_TRUE(ok(copier->submit({&run, 1})));
  ASSERT_TRUE(ok(copier->wait_oldest()));
  EXPECT_EQ(out, "3456");
  EXPECT_EQ(device.copiers(), 1);
}

// Other tests rely on this behaviour of the fake device to detect memory that is reused too early.
TEST(DeviceCopy, ReadsHostMemoryAsLateAsTheWait) {
  test::FakeDevice device;
  auto chunk = Chunk::allocate(4096);
  ASSERT_TRUE(ok(chunk));
  ASSERT_TRUE(ok((*chunk)->pin(0)));
  std::byte* const out = device.allocate(5);
  const auto memory = (*chunk)->bytes().first(3);
  std::memcpy(memory.data(), "abc", 3);
  const HostRun run{memory, out + 1, 0};
  auto copier = device_support()->make_copier({}, {});
  ASSERT_TRUE(ok(copier->submit_to_device({&run, 1})));
  EXPECT_EQ(device.contents(out), "?????");
  std::memcpy(memory.data(), "xyz", 3);
  ASSERT_TRUE(ok(copier->wait_oldest()));
  EXPECT_EQ(device.contents(out), "?xyz?");
}

TEST(DeviceCopy, DetectsMemoryThatIsNotPinned) {
  test::FakeDevice device;
  const std::string text = "abc";
  const HostRun run{test::bytes_of(text), device.allocate(3), 0};
  auto copier = device_support()->make_copier({}, {});
  EXPECT_NONFATAL_FAILURE(static_cast<void>(copier->submit_to_device({&run, 1})), "not pinned");
}

TEST(DeviceCopy, DetectsCopiesOutsideTheAllocation) {
  test::FakeDevice device;
  auto chunk = Chunk::allocate(4096);
  ASSERT_TRUE(ok(chunk));
  ASSERT_TRUE(ok((*chunk)->pin(0)));
  const HostRun run{(*chunk)->bytes().first(3), device.allocate(3) + 1, 0};
  auto copier = device_support()->make_copier({}, {});
  EXPECT_NONFATAL_FAILURE(static_cast<void>(copier->submit_to_device({&run, 1})), "outside");
}

}  // namespace
}  // namespace torch_ckpt::staging
