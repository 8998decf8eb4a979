// A forked child can use the engine as if its parent had never used it.

#include <dlfcn.h>
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

// Counts the registrations of fork handlers, which glibc's pthread_atfork() makes by this function.
// Initialized before the static objects that register handlers.
static constinit std::atomic<int> registered_fork_handlers{0};

extern "C" int __register_atfork(void (*prepare)(), void (*parent)(), void (*child)(), void* dso) {
  using Register = int(void (*)(), void (*)(), void (*)(), void*);
  ++registered_fork_handlers;
  return reinterpret_cast<Register*>(::dlsym(RTLD_NEXT, "__register_atfork"))(prepare, parent,
                                                                              child, dso);
}

namespace torch_ckpt {
namespace {

using engine::LoadSession;
using engine::SaveSession;
using os::ForkLocal;
using namespace test;

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
  EXPECT_TRUE(ok(context().executor.ensure_threads(threads, 0)));
  const std::size_t count = context().executor.threads(threads);
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

// Holds the first call of an operation until the test has forked.
class HeldCall {
 public:
  explicit HeldCall(std::string_view operation)
      : hook_([this, operation](std::string_view called, std::string_view) {
          if (called == operation && first_.exchange(false)) {
            reached_.count_down();
            forked_.wait();
          }
          return 0;
        }) {}
  void wait() const { reached_.wait(); }
  void open() { forked_.count_down(); }

 private:
  std::atomic<bool> first_{true};
  std::latch reached_{1};
  std::latch forked_{1};
  os::ScopedFaultHook hook_;
};

/// One file with the given contents, which must outlive the save.
std::vector<engine::FileJob> one_file(const std::string& name, const std::string& contents) {
  std::vector<engine::FileJob> jobs(1);
  jobs[0].name = name;
  jobs[0].image.add_bytes(test::host_source(contents));
  return jobs;
}

bool save_file(const TempDir& directory, const std::string& name, const std::string& contents) {
  engine::SaveOptions options;
  options.chunk_bytes = 4096;
  return ok(test::run_save(directory, one_file(name, contents), options));
}

/// Reads a record, which begins a file.
engine::RegionRead read_into(const planning::StoredRecord& record, std::string& found) {
  engine::RegionRead read{&record};
  read.region = planning::Region::of_bytes(0, found.size());
  read.target.address = reinterpret_cast<std::byte*>(found.data());
  return read;
}

planning::StoredRecord record_of(std::size_t bytes) { return {"", 0, 0, bytes}; }

bool load_file(const TempDir& directory, const std::string& name, const std::string& expected) {
  std::string found(expected.size(), '?');
  const planning::StoredRecord record = record_of(found.size());
  auto session = LoadSession::start(context(), test::open_directory(directory), {{name, {}}},
                                    {read_into(record, found)}, {});
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

// Under sanitizers, the registration does not go through this function.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST(ForkLocal, RegistersNoForkHandlerOnFirstUse) {
  struct Late {};
  const int before = registered_fork_handlers;
  ForkLocal<Late>::get();
  EXPECT_EQ(registered_fork_handlers, before);
  EXPECT_GT(registered_fork_handlers, 0);
}
#endif

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

using ForkTest = DirectoryTest;

TEST_F(ForkTest, AChildSavesAndLoadsAfterItsParentHasUsedTheEngine) {
  TC_SKIP_FORK_UNDER_TSAN();
  let_every_thread_start();
  const std::string contents(50'000, 'x');
  ASSERT_TRUE(save_file(directory_, "parents", contents));
  ASSERT_TRUE(load_file(directory_, "parents", contents));
  EXPECT_TRUE(in_child([&] {
    return load_file(directory_, "parents", contents) &&
           save_file(directory_, "childs", contents) && load_file(directory_, "childs", contents);
  }));
  EXPECT_TRUE(test::read_file(directory_.file("childs")) == contents);
  EXPECT_TRUE(save_file(directory_, "parents_again", contents));
}

TEST_F(ForkTest, AChildSavesDuringASaveOfItsParent) {
  TC_SKIP_FORK_UNDER_TSAN();
  TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN();
  let_every_thread_start();
  const std::string contents(50'000, 'x');
  HeldCall held("open");
  auto session = SaveSession::start(context(), test::open_directory(directory_),
                                    one_file("parents", contents), {});
  ASSERT_TRUE(ok(session));
  held.wait();
  EXPECT_TRUE(in_child([&] { return save_file(directory_, "childs", contents); }));
  held.open();
  test::wait_for_end(**session);
  EXPECT_TRUE(ok((*session)->outcome()));
  EXPECT_EQ(directory_.names(), (std::vector<std::string>{"childs", "parents"}));
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
  auto session = SaveSession::start(context(), test::open_directory(directory),
                                    one_file(name, contents), in_background());
  if (!session || !(*session)->wait_staged(std::chrono::minutes(1))) return false;
  contents.assign(contents.size(), '#');
  test::wait_for_end(**session);
  return ok((*session)->outcome());
}

TEST_F(ForkTest, AChildSavesInTheBackgroundAfterASaveOfItsParent) {
  TC_SKIP_FORK_UNDER_TSAN();
  let_every_thread_start();
  let_every_thread_start(in_background().writers);
  const std::string contents(50'000, 'x');
  ASSERT_TRUE(save_in_background(directory_, "parents", contents));
  EXPECT_TRUE(in_child([&] { return save_in_background(directory_, "childs", contents); }));
  EXPECT_TRUE(test::read_file(directory_.file("childs")) == contents);
  EXPECT_TRUE(save_in_background(directory_, "parents_again", contents));
}

TEST_F(ForkTest, AChildSavesInTheBackgroundDuringASaveOfItsParent) {
  TC_SKIP_FORK_UNDER_TSAN();
  TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN();
  let_every_thread_start();
  let_every_thread_start(in_background().writers);
  const std::string contents(50'000, 'x');
  HeldCall held("pwrite");
  auto session = SaveSession::start(context(), test::open_directory(directory_),
                                    one_file("parents", contents), in_background());
  ASSERT_TRUE(ok(session));
  held.wait();
  EXPECT_TRUE(in_child([&] {
    // The parent's save counts as ended in the child, and the child's own save is not affected.
    return (*session)->wait_staged(std::chrono::hours(1)) &&
           (*session)->wait_submitted(std::chrono::hours(1)) &&
           save_in_background(directory_, "childs", contents);
  }));
  held.open();
  test::wait_for_end(**session);
  EXPECT_TRUE(ok((*session)->outcome()));
  EXPECT_EQ(directory_.names(), (std::vector<std::string>{"childs", "parents"}));
}

TEST_F(ForkTest, AChildThatDropsItsParentsCopiesDoesNotReuseTheirMemory) {
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

TEST_F(ForkTest, AChildHasItsOwnLowPriorityThreads) {
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

TEST_F(ForkTest, AChildDoesNotWaitForItsParentsSave) {
  TC_SKIP_FORK_UNDER_TSAN();
  TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN();
  let_every_thread_start();
  const std::string contents(50'000, 'x');
  HeldCall held("open");
  auto session = SaveSession::start(context(), test::open_directory(directory_),
                                    one_file("parents", contents), {});
  ASSERT_TRUE(ok(session));
  held.wait();
  EXPECT_TRUE(in_child([&] {
    (*session)->cancel();
    const bool over = (*session)->wait_for(std::chrono::hours(1));
    return over && fails((*session)->outcome(), Errc::cancelled);
  }));
  held.open();
  test::wait_for_end(**session);
  EXPECT_TRUE(ok((*session)->outcome())) << "the child's cancel() reached the parent";
}

TEST_F(ForkTest, AChildDoesNotWaitForItsParentsLoad) {
  TC_SKIP_FORK_UNDER_TSAN();
  TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN();
  let_every_thread_start();
  test::write_file(directory_.file("a"), "hello");
  std::string found(5, '?');
  const planning::StoredRecord record = record_of(found.size());
  HeldCall held("pread");
  auto session = LoadSession::start(context(), test::open_directory(directory_), {{"a", {}}},
                                    {read_into(record, found)}, {});
  ASSERT_TRUE(ok(session));
  held.wait();
  EXPECT_TRUE(in_child([&] {
    (*session)->cancel();
    const bool over = (*session)->wait_for(std::chrono::hours(1));
    const auto failure = (*session)->failure();
    return over && failure && failure->code == Errc::cancelled;
  }));
  held.open();
  test::wait_for_end(**session);
  EXPECT_FALSE((*session)->failure().has_value());
  EXPECT_EQ(found, "hello");
}

TEST_F(ForkTest, AChildJoinsNoThreadOfItsParent) {
  TC_SKIP_FORK_UNDER_TSAN();
  let_every_thread_start();
  context().executor.pool();
  EXPECT_TRUE(in_child([] {
    context().executor.join();
    return true;
  }));
}

TEST_F(ForkTest, AChildDoesNotReuseItsParentsChunks) {
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

TEST_F(ForkTest, AChildHasItsOwnChunkPool) {
  auto& pool = context().chunks;
  auto chunk = pool.take(4096);
  ASSERT_TRUE(ok(chunk));
  pool.give_back(std::move(*chunk));
  EXPECT_TRUE(in_child([] { return context().chunks.idle_bytes() == 0; }));
}

TEST_F(ForkTest, AChildStartsWithoutAReserve) {
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

TEST_F(ForkTest, AChildGrowsItsReserveWhileItsParentDoes) {
  TC_SKIP_FORK_UNDER_TSAN();
  TC_SKIP_FORK_OF_BUSY_THREADS_UNDER_ASAN();
  let_every_thread_start();
  auto& pool = context().chunks;
  pool.trim(0);
  pool.set_reserve(3 * 4096, 4096);
  HeldCall held("mmap");
  std::jthread maker([] { EXPECT_TRUE(ok(engine::grow_reserve(context(), 3 * 4096, {}))); });
  held.wait();
  EXPECT_TRUE(in_child([] {
    context().chunks.set_reserve(2 * 4096, 4096);
    const auto grown = engine::grow_reserve(context(), 2 * 4096, {});
    return grown && *grown == 2 * 4096;
  }));
  held.open();
  maker.join();
  EXPECT_EQ(pool.reserved_bytes(), 3 * 4096);
  pool.trim(0);
}

}  // namespace
}  // namespace torch_ckpt
