#pragma once

#include <chrono>

namespace torch_ckpt::engine {

/// Cancels the session if it is still running, and waits until it has ended.
template <class Session>
void end_session(Session& session) {
  if (session.wait_for(std::chrono::milliseconds(0))) return;
  session.cancel();
  while (!session.wait_for(std::chrono::hours(1))) {
  }
}

}  // namespace torch_ckpt::engine
