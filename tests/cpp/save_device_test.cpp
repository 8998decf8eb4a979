// Saves of tensors on a device, whose copies run while the host continues.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <latch>
#include <new>
#include <utility>
#include <vector>

#include "engine/context.h"
#include "engine/save_session.h"
#include "fake_device.h"
#include "gate.h"
#include "os/fault.h"
#include "save_files.h"
#include "staging/chunk_pool.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using staging::Chunk;
using staging::ChunkPool;
using namespace test;

using Names = std::vector<std::string>;

// Longer than any test runs, so that a lost message is a failure and not a hang.
constexpr std::chrono::minutes kLongest{2};
constexpr std::chrono::milliseconds kAtOnce{0};

// The parameter: a snapshot, or a save in the foreground.
class SaveFromDevice : public ::testing::TestWithParam<bool> {
 protected:
  SaveOptions options(std::size_t max_host_bytes = 0) const {
    SaveOptions options;
    options.snapshot = GetParam();
    if (options.snapshot) options.writers = {{19, true}, 4};
    options.chunk_bytes = kPage;
    options.max_host_bytes = max_host_bytes;
    return options;
  }
  void add_tensor(std::string payload) { files_.add_tensor_at(device_.upload(payload), payload); }
  /// One file of one tensor.
  void add_file(std::string payload) {
    files_.begin_file();
    add_tensor(std::move(payload));
  }
  void add_assorted_files(Random& random, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      files_.begin_file();
      for (std::uint64_t items = random.between(0, 5); items > 0; --items) {
        const std::size_t bytes =
            random.coin() ? random.between(0, 20'000) : kPage * random.between(0, 4);
        random.coin() ? add_tensor(random.bytes(bytes)) : files_.add_tensor(random.bytes(bytes));
      }
    }
  }
  /// Enough chunks for all files, so that staging never waits for one. (A save in the foreground
  /// has three for each file.)
  void make_memory() {
    std::vector<std::unique_ptr<Chunk>> chunks(files_.chunks(kPage));
    for (auto& chunk : chunks) chunk = context().chunks.take(kPage).value();
    for (auto& chunk : chunks) context().chunks.give_back(std::move(chunk));
  }
  std::shared_ptr<SaveSession> start(const SaveOptions& with) {
    return test::start(directory_, files_, with);
  }
  void expect_saved(SaveSession& session) {
    wait_for_end(session);
    EXPECT_TRUE(ok(session.outcome()));
    files_.expect_on_disk();
  }
  /// All waits return, and no file is left.
  void expect_failed(SaveSession& session) {
    EXPECT_TRUE(session.wait_submitted(kLongest));
    EXPECT_TRUE(session.wait_staged(kLongest));
    wait_for_end(session);
    EXPECT_FALSE(session.outcome().has_value());
    EXPECT_EQ(directory_.names(), Names{});
  }

  FakeDevice device_;
  TempDir directory_;
  Files files_{directory_};
};

TEST_P(SaveFromDevice, WritesItsImagesWithAnyBudget) {
  Random random(1);
  for (int round = 0; round < 20; ++round) {
    TempDir directory;
    files_ = Files(directory);
    add_assorted_files(random, random.between(1, 8));
    SaveOptions with = options(random.coin() ? 0 : random.between(kPage, 20 * kPage));
    with.chunk_bytes = kPage * random.between(1, 8);
    with.parallel_files = random.between(0, 3);
    with.parallel_stagers = random.between(0, 4);
    with.direct_io = random.coin() ? DirectIo::on : DirectIo::off;
    const auto session = test::start(directory, files_, with);
    wait_for_end(*session);
    EXPECT_TRUE(ok(session->outcome()));
    for (std::size_t i = 0; i < files_.jobs().size(); ++i) {
      files_.expect_result(*session, i);
    }
    files_.expect_in(directory);
    ASSERT_FALSE(HasFailure()) << "round " << round << ", chunk_bytes " << with.chunk_bytes
                               << ", max_host_bytes " << with.max_host_bytes << ", parallel_files "
                               << with.parallel_files << ", parallel_stagers "
                               << with.parallel_stagers;
  }
}

TEST_P(SaveFromDevice, WritesManyFilesWithOneChunk) {
  Random random(2);
  add_assorted_files(random, 12);
  expect_saved(*start(options(kPage)));
}

TEST_P(SaveFromDevice, StaysWithinItsBudget) {
  Random random(3);
  for (int i = 0; i < 3; ++i) add_file(random.bytes(60'000));
  test::CallCounter counter;
  os::ScopedFaultHook hook(counter);
  expect_saved(*start(options(5 * kPage)));
  context().executor.join();
  EXPECT_LE(counter.calls("mmap"), 5);
  EXPECT_LE(context().chunks.idle_bytes(), 5 * kPage);
}

TEST_P(SaveFromDevice, IsSubmittedBeforeAnyCopyIsDone) {
  add_file(std::string(5000, 'a'));
  add_file(std::string(5000, 'b'));
  Gate arrival;
  device_.on_arrival(arrival.passage());
  make_memory();
  const auto session = start(options());
  EXPECT_TRUE(session->wait_submitted(kLongest));
  EXPECT_FALSE(session->wait_staged(kAtOnce));
  EXPECT_EQ(session->progress().bytes_staged, 0);
  arrival.open();
  EXPECT_TRUE(session->wait_staged(kLongest));
  expect_saved(*session);
}

TEST_P(SaveFromDevice, SubmitsAsManyChunksAsFitBeforeTheFirstCopyIsDone) {
  add_file(std::string(10'000, 'a'));
  Gate arrival;
  device_.on_arrival(arrival.passage());
  make_memory();
  const auto session = start(options());
  EXPECT_TRUE(session->wait_submitted(kLongest));
  EXPECT_EQ(device_.submissions(), 3);
  arrival.open();
  expect_saved(*session);
}

TEST_P(SaveFromDevice, WithTooLittleMemoryIsSubmittedOnlyAfterCopiesAreDone) {
  add_file(std::string(10 * kPage, 'a'));
  Gate arrival;
  device_.on_arrival(arrival.passage());
  const auto session = start(options(3 * kPage));
  arrival.wait_for_arrivals();
  EXPECT_FALSE(session->wait_submitted(kAtOnce));
  EXPECT_LE(device_.submissions(), 3);
  arrival.open();
  EXPECT_TRUE(session->wait_submitted(kLongest));
  expect_saved(*session);
}

TEST_P(SaveFromDevice, CopiesHostMemoryDuringCopiesFromTheDevice) {
  files_.begin_file();
  add_tensor(std::string(100, 'd'));
  files_.add_tensor(std::string(9000, 'h'));
  Gate arrival;
  device_.on_arrival(arrival.passage());
  make_memory();
  const auto session = start(options());
  ASSERT_TRUE(session->wait_submitted(kLongest));
  files_.destroy_sources();
  arrival.open();
  expect_saved(*session);
}

TEST_P(SaveFromDevice, WaitsForTheReadyEvent) {
  add_file(std::string(5000, 'a'));
  add_file(std::string(5000, 'b'));
  std::latch ready(1);
  std::atomic<std::size_t> early{0};
  device_.on_arrival([&] { early += ready.try_wait() ? 0 : 1; });
  SaveOptions with = options();
  with.ready = {{0, &ready}};
  make_memory();
  const auto session = start(with);
  EXPECT_TRUE(session->wait_submitted(kLongest)) << "the host does not wait for it";
  EXPECT_FALSE(session->wait_staged(kAtOnce));
  ready.count_down();
  expect_saved(*session);
  EXPECT_EQ(early, 0);
}

TEST_P(SaveFromDevice, WaitsForSeveralReadyEvents) {
  add_file(std::string(5000, 'a'));
  std::latch first(1);
  std::latch second(1);
  std::atomic<std::size_t> early{0};
  device_.on_arrival([&] { early += first.try_wait() && second.try_wait() ? 0 : 1; });
  SaveOptions with = options();
  with.ready = {{0, &first}, {1, &second}};
  make_memory();
  const auto session = start(with);
  EXPECT_TRUE(session->wait_submitted(kLongest));
  second.count_down();
  EXPECT_FALSE(session->wait_staged(kAtOnce));
  first.count_down();
  expect_saved(*session);
  EXPECT_EQ(early, 0);
}

TEST_P(SaveFromDevice, MakesAStreamWaitForTheCopiesOfEachStager) {
  for (int i = 0; i < 3; ++i) add_file(std::string(10'000, 'x'));
  files_.add_file("on the host");
  int stream = 0;
  Gate arrival;
  device_.on_arrival(arrival.passage());
  make_memory();
  const auto session = start(options());
  EXPECT_TRUE(session->wait_submitted(kLongest));
  EXPECT_TRUE(ok(session->make_stream_wait(7, &stream)));
  EXPECT_EQ(device_.waiting_streams(),
            (std::vector<std::pair<int, void*>>(device_.copiers(), {7, &stream})));
  EXPECT_GT(device_.copiers(), 0);
  arrival.open();
  expect_saved(*session);
}

TEST_P(SaveFromDevice, OfHostMemoryMakesNoStreamWait) {
  files_.add_file("on the host");
  const auto session = start(options());
  EXPECT_TRUE(session->wait_submitted(kLongest));
  EXPECT_TRUE(ok(session->make_stream_wait(0, nullptr)));
  EXPECT_TRUE(device_.waiting_streams().empty());
  expect_saved(*session);
}

TEST_P(SaveFromDevice, PinsOnlyChunksThatReceiveCopies) {
  files_.add_file(std::string(5 * kPage, 'x'));
  expect_saved(*start(options()));
  EXPECT_EQ(device_.pins(), 0);
}

TEST_P(SaveFromDevice, FailsIfASubmissionFails) {
  for (std::uint64_t at = 0; at < 3; ++at) {
    device_.on_copy([at](const auto&, std::uint64_t offset) -> Result<> {
      if (offset < at * kPage) return {};
      return format_error(Errc::system, "the device fell off the bus");
    });
    TempDir directory;
    files_ = Files(directory);
    add_file(std::string(5 * kPage, 'x'));
    files_.add_file("another");
    const auto session = test::start(directory, files_, options());
    expect_failed(*session);
    EXPECT_EQ(session->outcome().error().detail, "the device fell off the bus");
    EXPECT_EQ(directory.names(), Names{});
  }
}

TEST_P(SaveFromDevice, FailsIfACopyFails) {
  device_.fail_waits(format_error(Errc::system, "the device fell off the bus"));
  add_file(std::string(5 * kPage, 'x'));
  files_.add_file("another");
  const auto session = start(options());
  expect_failed(*session);
  EXPECT_EQ(session->outcome().error().detail, "the device fell off the bus");
}

TEST_P(SaveFromDevice, WritesFromMemoryThatCannotBePinnedAndWarns) {
  context().warnings.forget("page-locking");
  static_cast<void>(context().warnings.take());
  device_.fail_pins(system_error(ENOMEM, "cudaHostRegister", ""));
  add_file(std::string(5 * kPage, 'x'));
  files_.add_file("another");
  const auto session = start(options());
  wait_for_end(*session);
  EXPECT_TRUE(ok(session->outcome()));
  files_.expect_on_disk();
  const std::vector<std::string> warnings = context().warnings.take();
  ASSERT_EQ(warnings.size(), 1);
  EXPECT_TRUE(warnings[0].find("cudaHostRegister") != std::string::npos) << warnings[0];
  device_.fail_pins({});
}

TEST_P(SaveFromDevice, PinsItsMemoryAsOneArena) {
  add_file(std::string(10'000, 'x'));
  context().chunks.trim(0);
  expect_saved(*start(options()));
  EXPECT_EQ(device_.pins(), 1);
}

TEST_P(SaveFromDevice, KeepsWarningsOfCopiersForTheUser) {
  context().warnings.forget("fake device");
  static_cast<void>(context().warnings.take());
  device_.warn("slow copies");
  add_file(std::string(5000, 'a'));
  add_file(std::string(5000, 'b'));
  expect_saved(*start(options()));
  EXPECT_EQ(context().warnings.take(), (std::vector<std::string>{"slow copies"}));
}

// One file of `bytes` bytes.
std::size_t submissions_of(FakeDevice& device, Files& files, TempDir& directory, std::size_t bytes,
                           SaveOptions with) {
  files = Files(directory);
  std::string payload(bytes, 'x');
  files.begin_file();
  files.add_tensor_at(device.upload(payload), payload);
  const std::size_t before = device.submissions();
  with.chunk_bytes = 0;
  const auto session = test::start(directory, files, with);
  wait_for_end(*session);
  EXPECT_TRUE(ok(session->outcome()));
  return device.submissions() - before;
}

TEST_P(SaveFromDevice, UsesLargeChunksIfTheBudgetPermits) {
  constexpr std::size_t kBytes = std::size_t{20} << 20;
  EXPECT_EQ(submissions_of(device_, files_, directory_, kBytes, options()), 2) << "of 16 MiB";
  TempDir other;
  EXPECT_EQ(submissions_of(device_, files_, other, kBytes, options(3 * kDeviceChunkBytes - 1)), 6)
      << "of 4 MiB";
  context().executor.join();
  context().chunks.trim(0);
}

TEST_P(SaveFromDevice, WritesTheFirstChunkBeforeTheLastOneIsStarted) {
  add_file(std::string(4 * kPage, 'x'));
  make_memory();
  Gate last;
  device_.on_copy([&, pass = last.passage()](const auto&, std::uint64_t offset) -> Result<> {
    if (offset > 0) device_.wait_for_arrivals(1);
    if (offset > 2 * kPage) pass();
    return {};
  });
  std::latch written(1);
  std::atomic<bool> first{true};
  const os::ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "pwrite" && first.exchange(false)) written.count_down();
    return 0;
  });
  const auto session = start(options());
  last.wait_for_arrivals();
  written.wait();
  last.open();
  expect_saved(*session);
}

TEST_P(SaveFromDevice, FailsOnAnExceptionInASubmission) {
  device_.on_copy([](const auto&, std::uint64_t offset) -> Result<> {
    if (offset < kPage) return {};
    throw std::bad_alloc();
  });
  for (int i = 0; i < 4; ++i) add_file(std::string(5 * kPage, 'x'));
  const auto session = start(options(2 * kPage));
  expect_failed(*session);
  EXPECT_TRUE(fails(session->outcome(), Errc::system));
}

TEST_P(SaveFromDevice, KeepsItsMemoryUntilCopiesIntoItAreDoneWhenCancelled) {
  for (int i = 0; i < 2; ++i) add_file(std::string(10'000, 'x'));
  Gate arrival;
  std::atomic<std::size_t> given_back{0};
  device_.on_arrival([&, pass = arrival.passage()] {
    pass();
    given_back += context().chunks.idle_bytes();
  });
  make_memory();
  const auto session = start(options());
  EXPECT_TRUE(session->wait_submitted(kLongest));
  session->cancel();
  EXPECT_FALSE(session->wait_staged(kAtOnce)) << "the sources are still being read";
  EXPECT_FALSE(session->wait_for(kAtOnce));
  arrival.open();
  expect_failed(*session);
  EXPECT_TRUE(fails(session->outcome(), Errc::cancelled));
  EXPECT_EQ(given_back, 0);
}

TEST_P(SaveFromDevice, KeepsItsMemoryUntilCopiesIntoItAreDoneWhenAnotherFileFails) {
  add_file(std::string(10'000, 'x'));
  files_.add_file(std::string(kPage, 'y'));
  Gate arrival;
  std::atomic<std::size_t> given_back{0};
  device_.on_arrival([&, pass = arrival.passage()] {
    pass();
    given_back += context().chunks.idle_bytes();
  });
  HeldOperation writes("pwrite", 1, [](std::string_view operation, std::string_view) {
    return operation == "pwrite" ? EIO : 0;
  });
  make_memory();
  const auto session = start(options());
  EXPECT_TRUE(session->wait_submitted(kLongest));
  writes.wait_until_held();
  writes.open();
  EXPECT_FALSE(session->wait_staged(kAtOnce));
  arrival.open();
  expect_failed(*session);
  EXPECT_EQ(session->outcome().error().sys_errno, EIO);
  EXPECT_EQ(given_back, 0);
}

TEST_P(SaveFromDevice, LeavesAllFilesOrNoneWhenCancelledAtAnyTime) {
  Random random(4);
  for (int round = 0; round < 30; ++round) {
    TempDir directory;
    files_ = Files(directory);
    add_assorted_files(random, 4);
    const std::size_t at = random.between(1, 15);
    std::atomic<std::size_t> copies{0};
    std::atomic<SaveSession*> running{nullptr};
    device_.on_arrival([&] {
      SaveSession* const session = running;
      if (++copies >= at && session != nullptr) session->cancel();
    });
    const SaveOptions with = options(random.coin() ? 0 : kPage * random.between(1, 5));
    const auto session = test::start(directory, files_, with);
    running = session.get();
    EXPECT_TRUE(session->wait_staged(kLongest));
    wait_for_end(*session);
    if (session->outcome()) {
      files_.expect_in(directory);
    } else {
      EXPECT_TRUE(fails(session->outcome(), Errc::cancelled));
      EXPECT_EQ(directory.names(), Names{});
    }
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SaveFromDevice, ::testing::Bool(),
                         [](const auto& kind) { return kind.param ? "Snapshot" : "Foreground"; });

}  // namespace
}  // namespace torch_ckpt::engine
