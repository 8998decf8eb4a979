#pragma once

#include <functional>

#include "error.h"

namespace torch_ckpt {

/// Called regularly by long calls. Its error ends the call.
using InterruptCheck = std::function<Result<>()>;

}  // namespace torch_ckpt
