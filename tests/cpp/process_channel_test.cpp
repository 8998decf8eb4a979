// Results between processes. Children are forked before any thread starts, as sanitizers require.

#include "engine/process_channel.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <functional>
#include <string>

#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using namespace test;

constexpr std::chrono::minutes kLongest{1};
constexpr unsigned kLongestSeconds = 60;

format::FileResult result_of(const std::string& name) {
  const std::vector<format::ItemLocation> locations{{0, 0, 10}};
  return {name, format::ItemLocations(locations), {1}, std::string(100, 't')};
}

pid_t fork_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kLongestSeconds);
    ::_exit(body() ? 0 : 1);
  }
  return child;
}

bool succeeds(pid_t child) {
  int status = 0;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// An event that one process waits for and another one sets.
class Turn {
 public:
  Turn() { EXPECT_EQ(::pipe(ends_.data()), 0); }
  ~Turn() {
    for (const int end : ends_) ::close(end);
  }
  void come() const { EXPECT_EQ(::write(ends_[1], "!", 1), 1); }
  void wait() const {
    char byte = 0;
    EXPECT_EQ(::read(ends_[0], &byte, 1), 1);
  }

 private:
  std::array<int, 2> ends_{};
};

class ProcessChannelTest : public ::testing::Test {
 protected:
  ProcessChannel channel_ = ProcessChannel::create().value();
};

// --- results of one save -------------------------------------------------------------------------

TEST_F(ProcessChannelTest, EveryChildReceivesResultsThatAreSentAfterItsFork) {
  const auto body = [&] {
    auto outcome = channel_.wait_for_files(kLongest);
    return outcome && *outcome && (*outcome)->files.size() == 2 &&
           (*outcome)->files[1] == result_of("b");
  };
  const pid_t one = fork_child(body);
  const pid_t other = fork_child(body);
  channel_.send(result_of("a"), 2);
  channel_.send(result_of("b"), 2);
  EXPECT_TRUE(succeeds(one));
  EXPECT_TRUE(succeeds(other));
}

TEST_F(ProcessChannelTest, SomeResultsAreNotAnOutcome) {
  channel_.send(result_of("a"), 2);
  const auto outcome = channel_.wait_for_files(std::chrono::milliseconds(0));
  ASSERT_TRUE(ok(outcome));
  EXPECT_FALSE(outcome->has_value());
}

TEST_F(ProcessChannelTest, TheErrorOfAFileIsTheOutcome) {
  channel_.send(result_of("a"), 2);
  channel_.send(system_error(EIO, "pwrite", "/c/b", 4096), 2);
  const auto outcome = channel_.wait_for_files(kLongest);
  ASSERT_TRUE(fails(outcome, Errc::system));
  EXPECT_EQ(outcome.error().sys_errno, EIO);
  EXPECT_EQ(outcome.error().path, "/c/b");
}

TEST_F(ProcessChannelTest, MemoryThatCannotBeIdentifiedIsAnError) {
  {
    const os::ScopedFaultHook hook(NthCallFails("statx", 1, EIO));
    EXPECT_TRUE(fails(ProcessChannel::create(), Errc::system));
  }
  const os::ScopedFaultHook hook(NthCallFails("statx", 1, EIO));
  EXPECT_TRUE(fails(channel_.send_object(bytes_of("x")), Errc::system));
}

TEST_F(ProcessChannelTest, ACancelledSaveWaitsForTheObjectWithTheReason) {
  channel_.send(format_error(Errc::cancelled, "the save was cancelled"), 1);
  EXPECT_FALSE(channel_.wait_for_files(std::chrono::milliseconds(0)).value().has_value());
  ASSERT_TRUE(ok(channel_.send_object(bytes_of("the source changed"))));
  EXPECT_EQ(channel_.wait_for_files(kLongest).value()->object, "the source changed");
}

TEST_F(ProcessChannelTest, TheErrorForAKilledWriterNamesItsProcess) {
  const Turn forked;
  const Turn killed;
  // The writer has the channel and a child; then the writer is killed.
  std::array<int, 2> told{};
  ASSERT_EQ(::pipe(told.data()), 0);
  const pid_t writer = ::fork();
  if (writer == 0) {
    auto channel = ProcessChannel::create().value();
    channel.send(result_of("a"), 2);
    fork_child([&] {
      forked.come();
      const auto outcome = channel.wait_for_files(kLongest);
      const std::string text = outcome ? "an outcome" : outcome.error().message();
      return ::write(told[1], text.data(), text.size()) > 0;
    });
    ::pause();
  }
  ::close(told[1]);
  forked.wait();
  ::kill(writer, SIGKILL);
  ::waitpid(writer, nullptr, 0);
  std::string text(1000, '\0');
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(0, ::read(told[0], text.data(), 1000))));
  ::close(told[0]);
  EXPECT_EQ(text,
            "process " + std::to_string(writer) + " died after sending the results of 1 file");
}

TEST_F(ProcessChannelTest, ResultsWithoutMemoryAreReportedAsLost) {
  std::size_t failures = 1;
  {
    os::ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
      return operation == "pwrite" && failures-- == 1 ? ENOSPC : 0;
    });
    channel_.send(result_of("a"), 1);
  }
  EXPECT_TRUE(fails(channel_.wait_for_files(kLongest), Errc::result_missing));
}

// --- queue ---------------------------------------------------------------------------------------

TEST_F(ProcessChannelTest, ObjectsOfAChildAreReceivedInOrderAndOnce) {
  EXPECT_TRUE(succeeds(fork_child([&] {
    return channel_.send_object(bytes_of("one")) && channel_.send_object(bytes_of("two"));
  })));
  EXPECT_EQ(channel_.take_objects().value(), (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(channel_.take_objects().value(), std::vector<std::string>());
}

TEST_F(ProcessChannelTest, AProcessCanSendWithTheAddressOnly) {
  const os::Mailbox::Address address = channel_.address();
  EXPECT_TRUE(succeeds(fork_child([&] {
    // All inherited descriptors are closed, as in a spawned process.
    for (int fd = 3; fd < 1000; ++fd) ::close(fd);
    return static_cast<bool>(ProcessChannel(address).send_object(bytes_of("from elsewhere")));
  })));
  EXPECT_EQ(channel_.take_objects().value(), std::vector<std::string>{"from elsewhere"});
}

TEST_F(ProcessChannelTest, AReusedDescriptorNumberIsNotTouched) {
  const test::TempDir directory;
  const std::string path = directory.file("data");
  os::Mailbox::Address address;
  {
    const ProcessChannel gone = ProcessChannel::create().value();
    address = gone.address();
  }
  test::write_file(path, "somebody's data");
  auto other = test::open_for_read(path).value();
  const int fd = std::move(other).release();
  ASSERT_EQ(::dup2(fd, address.memory), address.memory);
  const auto sent = ProcessChannel(address).send_object(bytes_of("an object"));
  ASSERT_TRUE(fails(sent, Errc::system));
  EXPECT_EQ(sent.error().sys_errno, ENOENT);
  EXPECT_EQ(test::read_file(path), "somebody's data");
  ::close(fd);
  ::close(address.memory);
}

TEST_F(ProcessChannelTest, AnObjectWakesTheWaitingThread) {
  const Turn waiting;
  const pid_t child = fork_child([&] {
    waiting.wait();
    return static_cast<bool>(channel_.send_object(bytes_of("item")));
  });
  waiting.come();
  std::vector<std::string> objects;
  while (objects.empty()) {
    ASSERT_TRUE(ok(channel_.wait(kLongest)));
    objects = channel_.take_objects().value();
  }
  EXPECT_EQ(objects, std::vector<std::string>{"item"});
  EXPECT_TRUE(succeeds(child));
}

TEST_F(ProcessChannelTest, AMessageOfASenderThatDiesWhileSendingIsDropped) {
  EXPECT_TRUE(succeeds(fork_child([&] {
    os::ScopedFaultHook hook([&, writes = 0](std::string_view operation, std::string_view) mutable {
      // The message was written, its length was not.
      if (operation == "pwrite" && ++writes == 2) ::_exit(0);
      return 0;
    });
    return static_cast<bool>(channel_.send_object(bytes_of("half")));
  })));
  EXPECT_EQ(channel_.take_objects().value(), std::vector<std::string>());
  EXPECT_TRUE(
      succeeds(fork_child([&] { return channel_.send_object(bytes_of("whole")).has_value(); })));
  EXPECT_EQ(channel_.take_objects().value(), std::vector<std::string>{"whole"});
}

TEST_F(ProcessChannelTest, AChildThatIsForkedDuringASendDoesNotHoldTheLock) {
  const Turn turn;
  pid_t child = -1;
  {
    os::ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
      if (operation == "pwrite" && child < 0) {
        child = fork_child([&] {
          turn.wait();
          return channel_.take_objects().value() == std::vector<std::string>{"message"};
        });
      }
      return 0;
    });
    EXPECT_TRUE(ok(channel_.send_object(bytes_of("message"))));
  }
  turn.come();
  EXPECT_TRUE(succeeds(child));
}

/// Forks a child that is suspended at its `nth` call of an operation, and waits until it is.
pid_t fork_suspended(std::string_view operation, int nth, const std::function<bool()>& body) {
  const pid_t child = fork_child([&] {
    os::ScopedFaultHook hook([&, calls = 0](std::string_view called, std::string_view) mutable {
      if (called == operation && ++calls == nth) ::raise(SIGSTOP);
      return 0;
    });
    return body();
  });
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, WUNTRACED), child);
  EXPECT_TRUE(WIFSTOPPED(status)) << operation;
  return child;
}

TEST_F(ProcessChannelTest, ASuspendedReaderOfResultsDoesNotStopTheSender) {
  channel_.send(result_of("a"), 2);
  for (const int nth : {1, 2}) {
    const pid_t reader = fork_suspended("pread", nth, [&] {
      auto outcome = channel_.wait_for_files(kLongest);
      return outcome && *outcome && (*outcome)->files.size() == 2;
    });
    // The child ends at its alarm if it has to wait for the reader.
    if (nth == 1) {
      EXPECT_TRUE(succeeds(fork_child([&] {
        channel_.send(result_of("b"), 2);
        return true;
      })));
    } else {
      EXPECT_TRUE(ok(channel_.send_object(bytes_of("and more"))));
    }
    ::kill(reader, SIGCONT);
    EXPECT_TRUE(succeeds(reader));
  }
}

TEST_F(ProcessChannelTest, ASuspendedReaderOfAQueueDoesNotStopTheSender) {
  ASSERT_TRUE(ok(channel_.send_object(bytes_of("one"))));
  const pid_t reader = fork_suspended("pwrite", 1, [&] {
    const bool took = channel_.take_objects().value() == std::vector<std::string>{"one"};
    return took && channel_.take_objects().value() == std::vector<std::string>{"two"};
  });
  EXPECT_TRUE(
      succeeds(fork_child([&] { return channel_.send_object(bytes_of("two")).has_value(); })));
  ::kill(reader, SIGCONT);
  EXPECT_TRUE(succeeds(reader));
}

TEST_F(ProcessChannelTest, ASendFailsIfAnotherSenderIsSuspended) {
  const pid_t sender =
      fork_suspended("pwrite", 1, [&] { return channel_.send_object(bytes_of("x")).has_value(); });
  channel_.send(result_of("a"), 1);
  const auto outcome = channel_.wait_for_files(kLongest);
  ASSERT_TRUE(fails(outcome, Errc::result_missing));
  EXPECT_TRUE(
      outcome.error().message().ends_with("another process was suspended while it sent a message"))
      << outcome.error().message();
  ::kill(sender, SIGCONT);
  EXPECT_TRUE(succeeds(sender));
}

TEST_F(ProcessChannelTest, ObjectsThatWereTakenOccupyNoMemory) {
  const std::string object(1 << 20, 'x');
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(ok(channel_.send_object(bytes_of(object))));
    EXPECT_EQ(channel_.take_objects().value(), std::vector<std::string>{object});
    struct stat memory {};
    ASSERT_EQ(::fstat(channel_.address().memory, &memory), 0);
    EXPECT_LE(memory.st_blocks * 512, 3 * 4096);
  }
}

TEST_F(ProcessChannelTest, ASenderThatDiesBeforeItsObjectIsReportedOnce) {
  const pid_t child = fork_child([&] { return channel_.announce("files __0_*").has_value(); });
  EXPECT_TRUE(succeeds(child));
  EXPECT_EQ(channel_.take_objects().value(), std::vector<std::string>());
  const auto missed = channel_.take_dead_senders().value();
  ASSERT_EQ(missed.size(), 1);
  EXPECT_EQ(missed[0].first, child);
  EXPECT_EQ(missed[0].second, "files __0_*");
  EXPECT_TRUE(channel_.take_dead_senders().value().empty());
}

TEST_F(ProcessChannelTest, ASenderThatDiesAfterItsObjectIsNotReported) {
  EXPECT_TRUE(succeeds(fork_child(
      [&] { return channel_.announce("files __0_*") && channel_.send_object(bytes_of("item")); })));
  EXPECT_EQ(channel_.take_objects().value(), std::vector<std::string>{"item"});
  EXPECT_TRUE(channel_.take_dead_senders().value().empty());
}

TEST_F(ProcessChannelTest, TheDeathOfASenderWakesTheWaitingThread) {
  const Turn begun;
  const pid_t child = fork_child([&] {
    const bool done = channel_.announce("files __0_*").has_value();
    begun.come();
    ::pause();
    return done;
  });
  begun.wait();
  EXPECT_EQ(channel_.take_objects().value(), std::vector<std::string>());
  EXPECT_TRUE(channel_.take_dead_senders().value().empty());
  ::kill(child, SIGKILL);
  ASSERT_TRUE(ok(channel_.wait(kLongest)));
  EXPECT_EQ(channel_.take_dead_senders().value().size(), 1);
  ::waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace torch_ckpt::engine
