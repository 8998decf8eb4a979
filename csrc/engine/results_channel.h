#pragma once

#include <boost/asio/experimental/concurrent_channel.hpp>
#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <optional>

#include "error.h"
#include "os/fork_guard.h"

namespace torch_ckpt::engine {

// How the parts of a session report to whoever waits for it: each sends exactly one result, good or
// bad, and the channel has room for all of them, so that none can be lost or refused.
// send() may be called from any thread, wait_for() from one.
class ResultsChannel {
 public:
  explicit ResultsChannel(std::size_t parts);

  void send(const Result<>& result);

  /// Waits until every part has sent its result; false when `timeout` passed before. True at once
  /// in a forked child, where the threads that would send them do not exist.
  bool wait_for(std::chrono::milliseconds timeout);

  /// Whether this is such a child. A session has then failed, whatever its members say: they were
  /// copied at some moment of the parent's work, locks included.
  bool inherited() const { return process_.inherited(); }

 private:
  // Without an error: the part has succeeded.
  using Message = std::shared_ptr<const Error>;

  const os::ProcessMark process_;
  const std::size_t parts_;
  boost::asio::experimental::concurrent_channel<void(boost::system::error_code, Message)> channel_;
  std::future<Message> next_;
  std::size_t received_ = 0;
};

}  // namespace torch_ckpt::engine
