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

// --- a save's own --------------------------------------------------------------------------------

void ProcessChannel::send(const Result<format::FileResult>& result, std::size_t files) {
  const os::MutexLock lock(mutex_);
  bool sent = false;
  try {
    const std::string frame = result
                                  ? format::encode_file(*result, static_cast<std::uint32_t>(files))
                                  : format::encode_failure(result.error());
    if (result) ++good_;
    // Who waits has nothing to do before that.
    sent = mailbox_.put(bytes_of(frame), !result || good_ == files).has_value();
  } catch (const std::bad_alloc&) {
    // Lost, as a message that the mailbox has no memory for.
  }
  // Where this fails, too, the child learns of it when this process ends.
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
    // Looked at before what it has sent, which is then all.
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
    // Why it was cancelled, who has cancelled it tells by an object.
    if (failure && failure->code != Errc::cancelled) return *failure;
    if (!failure && files != 0 && outcome.files.size() == files) {
      return std::optional(std::move(outcome));
    }
    if (contents->is_lost) {
      return missing("there was no memory for the results of all files in process " +
                     std::to_string(owner_.number));
    }
    if (!is_alive) {
      return missing("process " + std::to_string(owner_.number) + " has died when " +
                     std::to_string(outcome.files.size()) + " files were done");
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return std::optional<Outcome>();
    if (auto waited = mailbox_.wait(left, std::span(&owner_, 1)); !waited) return waited.error();
  }
}

// --- a queue -------------------------------------------------------------------------------------

Result<> ProcessChannel::send_object(std::span<const std::byte> object) {
  auto sent = mailbox_.put(bytes_of(
      format::encode_value(format::FrameKind::object, sender_of(os::own_process()), object)));
  if (!sent) static_cast<void>(mailbox_.put_lost());
  return sent;
}

Result<> ProcessChannel::begin(std::string_view what) {
  return mailbox_.put(bytes_of(format::encode_value(format::FrameKind::begun,
                                                    sender_of(os::own_process()), bytes_of(what))));
}

Result<> ProcessChannel::receive() {
  auto contents = mailbox_.take();
  if (!contents) return contents.error();
  auto frames = format::decode_frames(bytes_of(contents->messages));
  if (!frames) return frames.error();
  for (format::Frame& frame : *frames) {
    const os::ProcessId sender = process_of(frame.sender);
    if (frame.kind == format::FrameKind::begun) {
      begun_.push_back({sender, std::move(frame.value)});
    } else if (frame.kind == format::FrameKind::object) {
      const auto owes = std::find_if(begun_.begin(), begun_.end(),
                                     [&](const Begun& begun) { return begun.sender == sender; });
      if (owes != begun_.end()) begun_.erase(owes);
      objects_.push_back(std::move(frame.value));
    }
  }
  return {};
}

Result<std::vector<std::string>> ProcessChannel::take_objects() {
  const os::MutexLock lock(mutex_);
  if (auto received = receive(); !received) return received.error();
  return std::exchange(objects_, {});
}

Result<> ProcessChannel::wait(std::chrono::milliseconds timeout) {
  std::vector<os::ProcessId> senders;
  {
    const os::MutexLock lock(mutex_);
    for (const Begun& begun : begun_) senders.push_back(begun.sender);
  }
  return mailbox_.wait(timeout, senders);
}

Result<std::vector<std::pair<std::int64_t, std::string>>> ProcessChannel::take_missed() {
  const os::MutexLock lock(mutex_);
  std::vector<Begun> dead;
  for (const Begun& begun : begun_) {
    if (!os::is_alive(begun.sender)) dead.push_back(begun);
  }
  // What they have sent before they died is there by now.
  if (auto received = receive(); !received) return received.error();
  std::vector<std::pair<std::int64_t, std::string>> missed;
  for (Begun& begun : dead) {
    const auto owes = std::find_if(begun_.begin(), begun_.end(), [&](const Begun& other) {
      return other.sender == begun.sender && other.what == begun.what;
    });
    if (owes == begun_.end()) continue;
    begun_.erase(owes);
    missed.emplace_back(begun.sender.number, std::move(begun.what));
  }
  return missed;
}

}  // namespace torch_ckpt::engine
