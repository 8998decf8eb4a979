// The files that a save reports as unfinished, and their phases.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <latch>
#include <thread>
#include <vector>

#include "engine/save_session.h"
#include "fake_device.h"
#include "gate.h"
#include "os/fault.h"
#include "save_files.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using os::ScopedFaultHook;
using namespace test;

SaveOptions in_pages(std::size_t parallel_files = 0) {
  SaveOptions options;
  options.chunk_bytes = kPage;
  options.parallel_files = parallel_files;
  return options;
}

void expect_file(const FileProgress& found, std::size_t file, FilePhase phase,
                 std::uint64_t bytes_written, std::uint64_t bytes) {
  EXPECT_EQ(found.file, file);
  EXPECT_EQ(found.phase, phase);
  EXPECT_EQ(found.bytes_written, bytes_written);
  EXPECT_EQ(found.bytes, bytes);
}

class Unfinished : public FilesTest {
 protected:
  /// Adds a file of one tensor on the device, and starts its save.
  std::shared_ptr<SaveSession> start_from(FakeDevice& device, std::size_t stagers) {
    files_.begin_file();
    const std::string payload(3 * kPage, 'x');
    files_.add_tensor_at(device.upload(payload), payload);
    SaveOptions options = in_pages();
    options.parallel_stagers = stagers;
    return start(directory_, files_, options);
  }
  /// Expects the only file to wait for its source, which `source` holds; then lets it end.
  void expect_staging(SaveSession& session, Gate& source) {
    const auto found = session.unfinished();
    ASSERT_EQ(found.size(), 1);
    expect_file(found[0], 0, FilePhase::staging, 0, files_.bytes());
    source.open();
    wait_for_end(session);
    EXPECT_TRUE(ok(session.outcome()));
  }
  /// The unfinished files of a save whose calls of an operation are held, from the n-th on.
  std::vector<FileProgress> held_at(const std::string& operation,
                                    const SaveOptions& options = in_pages(), std::size_t n = 1) {
    HeldOperation held(operation, n);
    const auto session = start(directory_, files_, options);
    if (options.snapshot) {
      EXPECT_TRUE(session->wait_staged(std::chrono::minutes(2)));
    }
    held.wait_until_held();
    const auto found = session->unfinished();
    held.open();
    wait_for_end(*session);
    return found;
  }
};

TEST_F(Unfinished, IsEmptyAfterASaveHasEnded) {
  files_.add_file(std::string(3 * kPage, 'x'));
  const auto session = start(directory_, files_, in_pages());
  wait_for_end(*session);
  EXPECT_TRUE(session->unfinished().empty());
}

TEST_F(Unfinished, IsEmptyAfterASaveHasFailed) {
  files_.add_file(std::string(3 * kPage, 'x'));
  files_.add_file(std::string(3 * kPage, 'y'));
  ScopedFaultHook hook(test::NthCallFails("pwrite", 2, EIO));
  const auto session = start(directory_, files_, in_pages());
  wait_for_end(*session);
  EXPECT_FALSE(session->outcome().has_value());
  EXPECT_TRUE(session->unfinished().empty());
}

TEST_F(Unfinished, AFileThatWaitsForItsSourceIsStaging) {
  FakeDevice device;
  Gate source;
  device.on_copy([hold = source.passage()](const staging::Source&, std::uint64_t) {
    hold();
    return Result<>();
  });
  const auto session = start_from(device, 1);
  source.wait_for_arrivals();
  expect_staging(*session, source);
}

TEST_F(Unfinished, AFileWhoseFirstPieceWaitsForItsSourceIsStagingThoughLaterPiecesAreStaged) {
  FakeDevice device;
  Gate source;
  device.on_copy([hold = source.passage()](const staging::Source&, std::uint64_t offset) {
    if (offset == 0) hold();
    return Result<>();
  });
  const auto session = start_from(device, 2);
  source.wait_for_arrivals();
  while (session->progress().bytes_staged < 2 * kPage) std::this_thread::yield();
  expect_staging(*session, source);
}

TEST_F(Unfinished, AFileThatWaitsForItsWritesIsWriting) {
  files_.add_file(std::string(3 * kPage + 1, 'x'));
  const auto found = held_at("pwrite");
  ASSERT_EQ(found.size(), 1);
  expect_file(found[0], 0, FilePhase::writing, 0, 3 * kPage + 1);
}

TEST_F(Unfinished, AFileAtItsLastWriteHasWrittenAllBytesBeforeIt) {
  files_.add_file(std::string(4 * kPage, 'x'));
  // With one chunk, so that there is one write at a time.
  SaveOptions options = in_pages();
  options.max_host_bytes = kPage;
  const auto found = held_at("pwrite", options, 4);
  ASSERT_EQ(found.size(), 1);
  expect_file(found[0], 0, FilePhase::writing, 3 * kPage, 4 * kPage);
}

TEST_F(Unfinished, AStagedFileThatIsNotOpenYetIsWriting) {
  files_.add_file(std::string(2 * kPage, 'x'));
  SaveOptions options = in_pages();
  options.snapshot = true;
  const auto found = held_at("open", options);
  ASSERT_EQ(found.size(), 1);
  expect_file(found[0], 0, FilePhase::writing, 0, 2 * kPage);
}

TEST_F(Unfinished, AFileInFsyncHasWrittenAllBytes) {
  files_.add_file(std::string(3 * kPage, 'x'));
  const auto found = held_at("fsync");
  ASSERT_EQ(found.size(), 1);
  expect_file(found[0], 0, FilePhase::fsync, 3 * kPage, 3 * kPage);
}

TEST_F(Unfinished, AnEmptyFileCanBeInFsync) {
  files_.begin_file();
  const auto found = held_at("fsync");
  ASSERT_EQ(found.size(), 1);
  expect_file(found[0], 0, FilePhase::fsync, 0, 0);
}

TEST_F(Unfinished, TheLastFileIsInFsyncDuringTheFsyncOfTheDirectory) {
  files_.add_file(std::string(kPage, 'x'));
  files_.add_file(std::string(kPage, 'y'));
  const auto found = held_at("fsync_directory", in_pages(1));
  ASSERT_EQ(found.size(), 1);
  expect_file(found[0], 1, FilePhase::fsync, kPage, kPage);
}

TEST_F(Unfinished, AFileQueuedBehindAnotherIsWaiting) {
  files_.add_file(std::string(3 * kPage, 'x'));
  files_.add_file(std::string(2 * kPage, 'y'));
  SaveOptions options = in_pages(1);
  options.max_host_bytes = kPage;
  const auto found = held_at("pwrite", options);
  ASSERT_EQ(found.size(), 2);
  expect_file(found[0], 0, FilePhase::writing, 0, 3 * kPage);
  expect_file(found[1], 1, FilePhase::waiting, 0, 2 * kPage);
}

TEST_F(Unfinished, AStagedFileQueuedBehindAnotherIsWaiting) {
  files_.add_file(std::string(3 * kPage, 'x'));
  files_.add_file(std::string(2 * kPage, 'y'));
  SaveOptions options = in_pages(1);
  options.snapshot = true;
  const auto found = held_at("pwrite", options);
  ASSERT_EQ(found.size(), 2);
  expect_file(found[1], 1, FilePhase::waiting, 0, 2 * kPage);
}

TEST_F(Unfinished, ContainsOnlyFilesThatHaveNotEnded) {
  for (int i = 0; i < 4; ++i) files_.add_file(std::string(kPage, 'x'));
  const std::string last = directory_.file(files_.jobs()[3].name);
  Gate gate;
  ScopedFaultHook hook(
      [&, pass = gate.passage()](std::string_view operation, std::string_view path) {
        if (operation == "open" && path == last) pass();
        return 0;
      });
  const auto session = start(directory_, files_, in_pages(1));
  gate.wait_for_arrivals();
  const auto found = session->unfinished();
  ASSERT_EQ(found.size(), 1);
  EXPECT_EQ(found[0].file, 3);
  EXPECT_EQ(session->progress().files_done, 3);
  gate.open();
  wait_for_end(*session);
}

TEST_F(Unfinished, CanBeQueriedByAnyThreadAtAnyTime) {
  Random random(21);
  test::add_assorted_files(files_, random, 8);
  const auto session = start(directory_, files_, in_pages());
  std::atomic<bool> ended{false};
  std::latch asked(4);
  {
    std::vector<std::jthread> threads;
    for (int number = 0; number < 4; ++number) {
      threads.emplace_back([&] {
        std::vector<std::uint64_t> before(8, 0);
        bool last = false;
        for (bool first = true; !last; first = false) {
          last = ended;
          for (const FileProgress& file : session->unfinished()) {
            EXPECT_LE(file.bytes_written, file.bytes);
            EXPECT_GE(file.bytes_written, before[file.file]) << "it never moves backwards";
            before[file.file] = file.bytes_written;
          }
          if (first) asked.count_down();
        }
      });
    }
    asked.wait();
    wait_for_end(*session);
    ended = true;
  }
  EXPECT_TRUE(session->unfinished().empty());
  files_.expect_on_disk();
}

}  // namespace
}  // namespace torch_ckpt::engine
