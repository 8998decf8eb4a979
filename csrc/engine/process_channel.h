#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "format/result_frame.h"
#include "os/mailbox.h"
#include "os/mutex.h"
#include "os/process.h"

namespace torch_ckpt::engine {

// A results channel between processes: frames (format/result_frame.h) in a mailbox (os/mailbox.h).
// It is used in two ways.
//
//   - A save's own: the process that writes sends the result of each file, from whatever thread,
//     and children that it forks wait for them. They stay there for every child.
//   - A queue: any process sends objects to the one that made the channel, which takes each once.
//     A sender that has said that it begins owes an object, and is missed when it dies before.
//
// Safe for concurrent use by multiple threads.
class ProcessChannel {
 public:
  static Result<ProcessChannel> create();
  explicit ProcessChannel(const os::Mailbox::Address& address) : mailbox_(address) {}
  ProcessChannel(ProcessChannel&& other) noexcept
      : mailbox_(std::move(other.mailbox_)), owner_(other.owner_) {}

  const os::Mailbox::Address& address() const { return mailbox_.address(); }

  // --- a save's own ---

  /// Sends what became of one of so many files. Where that cannot be, who waits is told.
  void send(const Result<format::FileResult>& result, std::size_t files);

  struct Outcome {
    std::vector<format::FileResult> files;
    std::optional<std::string> object;  // why there are none, where somebody sent that instead
  };
  /// Waits in a forked child until all files' results are there, or why they are not; nothing when
  /// a signal came or `timeout` passed before. Fails with the error of a file, or where the process
  /// that writes died before.
  Result<std::optional<Outcome>> wait_for_files(std::chrono::milliseconds timeout);

  // --- a queue ---

  Result<> send_object(std::span<const std::byte> object);
  /// This process will send an object; `what` says of what, for a message.
  Result<> begin(std::string_view what);

  /// The objects that were sent and not taken, oldest first.
  Result<std::vector<std::string>> take_objects();
  /// Waits until there may be an object, or a sender that has begun has died.
  Result<> wait(std::chrono::milliseconds timeout);
  Result<> wake() { return mailbox_.wake(); }
  /// Of the senders that have begun and have died without an object: who, and what they were going
  /// to do. Each is told once.
  Result<std::vector<std::pair<std::int64_t, std::string>>> take_missed();

 private:
  struct Begun {
    os::ProcessId sender;
    std::string what;
  };

  explicit ProcessChannel(os::Mailbox mailbox)
      : mailbox_(std::move(mailbox)), owner_(os::own_process()) {}
  Result<> receive() TC_REQUIRES(mutex_);

  os::Mailbox mailbox_;
  os::ProcessId owner_;
  os::Mutex mutex_;
  std::vector<Begun> begun_ TC_GUARDED_BY(mutex_);
  std::vector<std::string> objects_ TC_GUARDED_BY(mutex_);
  std::size_t good_ TC_GUARDED_BY(mutex_) = 0;  // files whose results were sent
};

}  // namespace torch_ckpt::engine
