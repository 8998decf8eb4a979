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
//   - For the results of one save: the writing process sends the result of each file, from any
//     thread, and the children that it forks wait for all of them. Results stay in the mailbox, so
//     that every child can read them.
//   - As a queue: any process sends objects to the process that created the channel, which takes
//     each object once. A sender first announces its object. If it dies before sending the object,
//     take_dead_senders() returns it.
//
// Safe for concurrent use by multiple threads.
class ProcessChannel {
 public:
  static Result<ProcessChannel> create();
  explicit ProcessChannel(const os::Mailbox::Address& address) : mailbox_(address) {}
  ProcessChannel(ProcessChannel&& other) noexcept
      : mailbox_(std::move(other.mailbox_)), owner_(other.owner_) {}

  const os::Mailbox::Address& address() const { return mailbox_.address(); }

  // --- results of one save ---

  /// Sends the result of one file; the save has `files` of them. If memory runs out or another
  /// sender is suspended, marks the result as lost, so that waiting children fail instead of
  /// waiting forever.
  void send(const Result<format::FileResult>& result, std::size_t files);

  struct Outcome {
    std::vector<format::FileResult> files;
    std::optional<std::string> object;  // sent instead of results, e.g. why the save was cancelled
  };
  /// Waits in a forked child for the results of all files or for an object. Returns nullopt if a
  /// signal arrives or `timeout` expires first. Fails if a file has failed (with its error) or if
  /// the writing process has died.
  Result<std::optional<Outcome>> wait_for_files(std::chrono::milliseconds timeout);

  // --- queue ---

  Result<> send_object(std::span<const std::byte> object);
  /// Announces that this process will send an object. `what` describes the object in messages.
  Result<> announce(std::string_view what);

  /// Returns all objects that were sent since the last call, oldest first.
  Result<std::vector<std::string>> take_objects();
  /// Waits until an object may be available, or until a process that announced one has died.
  Result<> wait(std::chrono::milliseconds timeout);
  Result<> wake() { return mailbox_.wake(); }
  /// Returns the process id and the description for each object whose sender died after announcing
  /// and before sending it. Each is returned only once.
  Result<std::vector<std::pair<std::int64_t, std::string>>> take_dead_senders();

 private:
  // An object that was announced but not sent yet.
  struct Announcement {
    os::ProcessId sender;
    std::string what;
  };

  explicit ProcessChannel(os::Mailbox mailbox)
      : mailbox_(std::move(mailbox)), owner_(os::own_process()) {}
  Result<> receive() TC_REQUIRES(mutex_);

  os::Mailbox mailbox_;
  os::ProcessId owner_;
  os::Mutex mutex_;
  std::vector<Announcement> announced_ TC_GUARDED_BY(mutex_);
  std::vector<std::string> objects_ TC_GUARDED_BY(mutex_);
  std::size_t files_done_ TC_GUARDED_BY(mutex_) = 0;  // successful files whose results were sent
};

}  // namespace torch_ckpt::engine
