// The system refuses threads: each kind of work ends with the threads that it has, or fails with
// advice.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "engine/bulk_copy.h"
#include "engine/context.h"
#include "engine/load_session.h"
#include "engine/reserve.h"
#include "engine/save_session.h"
#include "engine/verify_session.h"
#include "gate.h"
#include "os/fault.h"
#include "reads.h"
#include "save_files.h"
#include "staging/chunk_pool.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using os::ScopedFaultHook;
using staging::ChunkPool;
using namespace test;

// Counts only threads that the engine starts from here on.
os::FaultHook threads_up_to(std::size_t most) {
  return [most, made = std::make_shared<std::atomic<std::size_t>>(0)](std::string_view operation,
                                                                      std::string_view) {
    return operation == "pthread_create" && (*made)++ >= most ? EAGAIN : 0;
  };
}

class FewThreads : public ::testing::TestWithParam<std::size_t> {
 protected:
  FewThreads() { context().executor.join(); }
  ~FewThreads() override { context().executor.join(); }

  /// True if the work ended as it must with this number of threads.
  static ::testing::AssertionResult is_as_it_must(const Result<>& done) {
    if (GetParam() > 0) return ok(done);
    if (done) return ::testing::AssertionFailure() << "succeeded without a thread";
    return test::is_system_error(done.error(), EAGAIN, "pthread_create", "");
  }

  TempDir directory_;
};

template <class T>
Result<> status_of(const Result<T>& result) {
  if (!result) return result.error();
  return {};
}

TEST_P(FewThreads, ASaveEnds) {
  Files files(directory_);
  for (int i = 0; i < 5; ++i) files.add_file(std::string(50'000, 'x'));
  SaveOptions options;
  options.chunk_bytes = 4096;
  const ScopedFaultHook hook(threads_up_to(GetParam()));
  EXPECT_TRUE(is_as_it_must(test::run_save(directory_, files.jobs(), options)));
  if (GetParam() > 0) files.expect_on_disk();
}

TEST_P(FewThreads, ASnapshotWithLowPriorityThreadsEnds) {
  Files files(directory_);
  for (int i = 0; i < 5; ++i) files.add_file(std::string(50'000, 'x'));
  SaveOptions options;
  options.chunk_bytes = 4096;
  options.snapshot = true;
  options.writers.priority = {19, true};
  const ScopedFaultHook hook(threads_up_to(GetParam()));
  EXPECT_TRUE(is_as_it_must(test::run_save(directory_, files.jobs(), options)));
  if (GetParam() > 0) files.expect_on_disk();
}

TEST_P(FewThreads, ALoadEnds) {
  Reads reads(directory_);
  reads.add_small_files(10);
  const ScopedFaultHook hook(threads_up_to(GetParam()));
  if (GetParam() > 0) {
    reads.run_all();
    return;
  }
  const auto started = LoadSession::start(context(), test::open_directory(directory_),
                                          {{reads.name(0), {}}}, {reads.request(0)}, {});
  EXPECT_TRUE(is_as_it_must(status_of(started)));
}

TEST_P(FewThreads, AVerificationEnds) {
  const std::string record = test::byte_record("hello");
  test::write_file(directory_.file("f"), record);
  planning::StoredRecord named;
  named.length = record.size();
  const ScopedFaultHook hook(threads_up_to(GetParam()));
  const auto started =
      VerifySession::start(context(), test::open_directory(directory_), {{"f", {}}}, {named}, {});
  EXPECT_TRUE(is_as_it_must(status_of(started)));
  if (!started) return;
  ASSERT_TRUE((*started)->wait_for(std::chrono::minutes(2)));
  EXPECT_FALSE((*started)->failure().has_value());
}

TEST_P(FewThreads, ACopyToThePoolEnds) {
  const std::string payload(100'000, 'x');
  const std::vector<staging::Source> sources(3, test::host_source(payload));
  const ScopedFaultHook hook(threads_up_to(GetParam()));
  EXPECT_TRUE(is_as_it_must(status_of(copy_to_pool(context(), sources))));
}

TEST_P(FewThreads, GrowReserveEnds) {
  context().chunks.trim(0);
  context().chunks.set_reserve(10 * 4096, 4096);
  const ScopedFaultHook hook(threads_up_to(GetParam()));
  EXPECT_TRUE(
      is_as_it_must(status_of(grow_reserve(context(), 10 * 4096, PoolSpec{{19, false}, 0}))));
  context().chunks.trim(0);
}

INSTANTIATE_TEST_SUITE_P(Of, FewThreads, ::testing::Values(0, 1, 2, 17),
                         ::testing::PrintToStringParamName());

TEST(Executor, WarnsOnceIfTheSystemRefusesThreads) {
  context().executor.join();
  static_cast<void>(context().warnings.take());
  {
    const ScopedFaultHook hook(threads_up_to(3));
    EXPECT_TRUE(ok(context().executor.ensure_threads({}, 0)));
    EXPECT_TRUE(ok(context().executor.ensure_threads(PoolSpec{{19, true}, 0}, 0)));
  }
  const std::vector<std::string> warnings = context().warnings.take();
  ASSERT_EQ(warnings.size(), 1);
  EXPECT_TRUE(warnings[0].find("3 of " + std::to_string(kMinThreads)) != std::string::npos)
      << warnings[0];
  EXPECT_TRUE(warnings[0].find("ulimit -u") != std::string::npos) << warnings[0];
  context().executor.join();
}

TEST(Executor, FailsWithoutAThreadAndNamesTheLimitToRaise) {
  context().executor.join();
  static_cast<void>(context().warnings.take());
  const ScopedFaultHook hook(threads_up_to(0));
  const auto refused = context().executor.ensure_threads({}, 0);
  ASSERT_FALSE(refused);
  EXPECT_TRUE(refused.error().detail.str().find("ulimit -u") != std::string::npos);
  EXPECT_TRUE(refused.error().detail.str().find("pids.max") != std::string::npos);
  EXPECT_TRUE(context().warnings.take().empty()) << "beside the error";
}

TEST(Executor, StartsMissingThreadsOnceTheSystemAllowsThem) {
  context().executor.join();
  {
    const ScopedFaultHook hook(threads_up_to(0));
    EXPECT_FALSE(context().executor.ensure_threads({}, 0));
  }
  EXPECT_TRUE(ok(context().executor.ensure_threads({}, 0)));
}

// --- parallel reads and writes -------------------------------------------------------------------

TEST(LoadSession, HasAsManyReadsInFlightAsItHasThreads) {
  constexpr std::size_t kReads = 200;
  TempDir directory;
  Reads reads(directory);
  reads.add_small_files(kReads);
  LoadOptions options;
  options.threads = kReads;
  HeldOperation held("pread");
  const auto session = reads.start(options);
  held.wait_until_held(kReads);
  held.open();
  test::wait_for_end(*session);
  EXPECT_FALSE(session->failure().has_value());
}

TEST(LoadSession, DividesALargeTensorIntoAsManyReadsAsItHasThreads) {
  constexpr std::size_t kReads = 24;
  TempDir directory;
  Reads reads(directory);
  const std::string payload(kReads << 20, 'x');
  reads.add_whole(reads.add_file({test::byte_record(payload)}), payload);
  LoadOptions options = test::load_options(DirectIo::off);
  options.threads = kReads;
  // The first reads are of the archive's ends; the other threads wait for them.
  HeldOperation held("pread", 4);
  const auto session = reads.start(options);
  held.wait_until_held(kReads);
  held.open();
  test::wait_for_end(*session);
  EXPECT_FALSE(session->failure().has_value());
  EXPECT_TRUE(reads.result(0) == payload);
}

TEST(SaveSession, HasAWriteInFlightForEachParallelFile) {
  constexpr std::size_t kFiles = 150;
  TempDir directory;
  Files files(directory);
  for (std::size_t i = 0; i < kFiles; ++i) files.add_file(std::string(5000, 'x'));
  HeldOperation held("pwrite");
  auto session = SaveSession::start(context(), test::open_directory(directory), files.jobs(), {});
  ASSERT_TRUE(ok(session));
  held.wait_until_held(kFiles);
  held.open();
  test::wait_for_end(**session);
  EXPECT_TRUE(ok((*session)->outcome()));
  files.expect_on_disk();
}

TEST(SaveSession, DoesNotWaitForALoadThatOccupiesAllThreads) {
  TempDir directory;
  Reads reads(directory);
  const std::size_t many = context().executor.threads() + 4;
  reads.add_small_files(many);
  LoadOptions options;
  options.threads = many;
  HeldOperation held("pread");
  const auto load = reads.start(options);
  held.wait_until_held(many);
  TempDir other;
  Files files(other);
  files.add_file(std::string(50'000, 'x'));
  EXPECT_TRUE(ok(test::run_save(other, files.jobs(), {})));
  held.open();
  test::wait_for_end(*load);
}

}  // namespace
}  // namespace torch_ckpt::engine
