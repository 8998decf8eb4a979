#include "staging/chunk_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "fake_device.h"
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
