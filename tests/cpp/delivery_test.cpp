#include "engine/delivery.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fake_device.h"
#include "reads.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using planning::Region;
using staging::ChunkPool;
using staging::HostRun;
using staging::ReadyEvent;
using namespace test;
using Dims = std::vector<std::uint64_t>;
using Steps = std::vector<std::int64_t>;

constexpr std::size_t kPage = 4096;

/// Every other item of two bytes, contiguous in the target.
Region every_other(std::uint64_t count, std::uint64_t first = 0) {
  return *Region::of_box(Dims{count, 2}, {}, Dims{0, first}, Dims{count, 1}, Steps{1, 1}, 2, 2);
}

std::string every_other_of(std::string_view text, std::size_t first = 0) {
  std::string out;
  for (std::size_t at = 2 * first; at + 2 <= text.size(); at += 4) out += text.substr(at, 2);
  return out;
}

Region wide(std::uint64_t count) {
  return *Region::of_box(Dims{count}, {}, Dims{0}, Dims{count}, Steps{1}, 2, 4);
}

// --- the layout ----------------------------------------------------------------------------------

ScratchLayout layout_of(const Region& region, const Target& target, std::size_t chunk_bytes,
                        std::size_t most_bytes) {
  const Region* const regions[] = {&region};
  const Target* const targets[] = {&target};
  return lay_out_scratch(regions, targets, chunk_bytes, most_bytes);
}

TEST(ScratchLayout, HasOneChunkToReadIntoForTheHost) {
  const auto layout = layout_of(Region::of_bytes(0, 10), {}, 10 * kPage, 100 * kPage);
  EXPECT_EQ(layout.chunks, 1);
  EXPECT_EQ(layout.chunk_bytes, 10 * kPage);
  EXPECT_EQ(layout.read_bytes, 10 * kPage);
  EXPECT_EQ(layout.device, staging::Source::kHost);
}

TEST(ScratchLayout, StaysWithinTheLimitInFullPages) {
  const auto layout = layout_of(Region::of_bytes(0, 10), {}, 10 * kPage, 3 * kPage + 4095);
  EXPECT_EQ(layout.bytes(), 3 * kPage);
}

TEST(ScratchLayout, HasTwoChunksForADevice) {
  const auto layout = layout_of(Region::of_bytes(0, 10), {nullptr, 3, {}}, 10 * kPage, 100 * kPage);
  EXPECT_EQ(layout.chunks, 2);
  EXPECT_EQ(layout.bytes(), 20 * kPage);
  EXPECT_EQ(layout.read_bytes, 10 * kPage);
  EXPECT_EQ(layout.device, 3);
}

TEST(ScratchLayout, HasSpaceForPackedElementsForADevice) {
  EXPECT_EQ(layout_of(every_other(9), {nullptr, 0, {}}, 10 * kPage, 100 * kPage).read_bytes,
            5 * kPage);
  EXPECT_EQ(layout_of(wide(9), {nullptr, 0, widen}, 10 * kPage, 100 * kPage).read_bytes, 3 * kPage);
}

TEST(ScratchLayout, HasNoSpaceForPackedElementsForTheHost) {
  EXPECT_EQ(layout_of(wide(9), {nullptr, staging::Source::kHost, widen}, 10 * kPage, 100 * kPage)
                .read_bytes,
            10 * kPage);
}

TEST(ScratchLayout, HasTheLargestPackingSpaceOfAnyRegion) {
  const Region dense = Region::of_bytes(0, 10);
  const Region converted = wide(9);
  const Target host;
  const Target device{nullptr, 0, widen};
  const Region* const regions[] = {&dense, &converted, &dense};
  const Target* const targets[] = {&host, &device, &host};
  const auto layout = lay_out_scratch(regions, targets, 10 * kPage, 100 * kPage);
  EXPECT_EQ(layout.chunks, 2);
  EXPECT_EQ(layout.read_bytes, 3 * kPage);
}

TEST(ScratchLayout, IsEmptyIfTheLimitIsTooLow) {
  const Region bytes = Region::of_bytes(0, 10);
  EXPECT_EQ(layout_of(bytes, {}, kPage, kPage).chunk_bytes, kPage);
  EXPECT_EQ(layout_of(bytes, {}, kPage, kPage - 1).chunk_bytes, 0);
  EXPECT_EQ(layout_of(bytes, {}, kPage - 1, kPage).chunk_bytes, 0);
  EXPECT_EQ(layout_of(bytes, {nullptr, 0, {}}, kPage, 2 * kPage).chunk_bytes, kPage);
  EXPECT_EQ(layout_of(bytes, {nullptr, 0, {}}, kPage, 2 * kPage - 1).chunk_bytes, 0);
  EXPECT_EQ(layout_of(every_other(9), {nullptr, 0, {}}, kPage, 100 * kPage).chunk_bytes, 0);
  EXPECT_EQ(layout_of(every_other(9), {nullptr, 0, {}}, 2 * kPage, 4 * kPage).read_bytes, kPage);
}

TEST(ScratchLayout, WithoutRegionsIsForTheHost) {
  const auto layout = lay_out_scratch({}, {}, 2 * kPage, 2 * kPage);
  EXPECT_EQ(layout.chunk_bytes, 2 * kPage);
  EXPECT_EQ(layout.chunks, 1);
}

// --- to the host ---------------------------------------------------------------------------------

const std::vector<ReadyEvent> kAtOnce;

std::unique_ptr<Scratch> make_scratch(const ScratchLayout& layout) {
  auto scratch = Scratch::make(context(), layout, kAtOnce);
  EXPECT_TRUE(ok(scratch));
  return std::move(*scratch);
}

Target to(std::string& memory) { return {reinterpret_cast<std::byte*>(memory.data()), -1, {}}; }

TEST(Scratch, HasRoomForFullBlocksAroundEachStep) {
  for (const std::size_t pages : {1, 2, 3, 10}) {
    const auto scratch = make_scratch({pages * kPage, pages * kPage, 1, -1});
    const auto room = scratch->next_buffer();
    ASSERT_TRUE(ok(room));
    EXPECT_EQ(room->size(), pages * kPage);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(room->data()) % kPage, 0);
    EXPECT_EQ(scratch->step_bytes() % 64, 0);
    EXPECT_EQ(scratch->step_bytes(), pages > 2 ? (pages - 2) * kPage : pages * kPage);
  }
}

TEST(Scratch, ReturnsItsMemoryToThePool) {
  context().chunks.trim(0);
  make_scratch({3 * kPage, 3 * kPage, 2, -1}).reset();
  EXPECT_EQ(context().chunks.idle_bytes(), 6 * kPage);
}

TEST(Scratch, DeliversToTheHostThePartOfARegionThatLiesInTheBytes) {
  const std::string payload = Random(1).bytes(100);
  std::string out(50, '?');
  const auto scratch = make_scratch({kPage, kPage, 1, -1});
  // The first 40 bytes of [20, 70), from bytes that begin at 10.
  const auto delivered =
      scratch->deliver(Region::of_bytes(20, 50), to(out), 10, bytes_of(payload).subspan(10, 50));
  ASSERT_TRUE(ok(delivered));
  EXPECT_EQ(*delivered, 40);
  EXPECT_EQ(out, payload.substr(20, 40) + std::string(10, '?'));
}

TEST(Scratch, DeliversNothingIfNoBytesAreWanted) {
  std::string out(50, '?');
  const auto scratch = make_scratch({kPage, kPage, 1, -1});
  const auto delivered =
      scratch->deliver(Region::of_bytes(20, 50), to(out), 70, bytes_of("behind it"));
  ASSERT_TRUE(ok(delivered));
  EXPECT_EQ(*delivered, 0);
  EXPECT_EQ(out, std::string(50, '?'));
}

TEST(Scratch, ConvertsAndScattersElementsForTheHost) {
  const std::string payload = Random(2).bytes(40);
  std::string out(100, '?');
  const Region region =
      *Region::of_box(Dims{10, 2}, {}, Dims{0, 1}, Dims{10, 1}, Steps{2, 1}, 2, 4);
  Target target = to(out);
  target.convert = widen;
  const auto scratch = make_scratch({kPage, kPage, 1, -1});
  const auto delivered = scratch->deliver(region, target, 0, bytes_of(payload));
  ASSERT_TRUE(ok(delivered));
  EXPECT_EQ(*delivered, 20);
  std::string expected(100, '?');
  for (std::size_t i = 0; i < 10; ++i) {
    expected.replace(8 * i, 4, widened(payload.substr(4 * i + 2, 2)));
  }
  EXPECT_EQ(out, expected);
}

TEST(Scratch, UsesNoDeviceForTargetsOnTheHost) {
  FakeDevice device;
  std::string out(5, '?');
  const auto scratch = make_scratch({kPage, kPage, 1, -1});
  ASSERT_TRUE(ok(scratch->deliver(Region::of_bytes(0, 5), to(out), 0, bytes_of("hello"))));
  ASSERT_TRUE(ok(scratch->submit()));
  ASSERT_TRUE(ok(scratch->wait_all()));
  EXPECT_EQ(device.copiers(), 0);
  EXPECT_EQ(device.pins(), 0);
}

// --- to a device ---------------------------------------------------------------------------------

class ScratchToDevice : public ::testing::Test {
 protected:
  /// Places `text` into the next chunk, as a read would.
  std::span<const std::byte> read(Scratch& scratch, std::string_view text) {
    auto room = scratch.next_buffer();
    EXPECT_TRUE(ok(room));
    EXPECT_LE(text.size(), room->size());
    std::memcpy(room->data(), text.data(), text.size());
    return room->first(text.size());
  }
  Target target(std::size_t bytes) { return {device_.allocate(bytes), 0, {}}; }

  FakeDevice device_;
  Random random_{3};
  const ScratchLayout dense_{kPage, kPage, 2, 0};
  const ScratchLayout packed_{2 * kPage, kPage, 2, 0};
};

TEST_F(ScratchToDevice, CopiesContiguousBytesWithoutPackingThem) {
  const auto scratch = make_scratch(dense_);
  const std::string payload = random_.bytes(3000);
  const Target out = target(2000);
  const auto bytes = read(*scratch, payload);
  std::vector<const std::byte*> from;
  device_.on_write([&](const HostRun& run) -> Result<> {
    from.push_back(run.in.data());
    return {};
  });
  const auto delivered = scratch->deliver(Region::of_bytes(500, 2000), out, 0, bytes);
  ASSERT_TRUE(ok(delivered));
  EXPECT_EQ(*delivered, 2000);
  ASSERT_TRUE(ok(scratch->submit()));
  ASSERT_TRUE(ok(scratch->wait_all()));
  EXPECT_EQ(from, std::vector<const std::byte*>{bytes.data() + 500});
  EXPECT_EQ(device_.contents(out.address), payload.substr(500, 2000));
}

TEST_F(ScratchToDevice, ContinuesInTheTargetAfterTheLastBytes) {
  const std::string payload = random_.bytes(5 * kPage);
  const Target out = target(4 * kPage);
  {
    const auto scratch = make_scratch(dense_);
    for (std::size_t at = 0; at < payload.size(); at += kPage) {
      const auto bytes = read(*scratch, payload.substr(at, kPage));
      ASSERT_TRUE(ok(scratch->deliver(Region::of_bytes(100, 4 * kPage), out, at, bytes)));
      ASSERT_TRUE(ok(scratch->submit()));
    }
  }
  EXPECT_TRUE(device_.contents(out.address) == payload.substr(100, 4 * kPage));
}

TEST_F(ScratchToDevice, PacksElementsWithGapsBetweenThem) {
  const auto scratch = make_scratch(packed_);
  const std::string payload = random_.bytes(kPage);
  const Target out = target(kPage / 2);
  const auto bytes = read(*scratch, payload);
  const auto delivered = scratch->deliver(every_other(kPage / 4), out, 0, bytes);
  ASSERT_TRUE(ok(delivered));
  EXPECT_EQ(*delivered, kPage / 2);
  ASSERT_TRUE(ok(scratch->submit()));
  ASSERT_TRUE(ok(scratch->wait_all()));
  EXPECT_TRUE(device_.contents(out.address) == every_other_of(payload));
}

TEST_F(ScratchToDevice, ConvertsOnTheHost) {
  const auto scratch = make_scratch({3 * kPage, kPage, 2, 0});
  const std::string payload = random_.bytes(kPage);
  Target out = target(2 * kPage);
  out.convert = widen;
  ASSERT_TRUE(ok(scratch->deliver(wide(kPage / 2), out, 0, read(*scratch, payload))));
  ASSERT_TRUE(ok(scratch->submit()));
  ASSERT_TRUE(ok(scratch->wait_all()));
  EXPECT_TRUE(device_.contents(out.address) == widened(payload));
}

TEST_F(ScratchToDevice, SubmitsAllDeliveredCopiesAtOnce) {
  const auto scratch = make_scratch(packed_);
  const std::string payload = random_.bytes(kPage);
  const Target dense = target(kPage);
  const Target packed = target(kPage / 2);
  const auto bytes = read(*scratch, payload);
  ASSERT_TRUE(ok(scratch->deliver(Region::of_bytes(0, kPage), dense, 0, bytes)));
  ASSERT_TRUE(ok(scratch->deliver(every_other(kPage / 4), packed, 0, bytes)));
  ASSERT_TRUE(ok(scratch->submit()));
  ASSERT_TRUE(ok(scratch->wait_all()));
  EXPECT_EQ(device_.submissions(), 1);
  EXPECT_TRUE(device_.contents(dense.address) == payload);
  EXPECT_TRUE(device_.contents(packed.address) == every_other_of(payload));
}

TEST_F(ScratchToDevice, ReusesThePackingSpaceForSeveralRegionsOfTheSameBytes) {
  const auto scratch = make_scratch(packed_);
  const std::string payload = random_.bytes(2 * kPage);
  std::vector<Target> targets;
  for (int i = 0; i < 10; ++i) targets.push_back(target(kPage));
  // Two regions fit into the packing space at once; the next two want other bytes.
  const auto first = [](std::size_t i) { return i / 2 % 2; };
  // Uses both chunks: the second is filled while copies from the first are in flight.
  for (std::size_t at = 0; at < payload.size(); at += kPage) {
    const auto bytes = read(*scratch, payload.substr(at, kPage));
    for (std::size_t i = 0; i < targets.size(); ++i) {
      ASSERT_TRUE(ok(scratch->deliver(every_other(kPage / 2, first(i)), targets[i], at, bytes)));
    }
    ASSERT_TRUE(ok(scratch->submit()));
  }
  ASSERT_TRUE(ok(scratch->wait_all()));
  for (std::size_t i = 0; i < targets.size(); ++i) {
    EXPECT_TRUE(device_.contents(targets[i].address) == every_other_of(payload, first(i))) << i;
  }
}

TEST_F(ScratchToDevice, WaitsOnlyForTheCopiesOfTheChunkThatIsReused) {
  const auto scratch = make_scratch(dense_);
  const Target out = target(4);
  const Region region = Region::of_bytes(0, 4);
  ASSERT_TRUE(ok(scratch->deliver(region, out, 0, read(*scratch, "a"))));
  ASSERT_TRUE(ok(scratch->submit()));
  const auto second = read(*scratch, "b");
  EXPECT_EQ(device_.contents(out.address), "????") << "waited for the other chunk";
  ASSERT_TRUE(ok(scratch->deliver(region, out, 1, second)));
  ASSERT_TRUE(ok(scratch->submit()));
  const auto third = read(*scratch, "c");
  EXPECT_EQ(device_.contents(out.address), "a???");
  ASSERT_TRUE(ok(scratch->deliver(region, out, 2, third)));
  ASSERT_TRUE(ok(scratch->submit()));
  read(*scratch, "d");
  EXPECT_EQ(device_.contents(out.address), "ab??");
  ASSERT_TRUE(ok(scratch->wait_all()));
  EXPECT_EQ(device_.contents(out.address), "abc?");
}

TEST_F(ScratchToDevice, WaitsForAllCopiesWhenItIsDestroyed) {
  const Target out = target(5);
  auto scratch = make_scratch(dense_);
  ASSERT_TRUE(ok(scratch->deliver(Region::of_bytes(0, 5), out, 0, read(*scratch, "hello"))));
  ASSERT_TRUE(ok(scratch->submit()));
  scratch.reset();
  EXPECT_EQ(device_.contents(out.address), "hello");
}

TEST_F(ScratchToDevice, DoesNotCopyBytesThatWereNotSubmitted) {
  const Target out = target(5);
  auto scratch = make_scratch(dense_);
  ASSERT_TRUE(ok(scratch->deliver(Region::of_bytes(0, 5), out, 0, read(*scratch, "hello"))));
  scratch.reset();
  EXPECT_EQ(device_.submissions(), 0);
  EXPECT_EQ(device_.contents(out.address), "?????");
}

TEST_F(ScratchToDevice, PinsItsChunksForTheDevice) {
  const auto scratch = make_scratch(dense_);
  EXPECT_EQ(device_.pinned_now(), 2);
}

TEST_F(ScratchToDevice, UsesChunksThatCannotBePinned) {
  context().chunks.trim(0);
  device_.fail_pins(system_error(ENOMEM, "pin", ""));
  const auto scratch = make_scratch(dense_);
  EXPECT_EQ(device_.pinned_now(), 0);
  device_.fail_pins({});
}

TEST_F(ScratchToDevice, ReturnsTheErrorOfASubmissionAndDoesNotWaitForIt) {
  const Target out = target(10);
  const Region region = Region::of_bytes(0, 10);
  const auto scratch = make_scratch(dense_);
  ASSERT_TRUE(ok(scratch->deliver(region, out, 0, read(*scratch, "hello"))));
  ASSERT_TRUE(ok(scratch->submit()));
  device_.on_write([](const HostRun&) -> Result<> { return system_error(EIO, "copy", ""); });
  ASSERT_TRUE(ok(scratch->deliver(region, out, 5, read(*scratch, "world"))));
  EXPECT_TRUE(fails(scratch->submit(), Errc::system));
  EXPECT_TRUE(ok(scratch->wait_all()));
  EXPECT_EQ(device_.contents(out.address), "hello?????");
}

TEST_F(ScratchToDevice, ReturnsTheErrorOfASubmissionThatFreesPackingSpace) {
  const Target out = target(kPage);
  const auto scratch = make_scratch(packed_);
  device_.on_write([](const HostRun&) -> Result<> { return system_error(EIO, "copy", ""); });
  const auto bytes = read(*scratch, random_.bytes(kPage));
  Result<std::uint64_t> delivered = std::uint64_t{0};
  for (int i = 0; i < 3 && delivered; ++i) {
    delivered = scratch->deliver(every_other(kPage / 4), out, 0, bytes);
  }
  EXPECT_TRUE(fails(delivered, Errc::system));
}

TEST_F(ScratchToDevice, ReturnsTheErrorOfACopyWhenItIsWaitedFor) {
  const Target out = target(5);
  const Region region = Region::of_bytes(0, 5);
  const auto scratch = make_scratch(dense_);
  ASSERT_TRUE(ok(scratch->deliver(region, out, 0, read(*scratch, "hello"))));
  ASSERT_TRUE(ok(scratch->submit()));
  device_.fail_waits(system_error(EIO, "wait", ""));
  ASSERT_TRUE(ok(scratch->next_buffer())) << "the other chunk";
  EXPECT_TRUE(fails(scratch->next_buffer(), Errc::system));
  EXPECT_TRUE(ok(scratch->wait_all())) << "nothing is left to be waited for";
}

TEST_F(ScratchToDevice, ReturnsTheErrorOfACopyFromWaitAllAtTheLatest) {
  const Target out = target(5);
  const auto scratch = make_scratch(dense_);
  ASSERT_TRUE(ok(scratch->deliver(Region::of_bytes(0, 5), out, 0, read(*scratch, "hello"))));
  ASSERT_TRUE(ok(scratch->submit()));
  device_.fail_waits(system_error(EIO, "wait", ""));
  EXPECT_TRUE(fails(scratch->wait_all(), Errc::system));
}

TEST_F(ScratchToDevice, DeliversToHostAndDeviceInOneLoad) {
  std::string host(5, '?');
  const Target out = target(5);
  const Region region = Region::of_bytes(0, 5);
  const auto scratch = make_scratch(dense_);
  const auto bytes = read(*scratch, "hello");
  ASSERT_TRUE(ok(scratch->deliver(region, out, 0, bytes)));
  ASSERT_TRUE(ok(scratch->deliver(region, to(host), 0, bytes)));
  ASSERT_TRUE(ok(scratch->submit()));
  ASSERT_TRUE(ok(scratch->wait_all()));
  EXPECT_EQ(host, "hello");
  EXPECT_EQ(device_.contents(out.address), "hello");
}

TEST(Scratch, FailsForATargetOnADeviceWithoutDeviceSupport) {
  test::NoDevice none;
  const auto scratch = make_scratch({kPage, kPage, 2, 0});
  auto room = scratch->next_buffer();
  ASSERT_TRUE(ok(room));
  ASSERT_TRUE(ok(scratch->deliver(Region::of_bytes(0, 5), {nullptr, 0, {}}, 0, room->first(5))));
  EXPECT_TRUE(fails(scratch->submit(), Errc::invalid_argument));
}

TEST_F(ScratchToDevice, DeliversAnyRegionsInAnySteps) {
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const std::string payload = random_.bytes(2 * random_.between(1, 6000));
    const std::uint64_t items = payload.size() / 2;
    std::vector<Region> regions;
    std::vector<Target> targets;
    std::vector<std::string> expected;
    for (std::uint64_t i = random_.between(1, 5); i > 0; --i) {
      const std::uint64_t columns = random_.between(1, 7);
      const std::uint64_t rows = items / columns;
      if (rows == 0) continue;
      const std::uint64_t first = random_.between(0, columns - 1);
      const std::uint64_t count = random_.between(1, columns - first);
      const bool convert = random_.coin();
      regions.push_back(*Region::of_box(Dims{rows, columns}, {}, Dims{0, first}, Dims{rows, count},
                                        Steps{static_cast<int64_t>(count), 1}, 2, convert ? 4 : 2));
      std::string text;
      for (std::uint64_t row = 0; row < rows; ++row) {
        text += payload.substr(2 * (row * columns + first), 2 * count);
      }
      expected.push_back(convert ? widened(text) : text);
      targets.push_back(target(expected.back().size()));
      if (convert) targets.back().convert = widen;
    }
    std::vector<const Region*> all_regions;
    std::vector<const Target*> all_targets;
    for (const Region& region : regions) all_regions.push_back(&region);
    for (const Target& out : targets) all_targets.push_back(&out);
    const auto layout =
        lay_out_scratch(all_regions, all_targets, random_.between(3, 6) * kPage, 100 * kPage);
    const auto scratch = make_scratch(layout);
    for (std::size_t at = 0; at < payload.size();) {
      const std::size_t bytes =
          std::min<std::size_t>(payload.size() - at, 2 * random_.between(1, kPage / 2));
      const auto in_room = read(*scratch, payload.substr(at, bytes));
      for (std::size_t i = 0; i < regions.size(); ++i) {
        ASSERT_TRUE(ok(scratch->deliver(regions[i], targets[i], at, in_room)));
      }
      ASSERT_TRUE(ok(scratch->submit()));
      at += bytes;
    }
    ASSERT_TRUE(ok(scratch->wait_all()));
    for (std::size_t i = 0; i < regions.size(); ++i) {
      ASSERT_TRUE(device_.contents(targets[i].address) == expected[i]) << "region " << i;
    }
  }
}

}  // namespace
}  // namespace torch_ckpt::engine
