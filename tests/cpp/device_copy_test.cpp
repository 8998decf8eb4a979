#include "staging/device_copy.h"

#include <gtest/gtest.h>

#include "fake_device.h"
#include "support.h"

namespace torch_ckpt::staging {
namespace {

using test::ok;

TEST(DeviceCopy, WithoutADeviceThereIsNoSupport) {
  test::NoDevice none;
  EXPECT_EQ(device_support(), nullptr);
}

TEST(DeviceCopy, TheRegisteredSupportIsUsed) {
  test::FakeDevice device;
  const Source source = device.upload("0123456789");
  ASSERT_NE(device_support(), nullptr);
  auto copier = device_support()->make_copier({});
  std::string out(4, '?');
  const DeviceRun run{&source, 3, std::as_writable_bytes(std::span(out))};
  ASSERT_TRUE(ok(copier->submit({&run, 1})));
  ASSERT_TRUE(ok(copier->wait_oldest()));
  EXPECT_EQ(out, "3456");
  EXPECT_EQ(device.copiers(), 1);
}

}  // namespace
}  // namespace torch_ckpt::staging
