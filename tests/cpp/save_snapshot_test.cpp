// Saves in the background: staged ahead of the disk, written by low-priority threads.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>

#include "engine/context.h"
#include "engine/save_session.h"
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

using Names = std::vector<std::string>;

// Longer than any test runs, so that a lost message is a failure and not a hang.
constexpr std::chrono::minutes kLongest{2};
constexpr std::chrono::milliseconds kAtOnce{0};

constexpr PoolSpec kQuiet{{19, true}, 4};

SaveOptions snapshot(std::size_t chunk_bytes = kPage, std::size_t max_host_bytes = 0) {
  SaveOptions options;
  options.snapshot = true;
  options.writers = kQuiet;
  options.chunk_bytes = chunk_bytes;
  options.max_host_bytes = max_host_bytes;
  return options;
}

void expect_saved(SaveSession& session, const Files& files) {
  wait_for_end(session);
  EXPECT_TRUE(ok(session.outcome()));
  files.expect_on_disk();
}

// Priorities of the calling thread.
int nice_now() { return ::getpriority(PRIO_PROCESS, 0); }
bool idle_io_now() { return ::syscall(SYS_ioprio_get, 1, 0) >> 13 == 3; }

// Collects values from the threads that call an operation.
template <class T>
class Seen {
 public:
  void add(T value) {
    const std::lock_guard lock(mutex_);
    values_.push_back(value);
  }
  std::vector<T> values() const {
    const std::lock_guard lock(mutex_);
    return values_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<T> values_;  // guarded by mutex_
};

// --- the sources ------------------------------------------------------------------------------

using SnapshotTest = FilesTest;

TEST_F(SnapshotTest, IsStagedBeforeAnyWriteIsDone) {
  Random random(1);
  add_assorted_files(files_, random, 5);
  HeldOperation writes("pwrite");
  const auto session = start(directory_, files_, snapshot());
  EXPECT_TRUE(session->wait_staged(kLongest));
  EXPECT_FALSE(session->wait_for(kAtOnce));
  EXPECT_EQ(session->progress().bytes_staged, files_.bytes());
  EXPECT_EQ(session->progress().bytes_written, 0);
  writes.open();
  expect_saved(*session, files_);
}

TEST_F(SnapshotTest, NeedsNoSourceOnceItIsStaged) {
  Random random(2);
  add_assorted_files(files_, random, 5);
  files_.begin_file();
  files_.add_transposed(random.bytes(120 * 70), 120, 70);
  HeldOperation writes("pwrite");
  const auto session = start(directory_, files_, snapshot());
  ASSERT_TRUE(session->wait_staged(kLongest));
  files_.destroy_sources();
  writes.open();
  expect_saved(*session, files_);
}

TEST_F(SnapshotTest, WithoutFilesIsStagedAndEndsAtOnce) {
  TempDir directory;
  const Files files(directory);
  const auto session = start(directory, files, snapshot());
  EXPECT_TRUE(session->wait_submitted(kAtOnce));
  EXPECT_TRUE(session->wait_staged(kAtOnce));
  EXPECT_TRUE(session->wait_for(kAtOnce));
  EXPECT_TRUE(ok(session->outcome()));
}

TEST_F(SnapshotTest, OfHostMemoryIsSubmittedToo) {
  files_.add_file("hello");
  const auto session = start(directory_, files_, snapshot());
  EXPECT_TRUE(session->wait_submitted(kLongest));
  expect_saved(*session, files_);
}

// --- the files --------------------------------------------------------------------------------

TEST_F(SnapshotTest, WritesTheSameFilesAsASaveInTheForeground) {
  Random random(3);
  for (int round = 0; round < 60; ++round) {
    TempDir foreground;
    TempDir background;
    Files files(foreground);
    add_assorted_files(files, random, random.between(1, 9));
    files.begin_file();
    const std::size_t rows = random.between(1, 100);
    const std::size_t columns = random.between(1, 200);
    files.add_transposed(random.bytes(rows * columns), rows, columns);

    SaveOptions options = snapshot(kPage * random.between(1, 20));
    if (random.coin()) options.chunk_bytes = std::size_t{4} << 20;
    if (random.coin()) options.max_host_bytes = random.between(kPage, 40 * kPage);
    options.parallel_files = random.between(0, 4);
    options.parallel_stagers = random.between(0, 6);
    options.direct_io = random.coin() ? DirectIo::on : DirectIo::off;
    options.sync = false;
    SaveOptions plain;
    plain.sync = false;
    ASSERT_TRUE(ok(run_save(foreground, files.jobs(), plain)));
    ASSERT_TRUE(ok(run_save(background, files.jobs(), options)));
    files.expect_in(foreground);
    files.expect_in(background);
    ASSERT_FALSE(::testing::Test::HasFailure())
        << "round " << round << ", chunk_bytes " << options.chunk_bytes << ", max_host_bytes "
        << options.max_host_bytes << ", parallel_files " << options.parallel_files
        << ", parallel_stagers " << options.parallel_stagers;
  }
}

class SnapshotModes : public FilesTest, public ::testing::WithParamInterface<DirectIo> {};

TEST_P(SnapshotModes, EmptyFilesAndPayloadsAreCreated) {
  files_.begin_file();
  files_.add_file("");
  files_.begin_file();
  files_.add_tensor("");
  files_.add_bytes("");
  SaveOptions options = snapshot();
  options.direct_io = GetParam();
  expect_saved(*start(directory_, files_, options), files_);
}

TEST_P(SnapshotModes, FilesLargerThanTheDirectThresholdAreExact) {
  Random random(4);
  files_.begin_file();
  files_.add_tensor(random.bytes((2 << 20) + 12345));
  files_.add_tensor(random.bytes(100));
  files_.add_file(random.bytes(1 << 20));
  SaveOptions options = snapshot(64 << 10);
  options.direct_io = GetParam();
  expect_saved(*start(directory_, files_, options), files_);
}

TEST_P(SnapshotModes, MoreFilesThanAreWrittenAtOnceAreExact) {
  Random random(5);
  add_assorted_files(files_, random, 20);
  SaveOptions options = snapshot();
  options.parallel_files = 3;
  options.direct_io = GetParam();
  expect_saved(*start(directory_, files_, options), files_);
}

TEST_P(SnapshotModes, OneChunkSufficesForManyFiles) {
  Random random(6);
  add_assorted_files(files_, random, 40);
  SaveOptions options = snapshot(kPage, kPage);
  options.direct_io = GetParam();
  expect_saved(*start(directory_, files_, options), files_);
}

TEST_P(SnapshotModes, ABudgetBelowOneChunkUsesASmallerChunk) {
  Random random(7);
  add_assorted_files(files_, random, 6);
  context().chunks.trim(0);
  SaveOptions options = snapshot(std::size_t{4} << 20, kPage + 1);
  options.direct_io = GetParam();
  expect_saved(*start(directory_, files_, options), files_);
  context().executor.join();
  EXPECT_EQ(context().chunks.idle_bytes(), kPage);
}

INSTANTIATE_TEST_SUITE_P(AllModes, SnapshotModes, test::all_direct_io(), test::direct_io_name);

TEST_F(SnapshotTest, ReturnsTheChecksumOfEachPayload) {
  Random random(8);
  add_assorted_files(files_, random, 5);
  files_.begin_file();
  files_.add_transposed(random.bytes(90 * 110), 90, 110);
  const auto session = start(directory_, files_, snapshot());
  wait_for_end(*session);
  ASSERT_TRUE(ok(session->outcome()));
  for (std::size_t i = 0; i < 6; ++i) {
    files_.expect_result(*session, i);
  }
}

// --- waves ------------------------------------------------------------------------------------

TEST_F(SnapshotTest, LargerThanItsBudgetIsStagedOnlyAfterWrites) {
  files_.add_file(std::string(10 * kPage, 'x'));
  context().chunks.trim(0);
  HeldOperation writes("pwrite");
  const auto session = start(directory_, files_, snapshot(kPage, 3 * kPage));
  writes.wait_until_held();
  EXPECT_FALSE(session->wait_staged(kAtOnce));
  EXPECT_LE(session->progress().bytes_staged, 3 * kPage);
  writes.open();
  ASSERT_TRUE(session->wait_staged(kLongest));
  EXPECT_GE(session->progress().bytes_written, 7 * kPage)
      << "each of three chunks was filled anew after its write";
  expect_saved(*session, files_);
}

TEST_F(SnapshotTest, StaysWithinItsBudget) {
  Random random(9);
  for (int i = 0; i < 10; ++i) files_.add_file(random.bytes(100'000));
  context().chunks.trim(0);
  const SaveOptions options = snapshot(2 * kPage, 10 * kPage + 1000);
  CallCounter counter;
  ScopedFaultHook hook(counter);
  expect_saved(*start(directory_, files_, options), files_);
  context().executor.join();
  EXPECT_LE(counter.calls("mmap"), 5);
  EXPECT_LE(context().chunks.idle_bytes(), options.max_host_bytes);
}

TEST_F(SnapshotTest, WithoutABudgetAllocatesNoMoreThanTheSizeOfItsState) {
  for (const std::size_t bytes : {std::size_t{1}, kPage, 3 * kPage + 1}) {
    files_.add_file(std::string(bytes, 'x'));
  }
  context().chunks.trim(0);
  expect_saved(*start(directory_, files_, snapshot()), files_);
  context().executor.join();
  EXPECT_LE(context().chunks.idle_bytes(), files_.chunks(kPage) * kPage);
}

TEST_F(SnapshotTest, StaysWithinItsBudgetAfterALargerOne) {
  TempDir first;
  Files large(first);
  large.add_file(std::string(1 << 20, 'x'));
  context().chunks.trim(0);
  expect_saved(*start(first, large, snapshot(128 << 10)), large);
  context().executor.join();
  TempDir second;
  Files small(second);
  small.add_file(std::string(1 << 20, 'y'));
  const SaveOptions options = snapshot(2 * kPage, 6 * kPage);
  // At every write: at least the chunk that is written, plus the idle chunks of the pool.
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "pwrite") {
      EXPECT_LE(context().chunks.idle_bytes() + options.chunk_bytes, options.max_host_bytes);
    }
    return 0;
  });
  expect_saved(*start(second, small, options), small);
}

// --- memory -----------------------------------------------------------------------------------

TEST_F(SnapshotTest, ReusesTheChunksOfAnEarlierOne) {
  TempDir first;
  Files files(first);
  files.add_file(std::string(100'000, 'x'));
  files.add_file(std::string(50'000, 'y'));
  context().chunks.trim(0);
  {
    // Each chunk of the file is then staged in a chunk of its own.
    HeldOperation writes("pwrite");
    const auto session = start(first, files, snapshot());
    EXPECT_TRUE(session->wait_staged(kLongest));
    writes.open();
    expect_saved(*session, files);
  }
  EXPECT_EQ(context().chunks.idle_bytes(), files.chunks(kPage) * kPage);
  TempDir second;
  CallCounter counter;
  ScopedFaultHook hook(counter);
  ASSERT_TRUE(ok(run_save(second, files.jobs(), snapshot())));
  EXPECT_EQ(counter.calls("mmap"), 0);
  files.expect_in(second);
}

// --- memory for the next save --------------------------------------------------------------------

// A save that is staged and written through its first chunk while the allocation of the others is
// held, as with storage that is as fast as staging.
class FastSave : public SnapshotTest {
 protected:
  FastSave() {
    for (int i = 0; i < 3; ++i) files_.add_file(std::string(20 * kPage, 'x'));
    context().executor.join();
    context().chunks.trim(0);
  }

  /// Ends a save, calls `after` while the allocations are still held, and completes those.
  void save(const SaveOptions& options, const std::function<void()>& after = {}) {
    {
      HeldOperation more("mmap", 2);
      expect_saved(*start(directory_, files_, options), files_);
      if (after) after();
    }
    context().executor.join();
  }

  std::size_t idle_chunks() const { return context().chunks.idle_bytes() / kPage; }
};

TEST_F(FastSave, IsFollowedByOneThatAllocatesNothing) {
  save(snapshot());
  EXPECT_EQ(idle_chunks(), files_.chunks(kPage));
  TempDir second;
  CallCounter counter;
  const ScopedFaultHook hook(counter);
  EXPECT_TRUE(ok(run_save(second, files_.jobs(), snapshot())));
  context().executor.join();
  EXPECT_EQ(counter.calls("mmap"), 0);
  EXPECT_EQ(idle_chunks(), files_.chunks(kPage));
  files_.expect_in(second);
}

TEST_F(FastSave, AllocatesTheRestAtLowPriority) {
  Seen<int> nice;
  std::atomic<bool> has_ended{false};
  {
    Gate more;
    std::atomic<int> mmaps{0};
    const ScopedFaultHook hook(
        [&, wait = more.passage()](std::string_view operation, std::string_view) {
          if (operation != "mmap") return 0;
          if (has_ended) nice.add(nice_now());
          if (++mmaps > 1) wait();
          return 0;
        });
    expect_saved(*start(directory_, files_, snapshot()), files_);
    has_ended = true;
    more.open();
    context().executor.join();
  }
  // When the save ended, the first chunk was there, and up to four others were being allocated.
  const std::vector<int> values = nice.values();
  EXPECT_GE(std::ranges::count(values, 19), files_.chunks(kPage) - 5);
}

TEST_F(FastSave, KeepsNoMoreMemoryThanItsBudget) {
  save(snapshot(kPage, 10 * kPage));
  EXPECT_EQ(idle_chunks(), 10);
}

TEST_F(FastSave, LeavesTheAllocationToASaveThatBeginsMeanwhile) {
  TempDir other;
  Files small(other);
  small.add_file(std::string(2 * kPage, 'y'));
  save(snapshot(), [&] {
    EXPECT_EQ(idle_chunks(), 1);
    expect_saved(*start(other, small, snapshot()), small);
  });
  EXPECT_EQ(idle_chunks(), small.chunks(kPage));
}

TEST_F(FastSave, AllocatesNothingMoreAfterATrim) {
  save(snapshot(), [&] { context().chunks.trim(0); });
  EXPECT_EQ(idle_chunks(), 0);
}

TEST_F(FastSave, DoesNotDelayTheEndOfTheProcess) {
  CallCounter counter;
  {
    HeldOperation more("mmap", 2, [&](std::string_view operation, std::string_view path) {
      return counter(operation, path);
    });
    expect_saved(*start(directory_, files_, snapshot()), files_);
    context().chunks.cancel_refill();
    more.open();
    context().join();
  }
  // Besides the first chunk: those that were being allocated already.
  EXPECT_LE(counter.calls("mmap"), 5);
  EXPECT_EQ(idle_chunks(), 1);
}

TEST_F(FastSave, FreesChunksOfAnotherSizeForTheRest) {
  for (int i = 0; i < 5; ++i) {
    auto other = context().chunks.take(2 * kPage);
    ASSERT_TRUE(ok(other));
    context().chunks.give_back(std::move(*other));
  }
  save(snapshot());
  EXPECT_EQ(context().chunks.idle_bytes(), files_.chunks(kPage) * kPage);
}

TEST_F(FastSave, AllocatesNothingForTheNextAfterAFailure) {
  {
    HeldOperation more("mmap", 2, NthCallFails("fsync", 1, EIO));
    const auto session = start(directory_, files_, snapshot());
    ASSERT_TRUE(session->wait_for(kLongest));
    EXPECT_FALSE(session->outcome());
  }
  context().executor.join();
  EXPECT_LE(idle_chunks(), 1);
}

// --- memory of a save ------------------------------------------------------------------------

TEST_F(SnapshotTest, IsStagedThroughAnIdleChunkWhileOthersAreAllocated) {
  Random random(10);
  add_assorted_files(files_, random, 6);
  context().chunks.trim(0);
  HeldOperation more("mmap", 2);
  const auto session = start(directory_, files_, snapshot());
  EXPECT_TRUE(session->wait_staged(kLongest));
  expect_saved(*session, files_);
}

TEST_F(SnapshotTest, StaysWithinItsBudgetIfItEndsBeforeItsMemoryIsAllocated) {
  for (int i = 0; i < 3; ++i) files_.add_file(std::string(20 * kPage, 'x'));
  context().chunks.trim(0);
  {
    HeldOperation more("mmap", 2);
    expect_saved(*start(directory_, files_, snapshot(kPage, 10 * kPage)), files_);
    EXPECT_EQ(context().chunks.idle_bytes(), kPage) << "the one that all went through";
  }
  context().executor.join();
  EXPECT_LE(context().chunks.idle_bytes(), 10 * kPage);
}

TEST_F(SnapshotTest, AllocatesUnneededMemoryAtLowPriority) {
  files_.add_file(std::string(5 * kPage, 'x'));
  context().chunks.trim(0);
  Gate first_write;
  Gate second_chunk;
  Gate last_write;
  Seen<int> nice;
  {
    std::atomic<int> mmaps{0};
    std::atomic<int> writes{0};
    // The save is staged through the first chunk only, while the second is being allocated. It ends
    // once all chunks are allocated.
    ScopedFaultHook hook(
        [&, first = first_write.passage(), second = second_chunk.passage(),
         last = last_write.passage()](std::string_view operation, std::string_view) {
          if (operation == "mmap") {
            nice.add(nice_now());
            if (++mmaps == 2) {
              first_write.open();
              second();
            }
            if (mmaps == 5) last_write.open();
          }
          if (operation == "pwrite") first();
          if (operation == "pwrite" && ++writes == 5) last();
          return 0;
        });
    const auto session = start(directory_, files_, snapshot());
    EXPECT_TRUE(session->wait_staged(kLongest));
    second_chunk.open();
    expect_saved(*session, files_);
  }
  const int loud = nice_now();
  EXPECT_EQ(nice.values(), (std::vector<int>{loud, loud, 19, 19, 19}));
  context().executor.join();
  EXPECT_EQ(context().chunks.idle_bytes(), 5 * kPage);
}

TEST_F(SnapshotTest, DoesNotFailForMemoryThatOnlyTheNextSaveNeeds) {
  files_.add_file(std::string(5 * kPage, 'x'));
  context().chunks.trim(0);
  Gate second_chunk;
  Gate last_write;
  std::atomic<int> mmaps{0};
  std::atomic<int> writes{0};
  // The save is staged through the first chunk only. It ends once the allocation of the second has
  // failed.
  ScopedFaultHook hook([&, second = second_chunk.passage(), last = last_write.passage()](
                           std::string_view operation, std::string_view) {
    if (operation == "mmap" && ++mmaps == 2) {
      second();
      last_write.open();
      return ENOMEM;
    }
    if (operation == "pwrite" && ++writes == 5) last();
    return 0;
  });
  const auto session = start(directory_, files_, snapshot());
  EXPECT_TRUE(session->wait_staged(kLongest));
  second_chunk.open();
  expect_saved(*session, files_);
}

TEST_F(SnapshotTest, SeveralAtOnceAreIndependent) {
  Random random(11);
  std::deque<TempDir> directories(4);
  std::deque<Files> files;
  std::vector<std::shared_ptr<SaveSession>> sessions;
  for (const TempDir& directory : directories) {
    add_assorted_files(files.emplace_back(directory), random, 6);
    sessions.push_back(start(directory, files.back(), snapshot(kPage, 4 * kPage)));
  }
  for (std::size_t i = 0; i < 4; ++i) expect_saved(*sessions[i], files[i]);
}

// --- faults -----------------------------------------------------------------------------------

using SnapshotFaults = SaveFaults;

SaveOptions fault_options(std::size_t max_host_bytes) {
  SaveOptions options = snapshot(2 * kPage, max_host_bytes);
  options.direct_io = DirectIo::on;  // so that ftruncate is among the calls
  return options;
}

TEST_P(SnapshotFaults, InAnySystemCallFailTheSaveEndItsStagingAndLeaveNoFile) {
  for (const std::size_t budget : {std::size_t{0}, 2 * kPage}) {
    fail_each_call([&](const TempDir& directory, const Files& files) {
      const auto session = start(directory, files, fault_options(budget));
      EXPECT_TRUE(session->wait_submitted(kLongest));
      EXPECT_TRUE(session->wait_staged(kLongest));
      wait_for_end(*session);
      return session->outcome();
    });
  }
}

TEST_P(SnapshotFaults, AfterStagingFailTheSaveToo) {
  TempDir directory;
  Files files(directory);
  add_files(files);
  HeldOperation opens("open", 1, [](std::string_view operation, std::string_view) {
    return operation == GetParam().operation ? GetParam().sys_errno : 0;
  });
  const auto session = start(directory, files, fault_options(0));
  ASSERT_TRUE(session->wait_staged(kLongest));
  files.destroy_sources();
  opens.open();
  wait_for_end(*session);
  ASSERT_TRUE(fails(session->outcome(), Errc::system));
  EXPECT_EQ(session->outcome().error().sys_errno, GetParam().sys_errno);
  EXPECT_EQ(directory.names(), Names{});
}

INSTANTIATE_TEST_SUITE_P(Operations, SnapshotFaults,
                         ::testing::Values(Fault{"open", EACCES}, Fault{"pwrite", ENOSPC},
                                           Fault{"fallocate", ENOSPC}, Fault{"ftruncate", EIO},
                                           Fault{"fsync", EIO}, Fault{"close", EDQUOT},
                                           Fault{"fsync_directory", EIO}),
                         SaveFaults::name);

TEST_F(SnapshotTest, FailsAndEndsItsStagingWithoutMemory) {
  for (int i = 0; i < 5; ++i) files_.add_file(std::string(10 * kPage, 'x'));
  context().chunks.trim(0);
  ScopedFaultHook hook([](std::string_view operation, std::string_view) {
    return operation == "mmap" ? ENOMEM : 0;
  });
  const auto session = start(directory_, files_, snapshot());
  EXPECT_TRUE(session->wait_staged(kLongest));
  wait_for_end(*session);
  ASSERT_FALSE(session->outcome().has_value());
  EXPECT_TRUE(is_system_error(session->outcome().error(), ENOMEM, "mmap", ""));
  EXPECT_EQ(directory_.names(), Names{});
}

TEST_F(SnapshotTest, SucceedsAfterAnEarlierFailure) {
  files_.add_file(std::string(50'000, 'x'));
  {
    ScopedFaultHook hook(NthCallFails("pwrite", 2, EIO));
    ASSERT_FALSE(run_save(directory_, files_.jobs(), snapshot()).has_value());
  }
  expect_saved(*start(directory_, files_, snapshot()), files_);
}

TEST_F(SnapshotTest, LeavesAllFilesOrNoneOnAnyFailure) {
  Random random(12);
  const std::vector<std::string> operations{"open", "pwrite", "fsync", "mmap", "fallocate"};
  for (int round = 0; round < 100; ++round) {
    TempDir directory;
    Files files(directory);
    add_assorted_files(files, random, 4);
    if (random.coin()) context().chunks.trim(0);
    SaveOptions options = snapshot(kPage, random.coin() ? 0 : kPage * random.between(1, 10));
    options.parallel_files = random.between(0, 3);
    options.parallel_stagers = random.between(0, 6);
    const NthCallFails fault(operations[random.between(0, 4)], random.between(1, 12), EIO);
    ScopedFaultHook hook(fault);
    const auto session = start(directory, files, options);
    EXPECT_TRUE(session->wait_staged(kLongest));
    wait_for_end(*session);
    if (session->outcome()) {
      files.expect_on_disk();
    } else {
      EXPECT_EQ(session->outcome().error().sys_errno, EIO);
      EXPECT_EQ(directory.names(), Names{});
    }
    ASSERT_FALSE(::testing::Test::HasFailure()) << "round " << round;
  }
}

// --- cancellation -----------------------------------------------------------------------------

TEST_F(SnapshotTest, EndsItsStagingAndLeavesNoFileWhenCancelledWhileStaging) {
  for (int i = 0; i < 5; ++i) files_.add_file(std::string(10 * kPage, 'x'));
  // Staging waits for the only chunk, which is being written.
  HeldOperation writes("pwrite");
  const auto session = start(directory_, files_, snapshot(kPage, kPage));
  writes.wait_until_held();
  session->cancel();
  EXPECT_FALSE(session->wait_for(kAtOnce)) << "a write is under way";
  writes.open();
  EXPECT_TRUE(session->wait_staged(kLongest));
  wait_for_end(*session);
  EXPECT_TRUE(fails(session->outcome(), Errc::cancelled));
  EXPECT_EQ(directory_.names(), Names{});
  EXPECT_EQ(writes.held(), 1) << "a chunk was filled after the cancellation";
}

TEST_F(SnapshotTest, EndsItsStagingAndLeavesNoFileWhenCancelledBeforeItHasMemory) {
  for (int i = 0; i < 5; ++i) files_.add_file(std::string(10 * kPage, 'x'));
  context().chunks.trim(0);
  HeldOperation memory("mmap");
  const auto session = start(directory_, files_, snapshot());
  memory.wait_until_held();
  session->cancel();
  memory.open();
  EXPECT_TRUE(session->wait_staged(kLongest));
  wait_for_end(*session);
  EXPECT_TRUE(fails(session->outcome(), Errc::cancelled));
  EXPECT_EQ(directory_.names(), Names{});
}

TEST_F(SnapshotTest, EndsItsWritesAndLeavesNoFileWhenCancelledWhileWriting) {
  for (int i = 0; i < 5; ++i) files_.add_file(std::string(10 * kPage, 'x'));
  HeldOperation writes("pwrite");
  const auto session = start(directory_, files_, snapshot());
  ASSERT_TRUE(session->wait_staged(kLongest));
  writes.wait_until_held();
  session->cancel();
  EXPECT_FALSE(session->wait_for(kAtOnce)) << "a write is under way";
  writes.open();
  wait_for_end(*session);
  EXPECT_TRUE(fails(session->outcome(), Errc::cancelled));
  EXPECT_EQ(directory_.names(), Names{});
  EXPECT_LE(writes.held(), 2 * 5) << "more than was under way";
}

TEST_F(SnapshotTest, SucceedsIfItIsCancelledAfterItsEnd) {
  files_.add_file("hello");
  const auto session = start(directory_, files_, snapshot());
  wait_for_end(*session);
  session->cancel();
  EXPECT_TRUE(ok(session->outcome()));
  files_.expect_on_disk();
}

TEST_F(SnapshotTest, LeavesAllFilesOrNoneWhenCancelledAtAnyTime) {
  Random random(13);
  for (int round = 0; round < 60; ++round) {
    TempDir directory;
    Files files(directory);
    add_assorted_files(files, random, 4);
    if (random.coin()) context().chunks.trim(0);
    HeldOperation calls(random.coin() ? "pwrite" : "mmap", random.between(1, 8));
    const auto session =
        start(directory, files, snapshot(kPage, random.coin() ? 0 : kPage * random.between(1, 5)));
    session->cancel();
    calls.open();
    EXPECT_TRUE(session->wait_staged(kLongest));
    wait_for_end(*session);
    if (session->outcome()) {
      files.expect_on_disk();
    } else {
      EXPECT_TRUE(fails(session->outcome(), Errc::cancelled));
      EXPECT_EQ(directory.names(), Names{});
    }
    ASSERT_FALSE(::testing::Test::HasFailure()) << "round " << round;
  }
}

// --- progress and timing ----------------------------------------------------------------------

TEST_F(SnapshotTest, ProgressReachesThePlannedBytes) {
  Random random(14);
  add_assorted_files(files_, random, 5);
  const auto session = start(directory_, files_, snapshot());
  EXPECT_EQ(session->progress().bytes_planned, files_.bytes());
  EXPECT_EQ(session->progress().files_planned, 5);
  expect_saved(*session, files_);
  const SaveProgress end = session->progress();
  EXPECT_EQ(end.bytes_staged, files_.bytes());
  EXPECT_EQ(end.bytes_written, files_.bytes());
  EXPECT_EQ(end.files_done, 5);
}

TEST_F(SnapshotTest, ProgressNeverExceedsTheBytesThatWereWritten) {
  Random random(15);
  add_assorted_files(files_, random, 8);
  std::atomic<SaveSession*> running{nullptr};
  HeldOperation writes("pwrite", 1, [&](std::string_view, std::string_view) {
    const SaveSession* const session = running;
    if (session == nullptr) return 0;
    // Read in this order: otherwise bytes that are staged in between could already be written.
    SaveProgress seen;
    seen.bytes_written = session->progress().bytes_written;
    seen.bytes_staged = session->progress().bytes_staged;
    EXPECT_LE(seen.bytes_written, seen.bytes_staged);
    EXPECT_LE(seen.bytes_staged, session->progress().bytes_planned);
    EXPECT_LE(session->progress().files_done, 8);
    return 0;
  });
  const auto session = start(directory_, files_, snapshot(kPage, 3 * kPage));
  running = session.get();
  writes.open();
  expect_saved(*session, files_);
}

TEST_F(SnapshotTest, ReportsWhenItWasStagedAndWhenItEnded) {
  files_.add_file("hello");
  HeldOperation opens("open");
  const auto session = start(directory_, files_, snapshot());
  ASSERT_TRUE(session->wait_staged(kLongest));
  EXPECT_GT(session->timing().staged_ns, 0);
  EXPECT_EQ(session->timing().ended_ns, 0);
  opens.open();
  expect_saved(*session, files_);
  EXPECT_GT(session->timing().ended_ns, session->timing().staged_ns);
}

// --- threads ----------------------------------------------------------------------------------

TEST_F(SnapshotTest, WritesAtLowPriorityAfterStaging) {
  for (int i = 0; i < 3; ++i) files_.add_file(std::string(5 * kPage, 'x'));
  Seen<std::pair<int, bool>> threads;
  HeldOperation opens("open", 1, [&](std::string_view operation, std::string_view) {
    if (operation == "pwrite") threads.add({nice_now(), idle_io_now()});
    return 0;
  });
  const auto session = start(directory_, files_, snapshot());
  ASSERT_TRUE(session->wait_staged(kLongest));
  opens.open();
  expect_saved(*session, files_);
  EXPECT_EQ(threads.values(), (std::vector<std::pair<int, bool>>(15, {19, true})));
}

TEST_F(SnapshotTest, SyncsAtLowPriorityAfterStaging) {
  for (int i = 0; i < 3; ++i) files_.add_file(std::string(5 * kPage, 'x'));
  Seen<int> nice;
  HeldOperation opens("open", 1, [&](std::string_view operation, std::string_view) {
    if (operation == "fsync") nice.add(nice_now());
    return 0;
  });
  const auto session = start(directory_, files_, snapshot());
  ASSERT_TRUE(session->wait_staged(kLongest));
  opens.open();
  expect_saved(*session, files_);
  EXPECT_EQ(nice.values(), (std::vector<int>(3, 19)));
}

TEST_F(SnapshotTest, WritesAtNormalPriorityWhileStagingWaits) {
  files_.add_file(std::string(5 * kPage, 'x'));
  Seen<int> nice;
  {
    ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
      if (operation == "pwrite") nice.add(nice_now());
      return 0;
    });
    // With one chunk, four of the five writes end before the last chunk is staged.
    expect_saved(*start(directory_, files_, snapshot(kPage, kPage)), files_);
  }
  std::vector<int> seen = nice.values();
  ASSERT_EQ(seen.size(), 5);
  seen.pop_back();
  EXPECT_EQ(seen, (std::vector<int>(4, nice_now())));
}

TEST_F(SnapshotTest, CanBeWrittenByOneThread) {
  Random random(16);
  add_assorted_files(files_, random, 8);
  SaveOptions options = snapshot(kPage, 3 * kPage);
  options.writers.count = 1;
  options.stagers = {{5, false}, 1};
  expect_saved(*start(directory_, files_, options), files_);
}

TEST_F(SnapshotTest, EndsWhenTheExecutorIsJoined) {
  Random random(17);
  for (const std::size_t budget : {std::size_t{0}, kPage}) {
    for (const PoolSpec& stagers : {PoolSpec{}, PoolSpec{{3, false}, 2}}) {
      TempDir directory;
      Files files(directory);
      // Enough files that the writers are without work at times.
      for (int i = 0; i < 8; ++i) files.add_file(random.bytes(30 * kPage));
      SaveOptions options = snapshot(kPage, budget);
      options.stagers = stagers;
      const auto session = start(directory, files, options);
      context().executor.join();
      EXPECT_TRUE(session->wait_for(kAtOnce));
      EXPECT_TRUE(ok(session->outcome()));
      files.expect_on_disk();
    }
  }
}

TEST_F(SnapshotTest, EndsEvenIfNoCallerWaits) {
  files_.add_file(std::string(50'000, 'x'));
  start(directory_, files_, snapshot());
  context().executor.join();
  files_.expect_on_disk();
}

// --- a limited bandwidth ----------------------------------------------------------------------

TEST_F(SnapshotTest, WithALimitStartsNoWriteEarly) {
  Random random(18);
  files_.add_file(random.bytes(3 * kPage));
  files_.add_file(random.bytes(3 * kPage));
  SaveOptions options = snapshot();
  options.max_bytes_per_second = 100 * kPage;
  using Clock = std::chrono::steady_clock;
  Seen<Clock::time_point> writes;
  const ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "pwrite") writes.add(Clock::now());
    return 0;
  });
  const auto started = Clock::now();
  expect_saved(*start(directory_, files_, options), files_);
  std::vector<Clock::time_point> begun = writes.values();
  std::sort(begun.begin(), begun.end());
  ASSERT_EQ(begun.size(), 6);
  // Later is always allowed: each chunk takes ten milliseconds after the chunks before it.
  for (std::size_t i = 0; i < begun.size(); ++i) {
    EXPECT_GE(begun[i] - started, i * std::chrono::milliseconds(10)) << i;
  }
}

TEST_F(SnapshotTest, WithALimitIsStagedBeforeItIsWritten) {
  files_.add_file(std::string(5 * kPage, 'x'));
  SaveOptions options = snapshot();
  options.max_bytes_per_second = 100 * kPage;
  const auto session = start(directory_, files_, options);
  ASSERT_TRUE(session->wait_staged(kLongest));
  files_.destroy_sources();
  expect_saved(*session, files_);
}

TEST_F(SnapshotTest, WithALimitEndsAtOnceWhenCancelled) {
  files_.add_file(std::string(5 * kPage, 'x'));
  HeldOperation writes("pwrite");
  SaveOptions options = snapshot();
  // The limit would delay the second chunk by more than an hour.
  options.max_bytes_per_second = 1;
  const auto session = start(directory_, files_, options);
  writes.wait_until_held();
  session->cancel();
  writes.open();
  wait_for_end(*session);
  EXPECT_TRUE(fails(session->outcome(), Errc::cancelled));
  EXPECT_EQ(directory_.names(), Names{});
  EXPECT_EQ(writes.held(), 1);
}

TEST_F(SnapshotTest, WithALimitEndsAtOnceOnAFailure) {
  files_.add_file(std::string(5 * kPage, 'x'));
  SaveOptions options = snapshot();
  options.max_bytes_per_second = 1;
  ScopedFaultHook hook(NthCallFails("pwrite", 1, ENOSPC));
  const auto session = start(directory_, files_, options);
  EXPECT_TRUE(session->wait_staged(kLongest));
  wait_for_end(*session);
  ASSERT_TRUE(fails(session->outcome(), Errc::system));
  EXPECT_EQ(session->outcome().error().sys_errno, ENOSPC);
}

TEST_F(SnapshotTest, WithALimitAndOneChunkEnds) {
  Random random(19);
  add_assorted_files(files_, random, 8);
  SaveOptions options = snapshot(kPage, kPage);
  options.max_bytes_per_second = std::uint64_t{1} << 30;
  expect_saved(*start(directory_, files_, options), files_);
}

}  // namespace
}  // namespace torch_ckpt::engine
