#pragma once

#include <functional>
#include <string>
#include <thread>

#include "error.h"

namespace torch_ckpt::os {

/// Starts a thread that runs `body`, and assigns it to `thread`, which must not be joinable. If the
/// system refuses, the error names the limits that may have caused it.
Result<> start_thread(std::thread& thread, std::function<void()> body);

/// Describes the thread limits that apply to this process, for error messages.
std::string thread_limits();

}  // namespace torch_ckpt::os
