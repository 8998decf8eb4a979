#include "engine/bulk_copy.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "os/fault.h"
#include "staging/chunk_pool.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using os::ScopedFaultHook;
using staging::ChunkPool;
using staging::Source;
using namespace test;

std::string copied(const PooledCopy& copy, std::size_t bytes) {
  return std::string(test::text_of({copy.address, bytes}));
}

std::vector<PooledCopy> copies_of(const std::vector<std::string>& payloads) {
  std::vector<Source> sources;
  for (const std::string& payload : payloads) sources.push_back(host_source(payload));
  return copy_to_pool(context(), sources).value();
}

TEST(BulkCopy, CopiesTheBytesOfEachSource) {
  Random random(1);
  std::vector<std::string> payloads;
  for (int i = 0; i < 300; ++i) payloads.push_back(random.bytes(random.any_scale(100'000)));
  const auto copies = copies_of(payloads);
  ASSERT_EQ(copies.size(), payloads.size());
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    ASSERT_TRUE(copied(copies[i], payloads[i].size()) == payloads[i]) << i;
  }
}

TEST(BulkCopy, GathersStridedSources) {
  const std::string matrix = "abcdef";  // 2 x 3
  Source source = host_source(matrix);
  source.dims = {{3, 1}, {2, 3}};
  const auto copies = copy_to_pool(context(), {&source, 1});
  ASSERT_TRUE(ok(copies));
  EXPECT_EQ(copied(copies->front(), 6), "adbecf");
}

TEST(BulkCopy, IsIndependentOfItsSources) {
  std::string payload = "old";
  const Source source = host_source(payload);
  const auto copies = copy_to_pool(context(), {&source, 1});
  ASSERT_TRUE(ok(copies));
  payload = "new";
  EXPECT_EQ(copied(copies->front(), 3), "old");
}

TEST(BulkCopy, AlignsCopiesTo64Bytes) {
  std::vector<std::string> payloads;
  for (std::size_t bytes = 0; bytes < 200; ++bytes) payloads.emplace_back(bytes, 'x');
  for (const PooledCopy& copy : copies_of(payloads)) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(copy.address) % 64, 0);
  }
}

TEST(BulkCopy, SmallCopiesShareMemory) {
  context().chunks.trim(0);
  CallCounter counter;
  ScopedFaultHook hook(counter);
  const auto copies = copies_of(std::vector<std::string>(100, std::string(50, 'x')));
  EXPECT_EQ(counter.calls("mmap"), 1);
  EXPECT_EQ(copies.front().memory, copies.back().memory);
  EXPECT_EQ(copies.front().memory->bytes().size(), 8192) << "no more than they need";
}

TEST(BulkCopy, ReturnsMemoryToThePoolWithItsLastCopy) {
  context().chunks.trim(0);
  auto copies = copies_of({"one", "two"});
  PooledCopy last = copies.back();
  copies.clear();
  EXPECT_EQ(context().chunks.idle_bytes(), 0);
  last = {};
  EXPECT_EQ(context().chunks.idle_bytes(), 4096);
}

TEST(BulkCopy, ReusesTheMemoryOfAnEarlierBulkCopy) {
  context().chunks.trim(0);
  copies_of({"one", "two"});
  CallCounter counter;
  ScopedFaultHook hook(counter);
  copies_of({"three", "four"});
  EXPECT_EQ(counter.calls("mmap"), 0);
}

TEST(BulkCopy, WithoutSourcesIsEmpty) {
  CallCounter counter;
  ScopedFaultHook hook(counter);
  const auto copies = copy_to_pool(context(), {});
  ASSERT_TRUE(ok(copies));
  EXPECT_TRUE(copies->empty());
  EXPECT_EQ(counter.calls("mmap"), 0);
}

TEST(BulkCopy, NeverTouchesTheAddressOfAnEmptySource) {
  const std::vector<Source> sources(3);
  const auto copies = copy_to_pool(context(), sources);
  ASSERT_TRUE(ok(copies));
  EXPECT_EQ(copies->size(), 3);
}

TEST(BulkCopy, FailsWithoutMemory) {
  context().chunks.trim(0);
  const std::string payload = "x";
  const Source source = host_source(payload);
  ScopedFaultHook hook(NthCallFails("mmap", 1, ENOMEM));
  const auto copies = copy_to_pool(context(), {&source, 1});
  ASSERT_FALSE(copies.has_value());
  EXPECT_TRUE(is_system_error(copies.error(), ENOMEM, "mmap", ""));
}

TEST(BulkCopy, ByManyThreadsAtOnceGivesEachItsOwnCopies) {
  std::vector<std::jthread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([number] {
      Random random(10 + number);
      for (int round = 0; round < 50; ++round) {
        std::vector<std::string> payloads;
        for (int i = 0; i < 10; ++i) payloads.push_back(random.bytes(random.any_scale(20'000)));
        const auto copies = copies_of(payloads);
        for (std::size_t i = 0; i < payloads.size(); ++i) {
          EXPECT_TRUE(copied(copies[i], payloads[i].size()) == payloads[i]);
        }
      }
    });
  }
}

// Sources of more bytes than one chunk has, all of them parts of one payload.
class LargeBulkCopy : public ::testing::Test {
 protected:
  static constexpr std::size_t kBytes = std::size_t{40} << 20;

  LargeBulkCopy() : payload_(Random(2).bytes(kBytes + 4)) {
    for (std::size_t i = 0; i < 4; ++i) {
      sources_.push_back(host_source(std::string_view(payload_).substr(i, kBytes)));
    }
    context().chunks.trim(0);
  }
  ~LargeBulkCopy() override { context().chunks.trim(0); }

  const std::string payload_;
  std::vector<Source> sources_;
};

TEST_F(LargeBulkCopy, CopiesTheBytesOfEachSource) {
  const auto copies = copy_to_pool(context(), sources_);
  ASSERT_TRUE(ok(copies));
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    EXPECT_EQ(std::memcmp((*copies)[i].address, sources_[i].address, kBytes), 0) << i;
  }
}

TEST_F(LargeBulkCopy, SharesNoMemory) {
  const auto copies = copy_to_pool(context(), sources_);
  ASSERT_TRUE(ok(copies));
  EXPECT_NE((*copies)[0].memory, (*copies)[1].memory);
}

TEST_F(LargeBulkCopy, ReturnsItsMemoryIfItFails) {
  for (std::size_t n = 1; n <= 4; ++n) {
    CallCounter counter;
    const NthCallFails fault("mmap", n, ENOMEM);
    ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
      counter(operation, path);
      return fault(operation, path);
    });
    const auto copies = copy_to_pool(context(), sources_);
    ASSERT_FALSE(copies.has_value()) << n;
    EXPECT_TRUE(is_system_error(copies.error(), ENOMEM, "mmap", "")) << n;
    EXPECT_EQ(context().chunks.idle_bytes(), (counter.calls("mmap") - 1) * kBytes) << n;
    context().chunks.trim(0);
  }
}

}  // namespace
}  // namespace torch_ckpt::engine
