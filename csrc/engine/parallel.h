#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "engine/context.h"
#include "error.h"

namespace torch_ckpt::engine {

/// Calls `task` with each number below `count`, on several threads of the context, and blocks until
/// all calls have ended. After a failure, makes no further calls and returns the first error.
/// `operation` names the work in the error of an exception.
Result<> run_parallel(Context& context, std::size_t count, std::string_view operation,
                      const std::function<Result<>(std::size_t)>& task);

}  // namespace torch_ckpt::engine
