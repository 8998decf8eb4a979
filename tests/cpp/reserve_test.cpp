// Memory that is allocated before a save needs it, and that no save frees.

#include "engine/reserve.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <limits>
#include <thread>
#include <vector>

#include "failing_allocations.h"
#include "fake_device.h"
#include "gate.h"
#include "os/fault.h"
#include "save_files.h"
#include "staging/chunk_pool.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using os::ScopedFaultHook;
using staging::ChunkPool;
using namespace test;

constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();

std::size_t grow(std::size_t most_bytes = kAll, const PoolSpec& threads = {}) {
  auto there = grow_reserve(context(), most_bytes, threads);
  EXPECT_TRUE(ok(there));
  return there ? *there : 0;
}

// The process's pool is empty at the beginning and at the end of each test.
class Reserve : public ::testing::Test {
 protected:
  Reserve() { pool_.trim(0); }
  ~Reserve() override { pool_.trim(0); }

  void reserve(std::size_t bytes) {
    pool_.set_reserve(bytes, kPage);
    grow();
  }
  /// A save of one file of `pages` pages in the background.
  Result<> save(std::size_t pages, std::size_t chunk_bytes, std::size_t max_host_bytes) {
    TempDir directory;
    Files files(directory);
    files.add_file(std::string(pages * kPage, 'x'));
    SaveOptions options;
    options.snapshot = true;
    options.chunk_bytes = chunk_bytes;
    options.max_host_bytes = max_host_bytes;
    auto saved = run_save(directory, files.jobs(), options);
    // Ends the threads, which may still allocate buffers for the save.
    context().executor.join();
    return saved;
  }

  ChunkPool& pool_ = context().chunks;
};

TEST_F(Reserve, IsRoundedUpToChunks) {
  pool_.set_reserve(20 * kPage + 1, kPage);
  EXPECT_EQ(grow(), 21 * kPage);
  EXPECT_EQ(pool_.idle_bytes(), 21 * kPage);
  EXPECT_EQ(pool_.reserve_bytes(), 21 * kPage);
}

TEST_F(Reserve, OfNoBytesHasNoChunks) {
  pool_.set_reserve(0, kPage);
  EXPECT_EQ(grow(), 0);
  EXPECT_EQ(pool_.idle_bytes(), 0);
}

TEST_F(Reserve, IsEmptyBeforeItIsSet) {
  CallCounter counter;
  ScopedFaultHook hook(counter);
  ChunkPool pool;
  const auto grown = pool.grow_reserve(kAll, staging::Source::kHost);
  ASSERT_TRUE(ok(grown));
  EXPECT_FALSE(*grown);
  EXPECT_EQ(counter.calls("mmap"), 0);
}

TEST_F(Reserve, GrowsToTheRequestedBytesOnly) {
  pool_.set_reserve(20 * kPage, kPage);
  EXPECT_EQ(grow(7 * kPage + 1), 7 * kPage) << "the eighth chunk would be beyond that";
  EXPECT_EQ(grow(7 * kPage + 1), 7 * kPage);
  EXPECT_EQ(grow(), 20 * kPage);
}

TEST_F(Reserve, CountsIdleChunksOfThePool) {
  pool_.give_back(pool_.take(kPage).value());
  CallCounter counter;
  ScopedFaultHook hook(counter);
  reserve(3 * kPage);
  EXPECT_EQ(counter.calls("mmap"), 2);
}

TEST_F(Reserve, CountsChunksInUse) {
  auto taken = pool_.take(kPage).value();
  pool_.set_reserve(3 * kPage, kPage);
  EXPECT_EQ(grow(), 3 * kPage);
  EXPECT_EQ(pool_.idle_bytes(), 2 * kPage);
  pool_.give_back(std::move(taken));
  EXPECT_EQ(pool_.idle_bytes(), 3 * kPage);
}

TEST_F(Reserve, AcceptsReturnedChunksWithoutMemory) {
  staging::ChunkPool fresh;
  auto kept = fresh.take(kPage).value();
  auto discarded = fresh.take(2 * kPage).value();
  auto limited = fresh.take(kPage).value();
  {
    const test::FailingAllocations failing(1, kAll);
    fresh.give_back(std::move(kept));
    fresh.discard(std::move(discarded));
    fresh.give_back_within(std::move(limited), 2 * kPage);
  }
  EXPECT_EQ(fresh.idle_bytes(), 2 * kPage);
  {
    const test::FailingAllocations failing(1, kAll);
    fresh.trim_to_budget(kPage);
  }
  EXPECT_EQ(fresh.idle_bytes(), kPage);
}

TEST_F(Reserve, KeepsDiscardedChunksThatItLacks) {
  auto first = pool_.take(kPage).value();
  auto second = pool_.take(kPage).value();
  auto third = pool_.take(kPage).value();
  pool_.set_reserve(2 * kPage, kPage);
  pool_.discard(std::move(first));
  EXPECT_EQ(pool_.idle_bytes(), 0) << "two are out, and come back";
  pool_.discard(std::move(second));
  EXPECT_EQ(pool_.idle_bytes(), kPage);
  pool_.discard(std::move(third));
  EXPECT_EQ(pool_.idle_bytes(), 2 * kPage);
}

TEST_F(Reserve, IgnoresASmallerTarget) {
  reserve(5 * kPage);
  reserve(2 * kPage);
  EXPECT_EQ(pool_.reserve_bytes(), 5 * kPage);
  pool_.trim_to_budget(0);
  EXPECT_EQ(pool_.idle_bytes(), 5 * kPage);
}

TEST_F(Reserve, IsAllocatedByTheRequestedThreads) {
  std::atomic<int> quiet{0};
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "mmap") quiet += ::getpriority(PRIO_PROCESS, 0) == 19 ? 1 : 0;
    return 0;
  });
  pool_.set_reserve(10 * kPage, kPage);
  EXPECT_EQ(grow(kAll, {{19, false}, 2}), 10 * kPage);
  EXPECT_EQ(quiet, 10);
}

TEST_F(Reserve, IsAllocatedOnceForTwoCallers) {
  CallCounter counter;
  ScopedFaultHook hook(counter);
  pool_.set_reserve(50 * kPage, kPage);
  std::atomic<std::size_t> there[2] = {0, 0};
  {
    std::vector<std::jthread> threads;
    for (auto& seen : there) threads.emplace_back([&seen] { seen = grow(); });
  }
  EXPECT_EQ(counter.calls("mmap"), 50);
  EXPECT_EQ(there[0], 50 * kPage) << "each waits for what the other makes";
  EXPECT_EQ(there[1], 50 * kPage);
}

// --- saves and loads --------------------------------------------------------------------------

TEST_F(Reserve, ServesAllChunksOfTheFirstSave) {
  reserve(10 * kPage);
  CallCounter counter;
  ScopedFaultHook hook(counter);
  EXPECT_TRUE(ok(save(10, kPage, 0)));
  EXPECT_EQ(counter.calls("mmap"), 0);
}

TEST_F(Reserve, OutlivesASaveWithASmallerBudget) {
  reserve(10 * kPage);
  EXPECT_TRUE(ok(save(10, kPage, 3 * kPage)));
  EXPECT_EQ(pool_.idle_bytes(), 10 * kPage);
}

TEST_F(Reserve, OutlivesASaveInSmallerChunks) {
  pool_.set_reserve(8 * kPage, 2 * kPage);
  grow();
  EXPECT_TRUE(ok(save(3, kPage, 3 * kPage)));
  EXPECT_EQ(pool_.idle_bytes(), 8 * kPage);
}

TEST_F(Reserve, CountsTowardsTheBudgetOfALargerSave) {
  reserve(2 * kPage);
  EXPECT_TRUE(ok(save(10, kPage, 5 * kPage)));
  EXPECT_LE(pool_.idle_bytes(), 5 * kPage) << "the save's budget, the reserve included";
  EXPECT_GE(pool_.idle_bytes(), 2 * kPage);
}

// --- trimming ---------------------------------------------------------------------------------

TEST_F(Reserve, IsFreedByTrim) {
  reserve(5 * kPage);
  pool_.trim(2 * kPage);
  EXPECT_EQ(pool_.idle_bytes(), 2 * kPage);
  EXPECT_EQ(pool_.reserve_bytes(), 2 * kPage);
  EXPECT_EQ(grow(), 2 * kPage) << "it is no longer what it was";
}

TEST_F(Reserve, IsTrimmedAfterOtherChunks) {
  reserve(3 * kPage);
  pool_.give_back(pool_.take(8 * kPage).value());
  pool_.trim(3 * kPage);
  EXPECT_EQ(pool_.idle_bytes(), 3 * kPage);
  EXPECT_EQ(pool_.reserve_bytes(), 3 * kPage);
}

TEST_F(Reserve, GrowsNoFurtherAfterATrim) {
  HeldOperation chunks("mmap");
  pool_.set_reserve(50 * kPage, kPage);
  std::size_t there = 1;
  {
    const std::jthread maker([&] { there = grow(kAll, {{0, false}, 2}); });
    chunks.wait_until_held();
    pool_.trim(0);
    chunks.open();
  }
  EXPECT_EQ(there, 0);
  EXPECT_EQ(pool_.idle_bytes(), 0) << "what was being made goes as well";
}

TEST_F(Reserve, KeepsItsPresentSizeWhenItIsEnded) {
  pool_.set_reserve(50 * kPage, kPage);
  grow(4 * kPage);
  pool_.end_reserve();
  EXPECT_EQ(pool_.reserve_bytes(), 4 * kPage);
  EXPECT_EQ(grow(), 4 * kPage);
}

// --- failures ---------------------------------------------------------------------------------

TEST_F(Reserve, FailsWithoutMemoryAndKeepsItsPresentSize) {
  pool_.set_reserve(50 * kPage, kPage);
  ScopedFaultHook hook(NthCallFails("mmap", 4, ENOMEM));
  const auto grown = grow_reserve(context(), kAll, {{0, false}, 1});
  ASSERT_FALSE(grown.has_value());
  EXPECT_TRUE(is_system_error(grown.error(), ENOMEM, "mmap", ""));
  EXPECT_EQ(pool_.reserved_bytes(), 3 * kPage);
  EXPECT_EQ(pool_.reserve_bytes(), 3 * kPage);
}

TEST_F(Reserve, ForADeviceIsPageLocked) {
  FakeDevice device;
  pool_.set_reserve(4 * kPage, kPage);
  EXPECT_TRUE(ok(grow_reserve(context(), kAll, {}, 1)));
  EXPECT_EQ(pool_.idle_bytes(), 4 * kPage);
  EXPECT_EQ(device.pinned_now(), 1);
}

TEST_F(Reserve, ForADeviceConsistsOfArenasOf64MiB) {
  constexpr std::size_t kChunk = std::size_t{16} << 20;
  FakeDevice device;
  pool_.set_reserve(6 * kChunk, kChunk);
  EXPECT_TRUE(ok(grow_reserve(context(), kAll, {{0, false}, 1}, 0)));
  EXPECT_EQ(pool_.reserved_bytes(), 6 * kChunk);
  EXPECT_EQ(device.pins(), 2);
}

TEST_F(Reserve, ForADeviceGrowsToTheRequestedBytesOnly) {
  FakeDevice device;
  pool_.set_reserve(20 * kPage, kPage);
  EXPECT_TRUE(ok(grow_reserve(context(), 7 * kPage + 1, {}, 0)));
  EXPECT_EQ(pool_.reserved_bytes(), 7 * kPage);
}

TEST_F(Reserve, ForADeviceIsTrimmedByEntireArenas) {
  FakeDevice device;
  pool_.set_reserve(4 * kPage, kPage);
  EXPECT_TRUE(ok(grow_reserve(context(), kAll, {}, 0)));
  pool_.trim(3 * kPage);
  EXPECT_EQ(pool_.idle_bytes(), 0);
  EXPECT_EQ(pool_.reserve_bytes(), 0);
  EXPECT_EQ(device.pinned_now(), 0);
}

TEST_F(Reserve, ForADeviceOutlivesASaveWithASmallerBudget) {
  FakeDevice device;
  pool_.set_reserve(10 * kPage, kPage);
  EXPECT_TRUE(ok(grow_reserve(context(), kAll, {}, 0)));
  EXPECT_TRUE(ok(save(10, kPage, 3 * kPage)));
  EXPECT_EQ(pool_.idle_bytes(), 10 * kPage);
}

TEST_F(Reserve, FailsIfItCannotBePageLocked) {
  FakeDevice device;
  device.fail_pins(system_error(ENOMEM, "cudaHostRegister", ""));
  pool_.set_reserve(4 * kPage, kPage);
  const auto grown = grow_reserve(context(), kAll, {}, 0);
  ASSERT_FALSE(grown.has_value());
  EXPECT_EQ(grown.error().operation, "cudaHostRegister");
  EXPECT_EQ(pool_.idle_bytes(), 0);
  EXPECT_EQ(pool_.reserve_bytes(), 0);
}

}  // namespace
}  // namespace torch_ckpt::engine
