#include "engine/save_session.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <csignal>
#include <deque>
#include <filesystem>
#include <latch>
#include <new>
#include <thread>

#include "engine/context.h"
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

using Names = std::vector<std::string>;

SaveOptions small_chunks(DirectIo mode = DirectIo::automatic) {
  SaveOptions options;
  options.chunk_bytes = 2 * kPage;
  options.direct_io = mode;
  return options;
}

// One chunk of the smallest size for all files, so that every write waits for the last one.
SaveOptions one_small_chunk(DirectIo mode = DirectIo::automatic) {
  SaveOptions options;
  options.chunk_bytes = kPage;
  options.max_host_bytes = kPage;
  options.direct_io = mode;
  return options;
}

class SaveSessionModes : public FilesTest, public ::testing::WithParamInterface<DirectIo> {};

TEST_P(SaveSessionModes, FilesContainTheirImages) {
  Random random(1);
  add_assorted_files(files_, random, 12);
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), small_chunks(GetParam()))));
  files_.expect_on_disk();
}

TEST_P(SaveSessionModes, OneChunkSufficesForManyFiles) {
  Random random(2);
  add_assorted_files(files_, random, 40);
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), one_small_chunk(GetParam()))));
  files_.expect_on_disk();
}

TEST_P(SaveSessionModes, FilesOfSizesAroundABlockAndAChunkAreExact) {
  Random random(3);
  for (const std::size_t bytes : {0, 1, 4095, 4096, 4097, 8191, 8192, 8193, 16384, 20000}) {
    files_.add_file(random.bytes(bytes));
  }
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), small_chunks(GetParam()))));
  files_.expect_on_disk();
}

TEST_P(SaveSessionModes, FilesLargerThanTheDirectThresholdAreExact) {
  Random random(4);
  files_.begin_file();
  files_.add_tensor(random.bytes((2 << 20) + 12345));
  files_.add_tensor(random.bytes(100));
  files_.add_file(random.bytes(1 << 20));
  SaveOptions options;
  options.chunk_bytes = 64 << 10;
  options.direct_io = GetParam();
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), options)));
  files_.expect_on_disk();
}

TEST_P(SaveSessionModes, DefaultOptionsSaveASmallFile) {
  files_.add_file("hello");
  SaveOptions options;
  options.direct_io = GetParam();
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), options)));
  files_.expect_on_disk();
}

INSTANTIATE_TEST_SUITE_P(AllModes, SaveSessionModes, test::all_direct_io(), test::direct_io_name);

using SaveSessionTest = FilesTest;

TEST_F(SaveSessionTest, WithoutFilesSucceedsAndWritesNothing) {
  ASSERT_TRUE(ok(context().executor.ensure_threads({}, 16)));  // before calls are counted
  os::Directory opened = test::open_directory(directory_);
  CallCounter counter;
  ScopedFaultHook hook(counter);
  auto session = SaveSession::start(context(), std::move(opened), {}, {});
  ASSERT_TRUE(ok(session));
  wait_for_end(**session);
  EXPECT_TRUE(ok((*session)->outcome()));
  EXPECT_EQ(counter.log(), Names{});
  (*session)->cancel();
  EXPECT_TRUE(ok((*session)->outcome())) << "it had ended";
}

TEST_F(SaveSessionTest, CreatesEmptyFilesAndEmptyPayloads) {
  files_.begin_file();
  files_.add_file("");
  files_.begin_file();
  files_.add_tensor("");
  files_.add_bytes("");
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), {})));
  files_.expect_on_disk();
}

TEST_F(SaveSessionTest, ReturnsTheChecksumTableOfEachFile) {
  Random random(6);
  add_assorted_files(files_, random, 5);
  files_.begin_file();
  files_.add_bytes("");
  files_.add_bytes(random.bytes(100'000));
  files_.add_bytes("");
  files_.add_tensor(random.bytes(200'000));
  const auto session = start(directory_, files_, small_chunks());
  wait_for_end(*session);
  ASSERT_TRUE(ok(session->outcome()));
  for (std::size_t i = 0; i < 6; ++i) {
    files_.expect_result(*session, i);
    const std::string table = files_.result(i).checksum_table;
    EXPECT_TRUE(ok(format::ChecksumTable::decode(test::bytes_of(table)))) << i;
  }
}

TEST_F(SaveSessionTest, ReturnsTheItemNumbersOfThePlan) {
  files_.add_file("first");
  auto jobs = files_.jobs();
  jobs[0].items = {7};
  auto session = SaveSession::start(context(), test::open_directory(directory_), std::move(jobs),
                                    small_chunks());
  ASSERT_TRUE(ok(session));
  wait_for_end(**session);
  const auto results = (*session)->results();
  ASSERT_TRUE(ok(results));
  EXPECT_EQ(results->at(0).locations.decoded().at(0).item, 7);
}

TEST_F(SaveSessionTest, ReturnsTheResultsInTheOrderOfTheJobs) {
  files_.add_file("ends last");
  files_.add_file("ends first");
  Gate gate;
  const ScopedFaultHook hook([&, pass = gate.passage()](std::string_view, std::string_view path) {
    if (path == directory_.file("f0")) pass();
    return 0;
  });
  const auto session = start(directory_, files_, small_chunks());
  while (session->progress().files_done == 0) std::this_thread::yield();
  gate.open();
  wait_for_end(*session);
  const auto results = session->results();
  ASSERT_TRUE(ok(results));
  EXPECT_EQ(results->at(0).name, "f0");
  EXPECT_EQ(results->at(1).name, "f1");
}

TEST_P(SaveSessionModes, ProgressReachesThePlannedBytes) {
  Random random(6);
  add_assorted_files(files_, random, 5);
  const auto session = start(directory_, files_, small_chunks(GetParam()));
  EXPECT_EQ(session->progress().bytes_planned, files_.bytes());
  wait_for_end(*session);
  const SaveProgress end = session->progress();
  EXPECT_EQ(end.bytes_planned, files_.bytes());
  EXPECT_EQ(end.bytes_staged, files_.bytes());
  EXPECT_EQ(end.bytes_written, files_.bytes());
  EXPECT_EQ(end.files_planned, 5);
  EXPECT_EQ(end.files_done, 5);
}

TEST_F(SaveSessionTest, PadsDirectWritesWithZeros) {
  files_.add_file(std::string(kPage, 'x'));
  files_.add_file("y");
  // Reads the padding before it is truncated; the files are written one after another through one
  // chunk.
  ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    if (operation == "ftruncate" && path == directory_.file("f1")) {
      EXPECT_EQ(read_file(std::string(path)), "y" + std::string(kPage - 1, '\0'));
    }
    return 0;
  });
  SaveOptions options = one_small_chunk(DirectIo::on);
  options.parallel_files = 1;
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), options)));
}

class ParallelFiles : public ::testing::TestWithParam<std::size_t> {};

TEST_P(ParallelFiles, LimitTheNumberOfOpenFiles) {
  TempDir directory;
  Files files(directory);
  for (int i = 0; i < 12; ++i) files.add_file(std::string(20'000, 'x'));
  SaveOptions options = small_chunks();
  options.parallel_files = GetParam();
  context().chunks.trim(0);
  CallCounter counter;
  std::atomic<std::size_t> open{0};
  std::atomic<std::size_t> most{0};
  {
    ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
      counter(operation, path);
      if (operation == "close") --open;
      if (operation == "open") {
        const std::size_t now = ++open;
        for (std::size_t before = most; before < now && !most.compare_exchange_weak(before, now);) {
        }
      }
      return 0;
    });
    ASSERT_TRUE(ok(run_save(directory, files.jobs(), options)));
  }
  files.expect_on_disk();
  EXPECT_LE(most, GetParam());
  EXPECT_LE(counter.calls("mmap"), 3 * GetParam()) << "three chunks for each";
}

INSTANTIATE_TEST_SUITE_P(Counts, ParallelFiles, ::testing::Values(1, 3, 12, 100));

TEST_F(SaveSessionTest, UsesSmallChunksForSmallFiles) {
  files_.add_file("hello");
  context().chunks.trim(0);
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), {})));
  EXPECT_EQ(context().chunks.idle_bytes(), kPage);
}

TEST_F(SaveSessionTest, SyncsEachFileBeforeItsCloseAndTheDirectoryLast) {
  files_.add_file("one");
  files_.add_file("two");
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), small_chunks())));
  }
  const Names log = counter.log();
  const auto at = [&](const std::string& call) {
    EXPECT_EQ(std::count(log.begin(), log.end(), call), 1) << call;
    return std::find(log.begin(), log.end(), call) - log.begin();
  };
  for (const FileJob& job : files_.jobs()) {
    EXPECT_LT(at("pwrite " + directory_.file(job.name)), at("fsync " + directory_.file(job.name)));
    EXPECT_LT(at("fsync " + directory_.file(job.name)), at("close " + directory_.file(job.name)));
  }
  EXPECT_EQ(log.back(), "fsync_directory " + directory_.path());
}

TEST_F(SaveSessionTest, WithoutSyncCallsNoFsync) {
  files_.add_file("one");
  SaveOptions options = small_chunks();
  options.sync = false;
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), options)));
  }
  EXPECT_EQ(counter.calls("fsync"), 0);
  EXPECT_EQ(counter.calls("fsync_directory"), 0);
  files_.expect_on_disk();
}

TEST_F(SaveSessionTest, RejectsChunksThatAreNotMultiplesOfABlock) {
  for (const std::size_t bytes : {std::size_t{100}, kPage + 512}) {
    SaveOptions options;
    options.chunk_bytes = bytes;
    EXPECT_TRUE(fails(SaveSession::start(context(), test::open_directory(directory_), {}, options),
                      Errc::invalid_argument))
        << bytes;
  }
}

TEST_F(SaveSessionTest, RejectsABudgetBelowOneBlock) {
  SaveOptions options;
  options.max_host_bytes = kPage - 1;
  const auto session = SaveSession::start(context(), test::open_directory(directory_), {}, options);
  ASSERT_TRUE(fails(session, Errc::invalid_argument));
  EXPECT_EQ(session.error().message(), "max_host_bytes must be at least 4096, got 4095");
}

TEST_F(SaveSessionTest, SucceedsWithAnUnlimitedBudget) {
  files_.add_file("hello");
  SaveOptions options = small_chunks();
  options.max_host_bytes = ~std::size_t{0};
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), options)));
  files_.expect_on_disk();
}

TEST_F(SaveSessionTest, StaysWithinItsBudget) {
  Random random(7);
  for (int i = 0; i < 10; ++i) files_.add_file(random.bytes(100'000));
  context().chunks.trim(0);
  SaveOptions options = small_chunks();
  options.max_host_bytes = 5 * options.chunk_bytes + 1000;
  CallCounter counter;
  {
    ScopedFaultHook hook(counter);
    ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), options)));
  }
  EXPECT_LE(counter.calls("mmap"), 5);
  EXPECT_LE(context().chunks.idle_bytes(), options.max_host_bytes);
  files_.expect_on_disk();
}

TEST_F(SaveSessionTest, StaysWithinItsBudgetAfterALargerSave) {
  TempDir directory;
  Files large(directory);
  large.add_file(std::string(1 << 20, 'x'));
  SaveOptions options;
  options.chunk_bytes = 128 << 10;
  options.max_host_bytes = 512 << 10;
  ASSERT_TRUE(ok(run_save(directory, large.jobs(), options)));
  TempDir other;
  Files small(other);
  small.add_file(std::string(1 << 20, 'y'));
  options.chunk_bytes = 2 * kPage;
  options.max_host_bytes = 6 * kPage;
  // At every write: at least the chunk that is written, plus the idle chunks of the pool.
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "pwrite") {
      EXPECT_LE(context().chunks.idle_bytes() + options.chunk_bytes, options.max_host_bytes);
    }
    return 0;
  });
  ASSERT_TRUE(ok(run_save(other, small.jobs(), options)));
  EXPECT_LE(context().chunks.idle_bytes(), options.max_host_bytes);
}

TEST_F(SaveSessionTest, ReusesTheChunksOfAnEarlierSave) {
  TempDir first;
  TempDir second;
  for (const TempDir* directory : {&first, &second}) {
    Files files(*directory);
    files.add_file(std::string(100'000, 'x'));
    CallCounter counter;
    {
      ScopedFaultHook hook(counter);
      ASSERT_TRUE(ok(run_save(*directory, files.jobs(), one_small_chunk())));
    }
    if (directory == &second) {
      EXPECT_EQ(counter.calls("mmap"), 0);
    }
  }
}

TEST_F(SaveSessionTest, AWaitThatTimesOutDoesNotEndIt) {
  files_.add_file("hello");
  std::latch waited(1);
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "pwrite") waited.wait();
    return 0;
  });
  const auto session = start(directory_, files_, small_chunks());
  EXPECT_FALSE(session->wait_for(std::chrono::milliseconds(0)));
  EXPECT_FALSE(session->wait_for(std::chrono::milliseconds(1)));
  waited.count_down();
  wait_for_end(*session);
  EXPECT_TRUE(session->wait_for(std::chrono::milliseconds(0)));
  EXPECT_TRUE(ok(session->outcome()));
}

TEST_F(SaveSessionTest, EndsEvenIfNoCallerWaits) {
  files_.add_file(std::string(50'000, 'x'));
  ASSERT_TRUE(ok(SaveSession::start(context(), test::open_directory(directory_), files_.jobs(),
                                    one_small_chunk())));
  context().executor.join();
  files_.expect_on_disk();
}

TEST_F(SaveSessionTest, MayOutliveTheExecutor) {
  for (int i = 0; i < 5; ++i) files_.add_file(std::string(50'000, 'x'));
  auto session = start(directory_, files_, one_small_chunk());
  context().executor.join();
  wait_for_end(*session);
  EXPECT_TRUE(ok(session->outcome()));
  session.reset();
  files_.expect_on_disk();
}

TEST_F(SaveSessionTest, SeveralSavesAtOnceAreIndependent) {
  Random random(8);
  std::deque<TempDir> directories(4);
  std::deque<Files> files;
  std::vector<std::shared_ptr<SaveSession>> sessions;
  for (const TempDir& directory : directories) {
    add_assorted_files(files.emplace_back(directory), random, 6);
    auto session = SaveSession::start(context(), test::open_directory(directory),
                                      files.back().jobs(), one_small_chunk());
    ASSERT_TRUE(ok(session));
    sessions.push_back(*session);
  }
  for (std::size_t i = 0; i < 4; ++i) {
    wait_for_end(*sessions[i]);
    EXPECT_TRUE(ok(sessions[i]->outcome()));
    files[i].expect_on_disk();
  }
}

// --- faults ----------------------------------------------------------------------------------

using SaveSessionFaults = SaveFaults;

// With direct I/O, so that ftruncate is among the calls.
TEST_P(SaveSessionFaults, InAnySystemCallFailTheSaveAndLeaveNoFile) {
  fail_each_call([](const TempDir& directory, const Files& files) {
    return run_save(directory, files.jobs(), small_chunks(DirectIo::on));
  });
}

TEST_P(SaveSessionFaults, InEverySystemCallLeaveNoFile) {
  TempDir directory;
  Files files(directory);
  add_files(files);
  context().chunks.trim(0);
  ScopedFaultHook hook([](std::string_view operation, std::string_view) {
    return operation == GetParam().operation ? GetParam().sys_errno : 0;
  });
  const auto outcome = run_save(directory, files.jobs(), small_chunks(DirectIo::on));
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().sys_errno, GetParam().sys_errno);
  EXPECT_EQ(directory.names(), Names{});
}

INSTANTIATE_TEST_SUITE_P(Operations, SaveSessionFaults,
                         ::testing::Values(Fault{"open", EACCES}, Fault{"pwrite", ENOSPC},
                                           Fault{"fallocate", ENOSPC}, Fault{"ftruncate", EIO},
                                           Fault{"fsync", EIO}, Fault{"close", EDQUOT},
                                           Fault{"fsync_directory", EIO}),
                         SaveFaults::name);

// Not among the faults above: a chunk that is allocated after the last byte was staged is for the
// next save, and its failure does not fail this one.
TEST_F(SaveSessionTest, FailsWithoutMemoryForAChunkAndLeavesNoFile) {
  for (int i = 0; i < 5; ++i) files_.add_file(std::string(3 * kPage, 'x'));
  context().chunks.trim(0);
  ScopedFaultHook hook([](std::string_view operation, std::string_view) {
    return operation == "mmap" ? ENOMEM : 0;
  });
  const auto outcome = run_save(directory_, files_.jobs(), small_chunks());
  ASSERT_FALSE(outcome.has_value());
  EXPECT_TRUE(is_system_error(outcome.error(), ENOMEM, "mmap", ""));
  EXPECT_EQ(directory_.names(), Names{});
}

TEST_F(SaveSessionTest, AFailedFsyncFailsTheSaveAndDeletesEveryFile) {
  for (int i = 0; i < 5; ++i) files_.add_file("contents");
  CallCounter counter;
  Result<> outcome;
  {
    ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
      counter(operation, path);
      return operation == "fsync" && path == directory_.file("f3") ? EIO : 0;
    });
    outcome = run_save(directory_, files_.jobs(), small_chunks());
  }
  ASSERT_FALSE(outcome.has_value());
  EXPECT_TRUE(is_system_error(outcome.error(), EIO, "fsync", directory_.file("f3")));
  EXPECT_EQ(directory_.names(), Names{});
  const Names log = counter.log();
  EXPECT_EQ(std::count(log.begin(), log.end(), "fsync " + directory_.file("f3")), 1)
      << "a second fsync would report success";
  EXPECT_EQ(counter.calls("fsync_directory"), 0);
}

TEST_F(SaveSessionTest, AFailedWriteIsReportedWithItsOffset) {
  for (std::size_t n = 1; n <= 4; ++n) {
    TempDir directory;
    Files files(directory);
    files.add_file(std::string(4 * kPage, 'x'));
    ScopedFaultHook hook(NthCallFails("pwrite", n, ENOSPC));
    const auto outcome = run_save(directory, files.jobs(), one_small_chunk());
    ASSERT_FALSE(outcome.has_value());
    EXPECT_TRUE(is_system_error(outcome.error(), ENOSPC, "pwrite", directory.file("f0")));
    EXPECT_EQ(outcome.error().offset, (n - 1) * kPage);
  }
}

TEST_F(SaveSessionTest, AFullDiskIsReportedBeforeAnyWrite) {
  files_.add_file(std::string(100'000, 'x'));
  CallCounter counter;
  ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    counter(operation, path);
    return operation == "fallocate" ? ENOSPC : 0;
  });
  const auto outcome = run_save(directory_, files_.jobs(), small_chunks());
  ASSERT_FALSE(outcome.has_value());
  EXPECT_TRUE(is_system_error(outcome.error(), ENOSPC, "fallocate", directory_.file("f0")));
  EXPECT_EQ(counter.calls("pwrite"), 0);
}

TEST_F(SaveSessionTest, AnErrorOfTheKernelIsReported) {
  files_.add_file(std::string(100'000, 'x'));
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = 8 * kPage;
  ::setrlimit(RLIMIT_FSIZE, &limit);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  const auto outcome = run_save(directory_, files_.jobs(), small_chunks());
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  ASSERT_FALSE(outcome.has_value());
  EXPECT_TRUE(is_system_error(outcome.error(), EFBIG, "fallocate", directory_.file("f0")));
  EXPECT_EQ(directory_.names(), Names{});
}

TEST_F(SaveSessionTest, TheFirstErrorIsReportedIfSeveralOccur) {
  for (int i = 0; i < 8; ++i) files_.add_file(std::string(10 * kPage, 'x'));
  std::atomic<bool> failed{false};
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "unlink") return EROFS;
    if (operation != "pwrite") return 0;
    return failed.exchange(true) ? EIO : ENOSPC;
  });
  // With one chunk, the first write has failed before the second starts.
  const auto outcome = run_save(directory_, files_.jobs(), one_small_chunk());
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().sys_errno, ENOSPC);
}

TEST_F(SaveSessionTest, AnExistingFileIsNeitherWrittenNorDeleted) {
  for (int i = 0; i < 3; ++i) files_.add_file("new");
  test::write_file(directory_.file("f1"), "old");
  const auto outcome = run_save(directory_, files_.jobs(), small_chunks());
  ASSERT_FALSE(outcome.has_value());
  EXPECT_TRUE(is_system_error(outcome.error(), EEXIST, "open", directory_.file("f1")));
  EXPECT_EQ(directory_.names(), Names{"f1"});
  EXPECT_EQ(read_file(directory_.file("f1")), "old");
}

TEST_F(SaveSessionTest, ALinkInTheDirectoryIsNotFollowed) {
  TempDir elsewhere;
  std::filesystem::create_symlink(elsewhere.file("victim"), directory_.file("f0"));
  files_.add_file("new");
  const auto outcome = run_save(directory_, files_.jobs(), small_chunks());
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().sys_errno, EEXIST);
  EXPECT_EQ(elsewhere.names(), Names{});
}

TEST_F(SaveSessionTest, FailsIfItsDirectoryWasDeleted) {
  files_.add_file("new");
  auto opened = test::open_directory(directory_);
  std::filesystem::remove(directory_.path());
  const auto session =
      SaveSession::start(context(), std::move(opened), files_.jobs(), small_chunks()).value();
  wait_for_end(*session);
  const auto outcome = session->outcome();
  ASSERT_FALSE(outcome.has_value());
  EXPECT_TRUE(is_system_error(outcome.error(), ENOENT, "open", directory_.file("f0")));
}

TEST_F(SaveSessionTest, WritesIntoTheOpenedDirectoryEvenIfItsPathIsReplaced) {
  TempDir above;
  std::filesystem::create_directory(above.file("a"));
  files_.add_file("new");
  auto opened = os::Directory::open(above.file("a")).value();
  std::filesystem::rename(above.file("a"), above.file("moved"));
  std::filesystem::create_directory(above.file("a"));
  const auto session =
      SaveSession::start(context(), std::move(opened), files_.jobs(), small_chunks()).value();
  wait_for_end(*session);
  ASSERT_TRUE(ok(session->outcome()));
  EXPECT_EQ(above.names(), (Names{"a", "moved", "moved/f0"}));
}

TEST_F(SaveSessionTest, AfterAFailureTheNextSaveSucceeds) {
  files_.add_file(std::string(50'000, 'x'));
  {
    ScopedFaultHook hook(NthCallFails("pwrite", 2, EIO));
    ASSERT_FALSE(run_save(directory_, files_.jobs(), one_small_chunk()).has_value());
  }
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), one_small_chunk())));
  files_.expect_on_disk();
}

// --- cancellation ----------------------------------------------------------------------------

TEST_F(SaveSessionTest, EndsItsWritesAndLeavesNoFileWhenCancelled) {
  for (int i = 0; i < 10; ++i) files_.add_file(std::string(50 * kPage, 'x'));
  std::latch writing(1);
  std::latch cancelled(1);
  std::atomic<int> writes{0};
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "pwrite" && writes++ == 0) {
      writing.count_down();
      cancelled.wait();
    }
    return 0;
  });
  const auto session = start(directory_, files_, one_small_chunk());
  writing.wait();
  session->cancel();
  cancelled.count_down();
  wait_for_end(*session);
  EXPECT_TRUE(fails(session->outcome(), Errc::cancelled));
  EXPECT_EQ(directory_.names(), Names{});
  EXPECT_EQ(writes, 1) << "a chunk was filled after the cancellation";
}

TEST_F(SaveSessionTest, SucceedsIfItIsCancelledAfterItsEnd) {
  files_.add_file("hello");
  const auto session = start(directory_, files_, small_chunks());
  wait_for_end(*session);
  session->cancel();
  EXPECT_TRUE(ok(session->outcome())) << "but the files are there";
  files_.expect_on_disk();
}

TEST_F(SaveSessionTest, CanBeCancelledTwice) {
  files_.add_file("hello");
  std::latch cancelled(1);
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "open") cancelled.wait();
    return 0;
  });
  const auto session = start(directory_, files_, small_chunks());
  session->cancel();
  session->cancel();
  cancelled.count_down();
  wait_for_end(*session);
  EXPECT_TRUE(fails(session->outcome(), Errc::cancelled));
  EXPECT_EQ(directory_.names(), Names{});
}

TEST_F(SaveSessionTest, ReportsAFailureThatPrecedesACancel) {
  files_.add_file(std::string(10 * kPage, 'x'));
  std::latch failed(1);
  std::latch cancelled(1);
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "fsync") return EIO;
    if (operation == "unlink") {
      failed.count_down();
      cancelled.wait();
    }
    return 0;
  });
  const auto session = start(directory_, files_, small_chunks());
  failed.wait();
  session->cancel();
  cancelled.count_down();
  wait_for_end(*session);
  ASSERT_TRUE(fails(session->outcome(), Errc::system));
  EXPECT_EQ(session->outcome().error().sys_errno, EIO);
}

// --- devices ---------------------------------------------------------------------------------

TEST_F(SaveSessionTest, FailsForDeviceSourcesWithoutDeviceSupport) {
  test::NoDevice none;
  staging::Source source;
  source.bytes = 10;
  source.device = 0;
  std::vector<FileJob> jobs(1);
  jobs[0].name = "f0";
  jobs[0].image.add_bytes(source);
  EXPECT_TRUE(fails(run_save(directory_, std::move(jobs), small_chunks()), Errc::invalid_argument));
  EXPECT_EQ(directory_.names(), Names{});
}

TEST_P(SaveSessionModes, DeviceTensorsReachTheDisk) {
  Random random(9);
  FakeDevice device;
  for (int file = 0; file < 4; ++file) {
    files_.begin_file();
    for (int item = 0; item < 3; ++item) {
      const std::string payload = random.bytes(random.between(0, 30'000));
      files_.add_tensor_at(device.upload(payload), payload);
      files_.add_tensor(random.bytes(random.between(0, 10'000)));
    }
  }
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), small_chunks(GetParam()))));
  files_.expect_on_disk();
  EXPECT_LE(device.copiers(), 4) << "one for each file";
  EXPECT_GT(device.pins(), 0);
}

TEST_F(SaveSessionTest, DeviceTensorsOfSeveralFilesAreCopiedAtTheSameTime) {
  FakeDevice device;
  std::latch both(2);
  device.on_copy([&](const auto&, std::uint64_t offset) -> Result<> {
    if (offset == 0) both.arrive_and_wait();
    return {};
  });
  for (const char letter : {'a', 'b'}) {
    const std::string payload(20'000, letter);
    files_.begin_file();
    files_.add_tensor_at(device.upload(payload), payload);
  }
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), small_chunks())));
  files_.expect_on_disk();
}

TEST_F(SaveSessionTest, PiecesOfOneFileAreCopiedAtTheSameTime) {
  FakeDevice device;
  std::latch both(2);
  std::atomic<int> copies{0};
  device.on_copy([&](const auto&, auto) -> Result<> {
    if (copies++ < 2) both.arrive_and_wait();
    return {};
  });
  const std::string payload(20'000, 'x');
  files_.begin_file();
  files_.add_tensor_at(device.upload(payload), payload);
  SaveOptions options = small_chunks();
  options.parallel_stagers = 2;
  ASSERT_TRUE(ok(run_save(directory_, files_.jobs(), options)));
  files_.expect_on_disk();
}

TEST_F(SaveSessionTest, AFailedDeviceCopyFailsTheSave) {
  FakeDevice device;
  device.on_copy([&](const auto&, std::uint64_t offset) -> Result<> {
    if (offset == 0) return {};
    return format_error(Errc::system, "the device fell off the bus");
  });
  const std::string payload(20'000, 'x');
  files_.begin_file();
  files_.add_tensor_at(device.upload(payload), payload);
  files_.add_file("another");
  const auto outcome = run_save(directory_, files_.jobs(), small_chunks());
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().detail, "the device fell off the bus");
  EXPECT_EQ(directory_.names(), Names{});
}

TEST_F(SaveSessionTest, WaitsForItsWritesAndLeavesNoFileOnAnException) {
  FakeDevice device;
  std::latch thrown(1);
  device.on_copy([&](const auto&, std::uint64_t offset) -> Result<> {
    if (offset == 0) return {};
    thrown.count_down();
    throw std::bad_alloc();
  });
  // The write of the first chunk lasts until the copy of the second has thrown.
  ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
    if (operation == "pwrite") thrown.wait();
    return 0;
  });
  const std::string payload(20'000, 'x');
  files_.begin_file();
  files_.add_tensor_at(device.upload(payload), payload);
  const auto outcome = run_save(directory_, files_.jobs(), small_chunks());
  ASSERT_FALSE(outcome);
  EXPECT_TRUE(is_system_error(outcome.error(), ENOMEM, "save", ""));
  EXPECT_EQ(directory_.names(), Names{});
}

TEST_F(SaveSessionTest, ReleasesTheChunkOfAFileWithAnException) {
  FakeDevice device;
  device.on_copy([](const auto&, auto) -> Result<> { throw std::bad_alloc(); });
  for (int i = 0; i < 4; ++i) {
    files_.begin_file();
    files_.add_tensor_at(device.upload("hello"), "hello");
  }
  EXPECT_TRUE(fails(run_save(directory_, files_.jobs(), one_small_chunk()), Errc::system));
  EXPECT_EQ(directory_.names(), Names{});
}

// As if an allocation failed during the operation, in any thread.
TEST_F(SaveSessionTest, EndsAndLeavesNoFileOnAnExceptionInAnyOperation) {
  for (const std::string operation : {"open", "fstat", "fallocate", "pwrite", "fsync", "mmap"}) {
    for (std::size_t n = 1; n <= 3; ++n) {
      context().chunks.trim(0);
      TempDir directory;
      Files files(directory);
      for (int i = 0; i < 3; ++i) files.add_file(std::string(50'000, 'x'));
      std::atomic<std::size_t> calls{0};
      Result<> outcome;
      {
        ScopedFaultHook hook([&](std::string_view called, std::string_view) {
          if (called == operation && ++calls == n) throw std::bad_alloc();
          return 0;
        });
        outcome = run_save(directory, files.jobs(), one_small_chunk());
      }
      if (calls < n) break;
      ASSERT_TRUE(fails(outcome, Errc::system)) << operation << ", call " << n;
      ASSERT_EQ(directory.names(), Names{}) << operation << ", call " << n;
    }
  }
}

}  // namespace
}  // namespace torch_ckpt::engine
