#include "engine/results_channel.h"

#include <boost/asio/bind_executor.hpp>
#include <boost/asio/use_future.hpp>

#include "engine/executor.h"

namespace torch_ckpt::engine {

ResultsChannel::ResultsChannel(std::size_t parts) : parts_(parts), channel_(executor(), parts) {}

void ResultsChannel::send(const Result<>& result) {
  Message message = result ? nullptr : std::make_shared<const Error>(result.error());
  channel_.try_send(boost::system::error_code(), std::move(message));
}

bool ResultsChannel::wait_for(std::chrono::milliseconds timeout) {
  if (inherited()) return true;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (received_ < parts_) {
    // What is already there needs no thread to hand it over; after join_executor() there is none.
    if (!next_.valid() && channel_.try_receive([](auto, auto) {})) {
      ++received_;
      continue;
    }
    // On the executor: by default the future is set by asio's own system threads, which a forked
    // child does not have.
    if (!next_.valid()) {
      next_ = channel_.async_receive(
          boost::asio::bind_executor(channel_.get_executor(), boost::asio::use_future));
    }
    if (next_.wait_until(deadline) != std::future_status::ready) return false;
    next_.get();
    ++received_;
  }
  return true;
}

}  // namespace torch_ckpt::engine
