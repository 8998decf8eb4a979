// A forked child can use the engine as if its parent had never used it.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <functional>
#include <latch>
#include <thread>

#include "engine/bulk_copy.h"
#include "engine/context.h"
#include "engine/load_session.h"
#include "engine/reserve.h"
#include "engine/save_session.h"
#include "os/fault.h"
#include "os/fork_guard.h"
#include "staging/chunk_pool.h"
#include "support.h"

// ThreadSanitizer does not support threads that a forked child of a threaded process starts.
#if defined(__SANITIZE_THREAD__)
#define TC_SKIP_FORK_UNDER_TSAN() GTEST_SKIP() << "fork and threads under ThreadSanitizer"
#else
#define TC_SKIP_FORK_UNDER_TSAN() static_cast<void>(0)
#endif

// AddressSanitizer holds a lock while a thread allocates, and a child inherits the lock locked.
#if defined(__SANITIZE_ADDRESS__)
#define TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN() \
  GTEST_SKIP() << "a fork while other threads allocate, under AddressSanitizer"
#else
#define TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN() static_cast<void>(0)
#endif

namespace torch_ckpt {
namespace {

using engine::LoadSession;
using engine::SaveSession;
using os::ForkLocal;
using test::fails;
using test::ok;
using test::TempDir;

// The kernel ends a child that hangs, so that only this test fails.
constexpr unsigned kLongestSeconds = 100;

/// Runs `body` in a forked child and returns its result.
::testing::AssertionResult in_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kLongestSeconds);
    // Not exit(), which would run handlers that belong to the parent.
    ::_exit(body() ? 0 : 1);
  }
  int status = 0;
  if (::waitpid(child, &status, 0) != child) return ::testing::AssertionFailure() << "waitpid";
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "the child's status is " << status;
}

/// Waits until every thread of the pool runs. AddressSanitizer holds a lock while a thread starts,
/// and a child that is forked at that time inherits the lock locked.
void let_every_thread_start(const engine::PoolSpec& threads = {}) {
  const std::size_t count = threads.count != 0 ? threads.count : engine::executor_threads();
  std::latch running(static_cast<std::ptrdiff_t>(count));
  std::latch left(static_cast<std::ptrdiff_t>(count));
  for (std::size_t i = 0; i < count; ++i) {
    boost::asio::post(context().executor.pool(threads), [&] {
      running.arrive_and_wait();
      left.count_down();
    });
  }
  left.wait();
}

bool save_file(const TempDir& directory, const std::string& name, const std::string& contents) {
  std::vector<engine::FileJob> jobs(1);
  jobs[0].name = name;
  jobs[0].image.add_bytes(test::host_source(contents));
  engine::SaveOptions options;
  options.chunk_bytes = 4096;
  return ok(test::run_save(directory, std::move(jobs), options));
}

/// A request for the first bytes of a file.
engine::ReadRequest read_into(std::string& found) {
  engine::ReadRequest request;
  request.length = found.size();
  request.region = planning::Region::of_bytes(0, found.size());
  request.target.address = reinterpret_cast<std::byte*>(found.data());
  return request;
}

bool load_file(const TempDir& directory, const std::string& name, const std::string& expected) {
  std::string found(expected.size(), '?');
  auto session = LoadSession::start(context(), test::open_directory(directory), {{name, {}}},
                                    {read_into(found)}, {});
  if (!session) return false;
  test::wait_for_end(**session);
  return !(*session)->failure() && found == expected;
}

struct Counted {
  int value = 0;
};

TEST(ForkLocal, IsOneObjectInAProcess) {
  EXPECT_EQ(&ForkLocal<Counted>::get(), &ForkLocal<Counted>::get());
  EXPECT_EQ(ForkLocal<Counted>::existing(), &ForkLocal<Counted>::get());
}

TEST(ForkLocal, IsCreatedOnFirstUse) {
  struct Unused {};
  EXPECT_EQ(ForkLocal<Unused>::existing(), nullptr);
}

TEST(ForkLocal, IsCreatedAgainInAChild) {
  ForkLocal<Counted>::get().value = 7;
  EXPECT_TRUE(in_child([] {
    return ForkLocal<Counted>::existing() == nullptr && ForkLocal<Counted>::get().value == 0;
  }));
  EXPECT_EQ(ForkLocal<Counted>::get().value, 7);
}

TEST(ForkLocal, IsCreatedAgainInTheChildOfAChild) {
  ForkLocal<Counted>::get().value = 7;
  EXPECT_TRUE(in_child([] {
    ForkLocal<Counted>::get().value = 8;
    return static_cast<bool>(in_child([] { return ForkLocal<Counted>::get().value == 0; }));
  }));
}

TEST(Fork, AChildSavesAndLoadsAfterItsParentHasUsedTheEngine) {
  TC_SKIP_FORK_UNDER_TSAN();
  let_every_thread_start();
  TempDir directory;
  const std::string contents(50'000, 'x');
  ASSERT_TRUE(save_file(directory, "parents", contents));
  ASSERT_TRUE(load_file(directory, "parents", contents));
  EXPECT_TRUE(in_child([&] {
    return load_file(directory, "parents", contents) && save_file(directory, "childs", contents) &&
           load_file(directory, "childs", contents);
  }));
  EXPECT_TRUE(test::read_file(directory.file("childs")) == contents);
  EXPECT_TRUE(save_file(directory, "parents_again", contents));
}

TEST(Fork, AChildSavesDuringASaveOfItsParent) {
  TC_SKIP_FORK_UNDER_TSAN();
  TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN();
  let_every_thread_start();
  TempDir directory;
  const std::string contents(50'000, 'x');
  std::latch writing(1);
  std::latch forked(1);
  os::ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    if (operation == "open" && path == directory.file("parents")) {
      writing.count_down();
      forked.wait();
    }
    return 0;
  });
  std::vector<engine::FileJob> jobs(1);
  jobs[0].name = "parents";
  jobs[0].image.add_bytes(test::host_source(contents));
  auto session =
      SaveSession::start(context(), test::open_directory(directory), std::move(jobs), {});
  ASSERT_TRUE(ok(session));
  writing.wait();
  EXPECT_TRUE(in_child([&] { return save_file(directory, "childs", contents); }));
  forked.count_down();
  test::wait_for_end(**session);
  EXPECT_TRUE(ok((*session)->outcome()));
  EXPECT_EQ(directory.names(), (std::vector<std::string>{"childs", "parents"}));
}

/// As a snapshot, on low-priority threads.
engine::SaveOptions in_background() {
  engine::SaveOptions options;
  options.chunk_bytes = 4096;
  options.snapshot = true;
  options.writers = {{19, true}, 2};
  return options;
}

bool save_in_background(const TempDir& directory, const std::string& name, std::string contents) {
  std::vector<engine::FileJob> jobs(1);
  jobs[0].name = name;
  jobs[0].image.add_bytes(test::host_source(contents));
  auto session = SaveSession::start(context(), test::open_directory(directory), std::move(jobs),
                                    in_background());
  if (!session || !(*session)->wait_staged(std::chrono::minutes(1))) return false;
  contents.assign(contents.size(), '#');
  test::wait_for_end(**session);
  return ok((*session)->outcome());
}

TEST(Fork, AChildSavesInTheBackgroundAfterASaveOfItsParent) {
  TC_SKIP_FORK_UNDER_TSAN();
  let_every_thread_start();
  let_every_thread_start(in_background().writers);
  TempDir directory;
  const std::string contents(50'000, 'x');
  ASSERT_TRUE(save_in_background(directory, "parents", contents));
  EXPECT_TRUE(in_child([&] { return save_in_background(directory, "childs", contents); }));
  EXPECT_TRUE(test::read_file(directory.file("childs")) == contents);
  EXPECT_TRUE(save_in_background(directory, "parents_again", contents));
}

TEST(Fork, AChildSavesInTheBackgroundDuringASaveOfItsParent) {
  TC_SKIP_FORK_UNDER_TSAN();
  TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN();
  let_every_thread_start();
  let_every_thread_start(in_background().writers);
  TempDir directory;
  const std::string contents(50'000, 'x');
  std::latch writing(1);
  std::latch forked(1);
  std::atomic<bool> first{true};
  os::ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    if (operation == "pwrite" && path == directory.file("parents") && first.exchange(false)) {
      writing.count_down();
      forked.wait();
    }
    return 0;
  });
  std::vector<engine::FileJob> jobs(1);
  jobs[0].name = "parents";
  jobs[0].image.add_bytes(test::host_source(contents));
  auto session = SaveSession::start(context(), test::open_directory(directory), std::move(jobs),
                                    in_background());
  ASSERT_TRUE(ok(session));
  writing.wait();
  EXPECT_TRUE(in_child([&] {
    // The parent's save counts as ended in the child, and the child's own save is not affected.
    return (*session)->wait_staged(std::chrono::hours(1)) &&
           (*session)->wait_submitted(std::chrono::hours(1)) &&
           save_in_background(directory, "childs", contents);
  }));
  forked.count_down();
  test::wait_for_end(**session);
  EXPECT_TRUE(ok((*session)->outcome()));
  EXPECT_EQ(directory.names(), (std::vector<std::string>{"childs", "parents"}));
}

TEST(Fork, AChildThatDropsItsParentsCopiesDoesNotReuseTheirMemory) {
  TC_SKIP_FORK_UNDER_TSAN();
  let_every_thread_start();
  const std::string payload(5000, 'x');
  const staging::Source source = test::host_source(payload);
  auto copies = engine::copy_to_pool(context(), {&source, 1});
  ASSERT_TRUE(ok(copies));
  const std::size_t bytes = copies->front().memory->bytes().size();
  EXPECT_TRUE(in_child([&] {
    copies->clear();
    return context().chunks.take_idle(bytes) == nullptr;
  }));
  EXPECT_EQ(test::text_of({copies->front().address, payload.size()}), payload);
}

TEST(Fork, AChildHasItsOwnLowPriorityThreads) {
  TC_SKIP_FORK_UNDER_TSAN();
  const engine::PoolSpec quiet{{19, true}, 2};
  let_every_thread_start();
  let_every_thread_start(quiet);
  EXPECT_TRUE(in_child([&] {
    std::latch done(1);
    boost::asio::post(context().executor.pool(quiet), [&] { done.count_down(); });
    done.wait();
    return true;
  }));
}

TEST(Fork, AChildDoesNotWaitForItsParentsSave) {
  TC_SKIP_FORK_UNDER_TSAN();
  TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN();
  let_every_thread_start();
  TempDir directory;
  const std::string contents(50'000, 'x');
  std::latch writing(1);
  std::latch forked(1);
  os::ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "open") {
      writing.count_down();
      forked.wait();
    }
    return 0;
  });
  std::vector<engine::FileJob> jobs(1);
  jobs[0].name = "parents";
  jobs[0].image.add_bytes(test::host_source(contents));
  auto session =
      SaveSession::start(context(), test::open_directory(directory), std::move(jobs), {});
  ASSERT_TRUE(ok(session));
  writing.wait();
  EXPECT_TRUE(in_child([&] {
    (*session)->cancel();
    const bool over = (*session)->wait_for(std::chrono::hours(1));
    return over && fails((*session)->outcome(), Errc::cancelled);
  }));
  forked.count_down();
  test::wait_for_end(**session);
  EXPECT_TRUE(ok((*session)->outcome())) << "the child's cancel() reached the parent";
}

TEST(Fork, AChildDoesNotWaitForItsParentsLoad) {
  TC_SKIP_FORK_UNDER_TSAN();
  TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN();
  let_every_thread_start();
  TempDir directory;
  test::write_file(directory.file("a"), "hello");
  std::string found(5, '?');
  std::latch reading(1);
  std::latch forked(1);
  os::ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "pread") {
      reading.count_down();
      forked.wait();
    }
    return 0;
  });
  auto session = LoadSession::start(context(), test::open_directory(directory), {{"a", {}}},
                                    {read_into(found)}, {});
  ASSERT_TRUE(ok(session));
  reading.wait();
  EXPECT_TRUE(in_child([&] {
    (*session)->cancel();
    const bool over = (*session)->wait_for(std::chrono::hours(1));
    const auto failure = (*session)->failure();
    return over && failure && failure->error.code == Errc::cancelled;
  }));
  forked.count_down();
  test::wait_for_end(**session);
  EXPECT_FALSE((*session)->failure().has_value());
  EXPECT_EQ(found, "hello");
}

TEST(Fork, AChildJoinsNoThreadOfItsParent) {
  TC_SKIP_FORK_UNDER_TSAN();
  let_every_thread_start();
  context().executor.pool();
  EXPECT_TRUE(in_child([] {
    context().executor.join();
    return true;
  }));
}

TEST(Fork, AChildDoesNotReuseItsParentsChunks) {
  auto chunk = staging::Chunk::allocate(4096);
  ASSERT_TRUE(ok(chunk));
  std::byte* const address = (*chunk)->bytes().data();
  // A page that is copied on write during a direct transfer would be torn, so it is not even
  // mapped.
  EXPECT_TRUE(in_child([address] {
    unsigned char resident = 0;
    return ::mincore(address, 4096, &resident) == -1 && errno == ENOMEM;
  }));
}

TEST(Fork, AChildHasItsOwnChunkPool) {
  auto& pool = context().chunks;
  auto chunk = pool.take(4096);
  ASSERT_TRUE(ok(chunk));
  pool.give_back(std::move(*chunk));
  EXPECT_TRUE(in_child([] { return context().chunks.idle_bytes() == 0; }));
}

TEST(Fork, AChildStartsWithoutAReserve) {
  TC_SKIP_FORK_UNDER_TSAN();
  let_every_thread_start();
  auto& pool = context().chunks;
  pool.trim(0);
  pool.set_reserve(3 * 4096, 4096);
  ASSERT_TRUE(ok(engine::grow_reserve(context(), 3 * 4096, {})));
  EXPECT_TRUE(in_child([] {
    auto& own = context().chunks;
    if (own.reserve_bytes() != 0 || own.reserved_bytes() != 0) return false;
    own.set_reserve(2 * 4096, 4096);
    const auto grown = engine::grow_reserve(context(), 2 * 4096, {});
    return grown && *grown == 2 * 4096;
  }));
  EXPECT_EQ(pool.reserved_bytes(), 3 * 4096);
  pool.trim(0);
}

TEST(Fork, AChildGrowsItsReserveWhileItsParentDoes) {
  TC_SKIP_FORK_UNDER_TSAN();
  TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN();
  let_every_thread_start();
  auto& pool = context().chunks;
  pool.trim(0);
  pool.set_reserve(3 * 4096, 4096);
  std::latch making(1);
  std::latch forked(1);
  std::atomic<bool> first{true};
  const pid_t parent = ::getpid();
  os::ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "mmap" && ::getpid() == parent && first.exchange(false)) {
      making.count_down();
      forked.wait();
    }
    return 0;
  });
  std::jthread maker([] { EXPECT_TRUE(ok(engine::grow_reserve(context(), 3 * 4096, {}))); });
  making.wait();
  EXPECT_TRUE(in_child([] {
    context().chunks.set_reserve(2 * 4096, 4096);
    const auto grown = engine::grow_reserve(context(), 2 * 4096, {});
    return grown && *grown == 2 * 4096;
  }));
  forked.count_down();
  maker.join();
  EXPECT_EQ(pool.reserved_bytes(), 3 * 4096);
  pool.trim(0);
}

}  // namespace
}  // namespace torch_ckpt
