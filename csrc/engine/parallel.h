#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "engine/context.h"
#include "error.h"

namespace torch_ckpt::engine {

/// Calls `step` repeatedly in each of `tasks` tasks of the pool `spec`, and blocks until all tasks
/// have ended. A task ends when `step` returns false or fails, or when another task has failed.
/// Each call is posted to the pool, so that other work on its threads need not wait for an entire
/// task. Returns the first error. `operation` names the work in the error of an exception.
Result<> run_tasks(Context& context, const PoolSpec& spec, std::size_t tasks,
                   std::string_view operation, std::function<Result<bool>()> step);

/// Calls `task` with each number below `count`, on several threads of the context, and blocks until
/// all calls have ended. After a failure, makes no further calls and returns the first error.
/// `operation` names the work in the error of an exception.
Result<> run_parallel(Context& context, std::size_t count, std::string_view operation,
                      const std::function<Result<>(std::size_t)>& task);

}  // namespace torch_ckpt::engine
