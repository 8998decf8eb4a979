#pragma once

#include <functional>
#include <string>
#include <thread>

#include "error.h"

namespace torch_ckpt::os {

/// Lets `thread`, which is none so far, be one that runs `body`. Where the system refuses it, the
/// error says which limits may be the reason.
Result<> start_thread(std::thread& thread, std::function<void()> body);

/// The limits on threads that this process has, for people.
std::string thread_limits();

}  // namespace torch_ckpt::os
