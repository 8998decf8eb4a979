#include "engine/staging_buffers.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <utility>

#include "fake_device.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using test::FakeDevice;
using test::ok;

constexpr std::size_t kPage = 4096;
// Longer than any call that does not block.
constexpr std::chrono::seconds kLongest{20};

TEST(StagingBuffers, FreeMemoryThatIsNoLongerWantedWithoutTheirLock) {
  FakeDevice device;
  StagingBuffers buffers(context(), 3, kPage, 0, 1);
  StagingBufferList made = buffers.take_unallocated();
  ASSERT_EQ(made.size(), 3);
  ASSERT_TRUE(ok(buffers.allocate(made)));
  buffers.close(0);
  context().chunks.cancel_refill();
  std::future<std::size_t> other;
  bool others_go_on = false;
  device.on_unpin([&] {
    other = std::async(std::launch::async, [&] { return buffers.unallocated_count(); });
    others_go_on = other.wait_for(kLongest) == std::future_status::ready;
  });
  while (!made.empty()) {
    StagingBufferList one;
    one.splice(one.end(), made, made.begin());
    buffers.release(std::move(one));
  }
  EXPECT_TRUE(others_go_on);
  EXPECT_EQ(device.pinned_now(), 0);
  device.on_unpin({});
}

TEST(StagingBuffers, AreAllocatedOneByOneIfTheirArenaCannotBePinned) {
  FakeDevice device;
  static_cast<void>(context().warnings.take());
  context().warnings.forget("page-locking");
  device.fail_pins(system_error(ENOMEM, "cudaHostRegister", ""));
  StagingBuffers buffers(context(), 3, kPage, 0, 1);
  StagingBufferList made = buffers.take_unallocated();
  EXPECT_TRUE(ok(buffers.allocate(made)));
  for (const StagingBuffer& buffer : made) EXPECT_NE(buffer.chunk, nullptr);
  EXPECT_EQ(context().warnings.take().size(), 1);
  device.fail_pins({});
  while (!made.empty()) {
    StagingBufferList one;
    one.splice(one.end(), made, made.begin());
    buffers.release(std::move(one));
  }
  buffers.close(0);
}

// Otherwise a reserve that grows during the save and the save would both allocate all memory.
TEST(StagingBuffers, UseChunksThatOtherThreadsHaveAllocatedMeanwhile) {
  FakeDevice device;
  StagingBuffers buffers(context(), 3, kPage, 0, 1);
  buffers.take_idle_chunks();
  staging::ChunkPool& pool = context().chunks;
  auto arena = pool.take_arena(kPage, 2, 0);
  ASSERT_TRUE(ok(arena));
  for (auto& chunk : *arena) pool.give_back(std::move(chunk));
  const auto idle = pool.idle_bytes();
  StagingBufferList made = buffers.take_unallocated();
  ASSERT_EQ(made.size(), 3);
  ASSERT_TRUE(ok(buffers.allocate(made)));
  for (const StagingBuffer& buffer : made) EXPECT_NE(buffer.chunk, nullptr);
  EXPECT_EQ(pool.idle_bytes(), idle - 2 * kPage);
  EXPECT_EQ(device.pinned_now(), 2);  // the arena, and the third chunk
  while (!made.empty()) {
    StagingBufferList one;
    one.splice(one.end(), made, made.begin());
    buffers.release(std::move(one));
  }
  buffers.close(0);
  pool.trim(0);
}

TEST(StagingBuffers, DoNotAskAgainForChunksOfAReserve) {
  FakeDevice device;
  staging::ChunkPool& pool = context().chunks;
  pool.trim(0);
  {
    StagingBuffers buffers(context(), 10, kPage, 0, 1);
    buffers.take_idle_chunks();
    pool.set_reserve(8 * kPage, kPage);
    while (pool.grow_reserve(8 * kPage, 0).value()) continue;
    buffers.close(0);
  }
  EXPECT_TRUE(pool.has_refill());
  while (pool.grow_refill().value()) continue;
  EXPECT_EQ(pool.idle_bytes(), 10 * kPage);
  pool.trim(0);
}

TEST(StagingBuffers, AreAllocatedOneAtATimeForTheHost) {
  StagingBuffers buffers(context(), 3, kPage, staging::Source::kHost, 1);
  EXPECT_EQ(buffers.take_unallocated().size(), 1);
}

}  // namespace
}  // namespace torch_ckpt::engine
