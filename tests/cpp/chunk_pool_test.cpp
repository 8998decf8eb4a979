#include "staging/chunk_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "fake_device.h"
#include "gate.h"
#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::staging {
namespace {

using namespace test;

std::unique_ptr<Chunk> take(ChunkPool& pool, std::size_t bytes) {
  auto chunk = pool.take(bytes);
  EXPECT_TRUE(ok(chunk));
  return std::move(*chunk);
}

TEST(ChunkPool, ReturnsChunksOfExactlyTheRequestedSize) {
  ChunkPool pool;
  EXPECT_EQ(take(pool, 8192)->bytes().size(), 8192);
}

TEST(ChunkPool, ReusesChunksThatWereGivenBack) {
  ChunkPool pool;
  auto chunk = take(pool, 8192);
  const std::byte* address = chunk->bytes().data();
  pool.give_back(std::move(chunk));
  EXPECT_EQ(pool.idle_bytes(), 8192);
  test::CallCounter counter;
  os::ScopedFaultHook hook(counter);
  EXPECT_EQ(take(pool, 8192)->bytes().data(), address);
  EXPECT_EQ(counter.calls("mmap"), 0);
  EXPECT_EQ(pool.idle_bytes(), 0);
}

TEST(ChunkPool, LendsAChunkToOneCallerAtATime) {
  ChunkPool pool;
  pool.give_back(take(pool, 4096));
  const auto first = take(pool, 4096);
  const auto second = take(pool, 4096);
  EXPECT_NE(first->bytes().data(), second->bytes().data());
}

TEST(ChunkPool, FreesChunksOfAnotherSizeBeforeItAllocatesOne) {
  ChunkPool pool;
  auto first = take(pool, 8192);
  auto second = take(pool, 8192);
  pool.give_back(std::move(first));
  pool.give_back(std::move(second));
  const auto chunk = take(pool, 4096);
  EXPECT_LE(pool.idle_bytes() + chunk->bytes().size(), 2 * 8192)
      << "taking from the pool made the process larger";
}

TEST(ChunkPool, TrimFreesChunksDownToTheLimit) {
  ChunkPool pool;
  std::vector<std::unique_ptr<Chunk>> chunks;
  for (int i = 0; i < 5; ++i) chunks.push_back(take(pool, 4096));
  for (auto& chunk : chunks) pool.give_back(std::move(chunk));
  pool.trim(5 * 4096);
  EXPECT_EQ(pool.idle_bytes(), 5 * 4096);
  pool.trim(3 * 4096 - 1);
  EXPECT_EQ(pool.idle_bytes(), 2 * 4096);
  pool.trim(0);
  EXPECT_EQ(pool.idle_bytes(), 0);
}

TEST(ChunkPool, FailsWithoutMemory) {
  ChunkPool pool;
  os::ScopedFaultHook hook(test::NthCallFails("mmap", 1, ENOMEM));
  const auto chunk = pool.take(4096);
  ASSERT_FALSE(chunk.has_value());
  EXPECT_TRUE(test::is_system_error(chunk.error(), ENOMEM, "mmap", ""));
}

TEST(ChunkPool, CanBeSharedByManyThreads) {
  ChunkPool pool;
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&pool, number] {
      for (int round = 0; round < 200; ++round) {
        auto chunk = take(pool, 4096);
        auto bytes = chunk->bytes();
        std::fill(bytes.begin(), bytes.end(), static_cast<std::byte>(number));
        EXPECT_EQ(bytes[2000], static_cast<std::byte>(number));
        pool.give_back(std::move(chunk));
        pool.trim(2 * 4096);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(pool.idle_bytes(), 2 * 4096);
}

TEST(Chunk, IsPinnedOnceAndUnpinnedWithItsMemory) {
  FakeDevice device;
  {
    auto chunk = Chunk::allocate(4096);
    ASSERT_TRUE(ok(chunk));
    EXPECT_TRUE(ok((*chunk)->pin(0)));
    EXPECT_TRUE(ok((*chunk)->pin(0)));
    EXPECT_EQ(device.pins(), 1);
    EXPECT_EQ(device.pinned_now(), 1);
  }
  EXPECT_EQ(device.pinned_now(), 0);
}

TEST(Chunk, StaysPinnedInThePool) {
  FakeDevice device;
  ChunkPool pool;
  auto chunk = take(pool, 4096);
  ASSERT_TRUE(ok(chunk->pin(0)));
  pool.give_back(std::move(chunk));
  ASSERT_TRUE(ok(take(pool, 4096)->pin(0)));
  EXPECT_EQ(device.pins(), 1);
}

TEST(Chunk, StaysPinnedByItsFirstDevice) {
  FakeDevice device;
  auto chunk = Chunk::allocate(4096);
  ASSERT_TRUE(ok(chunk));
  EXPECT_TRUE(ok((*chunk)->pin(1)));
  EXPECT_TRUE(ok((*chunk)->pin(0)));
  EXPECT_EQ(device.pins(), 1);
}

// --- refill and reserve ------------------------------------------------------------------------

// A pool with two idle chunks after a save that wanted ten, and for which ten are reserved.
class ChunkPoolRefill : public ::testing::Test {
 protected:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kWanted = 10;

  ChunkPoolRefill() {
    auto first = take(pool_, kPage);
    pool_.give_back(take(pool_, kPage));
    pool_.give_back(std::move(first));
    refill();
    pool_.set_reserve(kWanted * kPage, kPage);
  }

  void refill() { pool_.begin_refill({.chunk_bytes = kPage, .count = kWanted}); }
  bool grow_refill() { return pool_.grow_refill().value(); }
  bool grow_reserve() { return pool_.grow_reserve(kAll, Source::kHost).value(); }
  std::size_t idle_chunks() const { return pool_.idle_bytes() / kPage; }

  /// Calls `other` while `allocate` waits in a system call, and returns the result of `other`.
  bool call_during(const std::function<void()>& allocate, const std::function<bool()>& other) {
    HeldOperation held("mmap");
    const std::jthread thread(allocate);
    held.wait_until_held();
    const bool result = other();
    held.open();
    return result;
  }

  static constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();
  ChunkPool pool_;
};

TEST_F(ChunkPoolRefill, AndReserveTogetherAllocateWhatIsMissing) {
  EXPECT_TRUE(pool_.has_refill());
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(grow_refill());
    EXPECT_TRUE(grow_reserve());
  }
  EXPECT_FALSE(pool_.has_refill());
  EXPECT_FALSE(grow_refill());
  EXPECT_FALSE(grow_reserve());
  EXPECT_EQ(idle_chunks(), kWanted);
}

TEST_F(ChunkPoolRefill, ForADeviceCountsTheChunksOfTheReserve) {
  FakeDevice device;
  pool_.begin_refill({.chunk_bytes = kPage, .count = kWanted, .device = 0});
  EXPECT_TRUE(pool_.grow_reserve(7 * kPage, 0).value());
  EXPECT_EQ(idle_chunks(), 7);
  while (grow_refill()) continue;
  EXPECT_EQ(idle_chunks(), kWanted);
  pool_.trim(0);
}

TEST_F(ChunkPoolRefill, CountsTheChunksThatTheReserveIsAllocating) {
  while (idle_chunks() + 1 < kWanted) EXPECT_TRUE(grow_reserve());
  EXPECT_FALSE(call_during([&] { EXPECT_TRUE(grow_reserve()); }, [&] { return grow_refill(); }));
  EXPECT_EQ(idle_chunks(), kWanted);
}

TEST_F(ChunkPoolRefill, CountsForTheReserveWhileItAllocates) {
  while (idle_chunks() + 1 < kWanted) EXPECT_TRUE(grow_refill());
  EXPECT_FALSE(call_during([&] { EXPECT_TRUE(grow_refill()); }, [&] { return grow_reserve(); }));
  EXPECT_EQ(idle_chunks(), kWanted);
}

// The save does not wait for the reserve, which therefore frees its own chunk.
TEST_F(ChunkPoolRefill, AndReserveFreeChunksThatASaveAllocatedMeanwhile) {
  for (const std::function<bool()>& grow :
       {std::function<bool()>([&] { return grow_refill(); }), {[&] { return grow_reserve(); }}}) {
    refill();
    while (idle_chunks() + 1 < kWanted) EXPECT_TRUE(grow());
    std::vector<std::unique_ptr<Chunk>> used;
    {
      HeldOperation held("mmap");
      const std::jthread grower(grow);
      held.wait_until_held();
      while (auto chunk = pool_.take_idle(kPage)) used.push_back(std::move(chunk));
      const std::jthread saver([&] { used.push_back(take(pool_, kPage)); });
      held.wait_until_held(2);
      held.open();
    }
    EXPECT_EQ(used.size() + idle_chunks(), kWanted);
    for (auto& chunk : used) pool_.give_back(std::move(chunk));
    pool_.trim(0);
    pool_.set_reserve(kWanted * kPage, kPage);
  }
}

TEST_F(ChunkPoolRefill, KeepsLateChunksOfTheSaveOnlyIfItLacksThem) {
  std::vector<std::unique_ptr<Chunk>> late;
  for (std::size_t i = 0; i < kWanted + 2; ++i) late.push_back(take(pool_, kPage));
  pool_.set_reserve(0, 2 * kPage);
  for (auto& chunk : late) pool_.give_back_to_refill(std::move(chunk));
  EXPECT_EQ(idle_chunks(), kWanted);
  pool_.cancel_refill();
  pool_.give_back_to_refill(take(pool_, kPage));
  EXPECT_EQ(idle_chunks(), kWanted - 1);
}

// --- arenas ------------------------------------------------------------------------------------

std::vector<std::unique_ptr<Chunk>> take_arena(ChunkPool& pool, std::size_t count) {
  auto chunks = pool.take_arena(4096, count, 0);
  EXPECT_TRUE(ok(chunks));
  return std::move(*chunks);
}

TEST(ChunkArena, IsPinnedOnceForAllItsChunks) {
  FakeDevice device;
  ChunkPool pool;
  const auto chunks = take_arena(pool, 3);
  ASSERT_EQ(chunks.size(), 3);
  for (const auto& chunk : chunks) EXPECT_TRUE(ok(chunk->pin(0)));
  EXPECT_EQ(device.pins(), 1);
  EXPECT_EQ(chunks[2]->bytes().data(), chunks[0]->bytes().data() + 2 * 4096);
}

TEST(ChunkArena, IsFreedOnceAllItsChunksAreIdle) {
  FakeDevice device;
  ChunkPool pool;
  auto chunks = take_arena(pool, 3);
  pool.give_back(std::move(chunks[0]));
  pool.give_back(std::move(chunks[1]));
  pool.trim(0);
  EXPECT_EQ(pool.idle_bytes(), 2 * 4096) << "memory in use was taken for free";
  pool.give_back(std::move(chunks[2]));
  pool.trim(0);
  EXPECT_EQ(pool.idle_bytes(), 0);
  EXPECT_EQ(device.pinned_now(), 0);
}

TEST(ChunkArena, IsTrimmedToAtMostTheLimit) {
  FakeDevice device;
  ChunkPool pool;
  for (const std::size_t count : {2, 3, 1}) {
    for (auto& chunk : take_arena(pool, count)) pool.give_back(std::move(chunk));
  }
  for (std::size_t most = 6; most-- > 0;) {
    pool.trim_to_budget(most * 4096);
    EXPECT_LE(pool.idle_bytes(), most * 4096);
  }
  EXPECT_EQ(device.pinned_now(), 0);
}

TEST(ChunkArena, IsFreedWhenItsLastChunkIsDiscarded) {
  FakeDevice device;
  ChunkPool pool;
  for (auto& chunk : take_arena(pool, 3)) {
    EXPECT_EQ(device.pinned_now(), 1);
    pool.discard(std::move(chunk));
  }
  EXPECT_EQ(device.pinned_now(), 0);
  EXPECT_EQ(pool.idle_bytes(), 0);
}

TEST(ChunkArena, IsFreedForChunksOfAnotherSize) {
  FakeDevice device;
  ChunkPool pool;
  for (auto& chunk : take_arena(pool, 4)) pool.give_back(std::move(chunk));
  const auto chunk = take(pool, 8192);
  EXPECT_EQ(pool.idle_bytes(), 0);
}

TEST(ChunkArena, IsFreedIfItCannotBePinned) {
  FakeDevice device;
  ChunkPool pool;
  device.fail_pins(system_error(ENOMEM, "cudaHostRegister", ""));
  EXPECT_FALSE(pool.take_arena(4096, 3, 0).has_value());
  EXPECT_EQ(pool.idle_bytes(), 0);
  device.fail_pins({});
}

TEST(Chunk, IsNotUnpinnedByAForkedChild) {
  FakeDevice device;
  auto chunk = Chunk::allocate(4096);
  ASSERT_TRUE(ok(chunk));
  ASSERT_TRUE(ok((*chunk)->pin(0)));
  const pid_t child = ::fork();
  if (child == 0) {
    chunk->reset();
    ::_exit(device.pinned_now() == 1 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Chunk, IsNotPinnedWithoutADevice) {
  NoDevice none;
  auto chunk = Chunk::allocate(4096);
  ASSERT_TRUE(ok(chunk));
  EXPECT_TRUE(ok((*chunk)->pin(0)));
}

TEST(Chunk, ReportsWhyItCannotBePinnedAndIsNotUnpinned) {
  FakeDevice device;
  device.fail_pins(system_error(ENOMEM, "cudaHostRegister", ""));
  auto chunk = Chunk::allocate(4096);
  ASSERT_TRUE(ok(chunk));
  const auto pinned = (*chunk)->pin(0);
  ASSERT_FALSE(pinned.has_value());
  EXPECT_EQ(pinned.error().sys_errno, ENOMEM);
}

}  // namespace
}  // namespace torch_ckpt::staging
