#include "engine/process_channel.h"

#include <algorithm>
#include <new>

namespace torch_ckpt::engine {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

format::Sender sender_of(const os::ProcessId& process) {
  return {static_cast<std::uint64_t>(process.number), process.start};
}

os::ProcessId process_of(const format::Sender& sender) {
  return {static_cast<std::int64_t>(sender.process), sender.start};
}

Error missing(std::string text) { return format_error(Errc::result_missing, std::move(text)); }

}  // namespace

Result<ProcessChannel> ProcessChannel::create() {
  auto mailbox = os::Mailbox::create();
  if (!mailbox) return mailbox.error();
  return ProcessChannel(std::move(*mailbox));
}

// --- results of one save -------------------------------------------------------------------------

void ProcessChannel::send(const Result<format::FileResult>& result, std::size_t files) {
  const os::MutexLock lock(mutex_);
  bool sent = false;
  try {
    const std::string frame = result
                                  ? format::encode_file(*result, static_cast<std::uint32_t>(files))
                                  : format::encode_failure(result.error());
    if (result) ++files_done_;
    // Wake the waiting children only for an error or the last result.
    sent = mailbox_.put(bytes_of(frame), !result || files_done_ == files).has_value();
  } catch (const std::bad_alloc&) {
    // Reported as lost below.
  }
  // If this fails, too, the children fail once this process has ended.
  try {
    if (!sent) static_cast<void>(mailbox_.put_lost());
  } catch (const std::bad_alloc&) {
    return;
  }
}

Result<std::optional<ProcessChannel::Outcome>> ProcessChannel::wait_for_files(
    std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (true) {
    // Check this before reading the mailbox: if the process is already dead, the mailbox holds
    // everything that it sent.
    const bool is_alive = os::is_alive(owner_);
    auto contents = mailbox_.read();
    if (!contents) return contents.error();
    auto frames = format::decode_frames(bytes_of(contents->messages));
    if (!frames) return frames.error();
    Outcome outcome;
    std::optional<Error> failure;
    std::size_t files = 0;
    for (format::Frame& frame : *frames) {
      if (frame.kind == format::FrameKind::object) outcome.object = std::move(frame.value);
      if (frame.kind == format::FrameKind::failure && !failure) failure = frame.failure;
      if (frame.kind != format::FrameKind::file) continue;
      files = frame.files;
      outcome.files.push_back(std::move(frame.file));
    }
    if (outcome.object) return std::optional(std::move(outcome));
    // After a cancellation, wait for the object that contains the reason.
    if (failure && failure->code != Errc::cancelled) return *failure;
    if (!failure && files != 0 && outcome.files.size() == files) {
      return std::optional(std::move(outcome));
    }
    if (contents->is_lost) {
      return missing("process " + std::to_string(owner_.number) +
                     " could not send the results of all files: it ran out of memory, or another "
                     "process was suspended while it sent a message");
    }
    if (!is_alive) {
      return missing("process " + std::to_string(owner_.number) +
                     " died after sending the results of " + std::to_string(outcome.files.size()) +
                     (outcome.files.size() == 1 ? " file" : " files"));
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return std::optional<Outcome>();
    TC_TRY(mailbox_.wait(left, std::span(&owner_, 1)));
  }
}

// --- queue ---------------------------------------------------------------------------------------

Result<> ProcessChannel::send_object(std::span<const std::byte> object) {
  auto sent = mailbox_.put(bytes_of(
      format::encode_value(format::FrameKind::object, sender_of(os::own_process()), object)));
  if (!sent) static_cast<void>(mailbox_.put_lost());
  return sent;
}

Result<> ProcessChannel::announce(std::string_view what) {
  return mailbox_.put(bytes_of(format::encode_value(format::FrameKind::begin,
                                                    sender_of(os::own_process()), bytes_of(what))));
}

Result<> ProcessChannel::receive() {
  auto contents = mailbox_.take();
  if (!contents) return contents.error();
  auto frames = format::decode_frames(bytes_of(contents->messages));
  if (!frames) return frames.error();
  for (format::Frame& frame : *frames) {
    const os::ProcessId sender = process_of(frame.sender);
    if (frame.kind == format::FrameKind::begin) {
      announced_.push_back({sender, std::move(frame.value)});
    } else if (frame.kind == format::FrameKind::object) {
      const auto announcement =
          std::find_if(announced_.begin(), announced_.end(),
                       [&](const Announcement& other) { return other.sender == sender; });
      if (announcement != announced_.end()) announced_.erase(announcement);
      objects_.push_back(std::move(frame.value));
    }
  }
  return {};
}

Result<std::vector<std::string>> ProcessChannel::take_objects() {
  const os::MutexLock lock(mutex_);
  TC_TRY(receive());
  return std::exchange(objects_, {});
}

Result<> ProcessChannel::wait(std::chrono::milliseconds timeout) {
  std::vector<os::ProcessId> senders;
  {
    const os::MutexLock lock(mutex_);
    for (const Announcement& announcement : announced_) senders.push_back(announcement.sender);
  }
  return mailbox_.wait(timeout, senders);
}

Result<std::vector<std::pair<std::int64_t, std::string>>> ProcessChannel::take_dead_senders() {
  const os::MutexLock lock(mutex_);
  std::vector<Announcement> dead;
  for (const Announcement& announcement : announced_) {
    if (!os::is_alive(announcement.sender)) dead.push_back(announcement);
  }
  // Receive everything that the dead processes sent. This removes the announcements of objects that
  // have been sent.
  TC_TRY(receive());
  std::vector<std::pair<std::int64_t, std::string>> missing;
  for (Announcement& announcement : dead) {
    const auto open =
        std::find_if(announced_.begin(), announced_.end(), [&](const Announcement& other) {
          return other.sender == announcement.sender && other.what == announcement.what;
        });
    if (open == announced_.end()) continue;
    announced_.erase(open);
    missing.emplace_back(announcement.sender.number, std::move(announcement.what));
  }
  return missing;
}

}  // namespace torch_ckpt::engine
