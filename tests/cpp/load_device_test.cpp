// Loads into tensors on a device.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <latch>
#include <string>
#include <vector>

#include "engine/load_session.h"
#include "fake_device.h"
#include "gate.h"
#include "reads.h"
#include "staging/chunk_pool.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using planning::Region;
using staging::HostRun;
using namespace test;
using Dims = std::vector<std::uint64_t>;
using Steps = std::vector<std::int64_t>;

constexpr std::size_t kPage = 4096;

// The parameter is the number of rows of a matrix, which have 100 items of two bytes each.
class LoadToDevice : public ReadsTestWith<std::uint64_t> {
 protected:
  void SetUp() override { reads_.add_file({stored_.record}); }

  OwnedRead request(std::uint64_t first_column, std::uint64_t columns,
                    std::size_t target_item) const {
    OwnedRead request = stored_.request(ReadKind::tensor);
    request.region =
        *Region::of_box(stored_.header.sizes, {}, Dims{0, first_column}, Dims{GetParam(), columns},
                        Steps{static_cast<std::int64_t>(columns), 1}, 2, target_item);
    if (target_item == 4) request.target.convert = widen;
    return request;
  }
  std::string columns(std::uint64_t first, std::uint64_t count) const {
    std::string text;
    for (std::uint64_t row = 0; row < GetParam(); ++row) {
      text += stored_.payload.substr(200 * row + 2 * first, 2 * count);
    }
    return text;
  }
  /// Adds a request for columns on the device, and its expected result to expected_.
  void add(std::uint64_t first, std::uint64_t count, bool convert) {
    OwnedRead request = this->request(first, count, convert ? 4 : 2);
    const std::string text = columns(first, count);
    expected_.push_back(convert ? widened(text) : text);
    addresses_.push_back(device_.allocate(expected_.back().size()));
    request.target.device = 0;
    request.target.address = addresses_.back();
    reads_.add_as_it_is(std::move(request));
  }
  void expect_arrived() const {
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      EXPECT_TRUE(device_.contents(addresses_[i]) == expected_[i]) << "target " << i;
    }
  }

  FakeDevice device_;
  const Stored stored_ =
      store(row_major("int16", {GetParam(), 100}), Random(GetParam()).bytes(200 * GetParam()));
  std::vector<std::string> expected_;
  std::vector<std::byte*> addresses_;
};

TEST_P(LoadToDevice, ATensorArrives) {
  add(0, 100, false);
  reads_.run_all();
  expect_arrived();
}

TEST_P(LoadToDevice, ColumnsArrive) {
  add(7, 11, false);
  reads_.run_all();
  expect_arrived();
}

TEST_P(LoadToDevice, AConvertedTensorArrives) {
  add(0, 100, true);
  reads_.run_all();
  expect_arrived();
}

TEST_P(LoadToDevice, ManyRegionsOfOneRecordArriveThroughSmallChunks) {
  for (std::uint64_t i = 0; i < 8; ++i) add(i, 93 - i, i % 2 == 0);
  for (const DirectIo mode : {DirectIo::on, DirectIo::off}) {
    LoadOptions given = load_options(mode);
    given.chunk_bytes = 7 * kPage;
    given.max_scratch_bytes = 30 * kPage;
    reads_.run_all(given);
    expect_arrived();
  }
}

TEST_P(LoadToDevice, OneLoadHasTargetsOnHostAndDevice) {
  add(0, 100, false);
  reads_.add_to_host(request(3, 50, 2), 100 * GetParam());
  add(0, 50, true);
  reads_.run_all();
  expect_arrived();
  EXPECT_TRUE(reads_.result(1) == columns(3, 50));
}

TEST_P(LoadToDevice, TheMinimumScratchMemorySuffices) {
  add(0, 100, false);
  LoadOptions given;
  given.chunk_bytes = kPage;
  given.max_scratch_bytes = 2 * kPage;
  reads_.run_all(given);
  expect_arrived();
  EXPECT_LE(context().chunks.idle_bytes(), 2 * kPage);
}

TEST_P(LoadToDevice, LessThanTheMinimumScratchMemoryIsRejected) {
  add(0, 100, true);
  LoadOptions given;
  given.max_scratch_bytes = 6 * kPage - 1;
  const auto& request = reads_.request(0);
  EXPECT_TRUE(fails(LoadSession::start(context(), open_directory(directory_),
                                       {{reads_.name(0), {}}}, {request}, given),
                    Errc::invalid_argument));
}

TEST_P(LoadToDevice, DamageIsFoundByBlocks) {
  std::string damaged = stored_.record;
  damaged[stored_.payload_at] ^= 1;
  test::write_file(reads_.path(0), damaged);
  reads_.set_table(0, format::encode_checksum_table(std::vector{stored_.sums}));
  add(0, 5, true);
  EXPECT_TRUE(failed(*reads_.run(), Errc::checksum_mismatch, 0));
}

TEST_P(LoadToDevice, WritesTargetsOnlyAfterTheirReadyEvents) {
  std::latch written(1);
  LoadOptions given;
  given.ready = {{0, &written}};
  add(0, 100, false);
  const auto session = reads_.start(given);
  EXPECT_FALSE(session->wait_for(std::chrono::milliseconds(20)));
  EXPECT_EQ(device_.contents(addresses_[0]), std::string(expected_[0].size(), '?'));
  written.count_down();
  wait_for_end(*session);
  EXPECT_FALSE(session->failure().has_value());
  expect_arrived();
}

TEST_P(LoadToDevice, ARejectedCopyFailsTheLoad) {
  add(0, 100, false);
  device_.on_write([](const HostRun&) -> Result<> { return system_error(EIO, "copy", "device"); });
  const auto session = reads_.run();
  ASSERT_TRUE(failed(*session, Errc::system, 0));
  EXPECT_EQ(session->failure()->operation, "copy");
}

TEST_P(LoadToDevice, AFailedCopyFailsTheLoad) {
  add(0, 100, false);
  device_.fail_waits(system_error(EIO, "wait", "device"));
  const auto session = reads_.run();
  ASSERT_TRUE(session->failure().has_value());
  EXPECT_EQ(session->failure()->operation, "wait");
}

TEST_P(LoadToDevice, UsesMemoryThatCannotBePinned) {
  add(0, 100, false);
  device_.fail_pins(system_error(ENOMEM, "pin", "device"));
  EXPECT_FALSE(reads_.run()->failure().has_value());
  device_.fail_pins({});
}

TEST_P(LoadToDevice, ACancelledLoadWaitsForCopiesInFlight) {
  add(0, 100, false);
  test::Gate gate;
  device_.on_arrival(gate.passage());
  const auto session = reads_.start();
  gate.wait_for_arrivals();
  session->cancel();
  EXPECT_FALSE(session->wait_for(std::chrono::milliseconds(20)));
  gate.open();
  wait_for_end(*session);
  const auto failure = session->failure();
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->code, Errc::cancelled);
}

TEST_P(LoadToDevice, AFailedLoadWaitsForCopiesInFlight) {
  add(0, 100, false);
  Reads reads(directory_);
  reads.use_file("f0");
  reads.use_file("missing");
  reads.add_as_it_is(reads_.request(0));
  OwnedRead missing = request(0, 100, 2);
  missing.stored.file = 1;
  reads.add_to_host(missing, 200 * GetParam());
  LoadOptions one_thread;
  one_thread.threads = 1;
  const auto session = reads.run(one_thread);
  ASSERT_TRUE(failed(*session, Errc::system, 1));
  expect_arrived();
}

INSTANTIATE_TEST_SUITE_P(Rows, LoadToDevice, ::testing::Values(10, 20'000));

TEST(LoadToDevices, EachTensorArrivesOnItsDevice) {
  TempDir directory;
  FakeDevice device;
  Reads reads(directory);
  std::vector<std::byte*> addresses;
  const std::string payload = Random(9).bytes(300'000);
  reads.add_file({test::byte_record(payload)});
  const Stored stored = store(row_major("uint8", {payload.size()}), payload);
  for (int number = 0; number < 3; ++number) {
    OwnedRead request = stored.request(ReadKind::tensor);
    request.region = Region::of_bytes(0, payload.size());
    request.target.device = number;
    request.target.address = device.allocate(payload.size(), number);
    addresses.push_back(request.target.address);
    reads.add_as_it_is(request);
  }
  reads.run_all();
  for (const std::byte* address : addresses) EXPECT_TRUE(device.contents(address) == payload);
}

TEST(LoadToDevices, ACachedTensorArrivesInLargeCopies) {
  TempDir directory;
  FakeDevice device;
  Reads reads(directory);
  const std::string payload = Random(10).bytes(std::size_t{8} << 20);
  reads.add_file({test::byte_record(payload)});
  const Stored stored = store(row_major("uint8", {payload.size()}), payload);
  OwnedRead request = stored.request(ReadKind::tensor);
  request.region = Region::of_bytes(0, payload.size());
  request.target.device = 0;
  request.target.address = device.allocate(payload.size());
  reads.add_as_it_is(request);
  std::atomic<std::size_t> copies{0};
  device.on_write([&](const HostRun&) -> Result<> {
    ++copies;
    return {};
  });
  reads.run_all(load_options(DirectIo::off));
  EXPECT_TRUE(device.contents(request.target.address) == payload);
  EXPECT_LE(copies.load(), payload.size() >> 20);
}

// CUDA refuses a copy to two allocations, even if they are adjacent.
TEST(LoadToDevices, NoCopyHasTwoTargets) {
  constexpr std::size_t kHalf = 512;
  TempDir directory;
  FakeDevice device;
  Reads reads(directory);
  const std::string payload = Random(11).bytes(2 * kHalf);
  reads.add_file({test::byte_record(payload)});
  const Stored stored = store(row_major("uint8", {payload.size()}), payload);
  std::vector<std::byte*> addresses = {device.allocate(kHalf), device.allocate_adjacent(kHalf)};
  for (std::size_t i = 0; i < 2; ++i) {
    OwnedRead request = stored.request(ReadKind::tensor);
    request.region = Region::of_bytes(i * kHalf, kHalf);
    request.target.device = 0;
    request.target.address = addresses[i];
    reads.add_as_it_is(request);
  }
  reads.run_all();
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(device.contents(addresses[i]) == payload.substr(i * kHalf, kHalf));
  }
}

TEST(LoadToDevices, FailsWithoutDeviceSupport) {
  test::NoDevice none;
  TempDir directory;
  Reads reads(directory);
  reads.add_file({test::byte_record("hello")});
  const Stored stored = store(row_major("uint8", {5}), "hello");
  OwnedRead request = stored.request(ReadKind::tensor);
  request.region = Region::of_bytes(0, 5);
  request.target.device = 0;
  reads.add_as_it_is(request);
  EXPECT_TRUE(failed(*reads.run(), Errc::invalid_argument, 0));
}

}  // namespace
}  // namespace torch_ckpt::engine
