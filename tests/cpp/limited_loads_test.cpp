#include "engine/limited_loads.h"

#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <string>
#include <vector>

#include "fake_device.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using test::fails;
using test::ok;

constexpr std::uint64_t kLimit = LimitedLoads::kMinScratchBytes + 100;

class LimitedLoadsTest : public ::testing::Test {
 protected:
  LimitedLoadsTest() { test::write_file(temporary_.file("data"), std::string(1000, 'x')); }

  Result<LimitedLoads> loads(std::uint64_t limit) {
    LoadOptions options;
    options.max_scratch_bytes = limit;
    return LimitedLoads::make(context(), directory_, {{"data", {}}}, options,
                              [](LoadSession& session, std::uint64_t) {
                                while (!session.wait_for(std::chrono::hours(1))) {
                                }
                              });
  }
  static ReadRequest record(std::uint64_t offset, std::uint64_t length) {
    ReadRequest request;
    request.offset = offset;
    request.length = length;
    request.region = planning::Region::of_bytes(0, length);
    return request;
  }

  test::TempDir temporary_;
  os::Directory directory_ = test::open_directory(temporary_);
};

TEST_F(LimitedLoadsTest, RejectsALimitBelowTheMinimumScratchMemory) {
  EXPECT_TRUE(fails(loads(LimitedLoads::kMinScratchBytes - 1), Errc::invalid_argument));
}

TEST_F(LimitedLoadsTest, RejectsRecordsThatDoNotFitTogether) {
  const auto limited = loads(kLimit);
  ASSERT_TRUE(ok(limited));
  EXPECT_TRUE(ok(limited->check_records_fit({record(0, 50), record(50, 50)}, {"a", "b"})));
  const auto result = limited->check_records_fit({record(0, 50), record(50, 51)}, {"a", "b"});
  ASSERT_TRUE(fails(result, Errc::invalid_argument));
  EXPECT_EQ(result.error().subject, "b");
}

TEST_F(LimitedLoadsTest, RejectsARecordBeyondTheEndOfItsFileByName) {
  const auto limited = loads(kLimit);
  ASSERT_TRUE(ok(limited));
  const auto result = limited->check_records_fit({record(999, 2)}, {"a"});
  ASSERT_TRUE(fails(result, Errc::range_past_end));
  EXPECT_EQ(result.error().subject, "a");
}

TEST_F(LimitedLoadsTest, NamesTheRecordInAnErrorOfALoad) {
  auto limited = loads(kLimit);
  ASSERT_TRUE(ok(limited));
  std::string room(2, '?');
  ReadRequest request = record(999, 2);
  request.target.address = reinterpret_cast<std::byte*>(room.data());
  const auto session = limited->run({std::move(request)}, {"a"}, 2, 0);
  ASSERT_TRUE(session.has_error());
  EXPECT_EQ(session.error().subject, "a");
}

TEST_F(LimitedLoadsTest, WaitsForTheReadyEventsOfEachRun) {
  test::FakeDevice device;
  std::latch allocated(0);
  auto limited = loads(std::uint64_t{1} << 20);
  ASSERT_TRUE(ok(limited));
  ReadRequest request = record(0, 1000);
  request.kind = ReadKind::raw;
  request.target.device = 0;
  request.target.address = device.allocate(1000);
  ASSERT_TRUE(ok(limited->run({std::move(request)}, {"a"}, 0, 0, {{0, &allocated}})));
  ASSERT_EQ(device.ready().size(), 1);
  EXPECT_EQ(device.ready()[0].event, &allocated);
}

}  // namespace
}  // namespace torch_ckpt::engine
