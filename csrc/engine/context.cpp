#include "engine/context.h"

#include "os/fork_guard.h"

namespace torch_ckpt::engine {

Context& Context::process() { return os::ForkLocal<Context>::get(); }

}  // namespace torch_ckpt::engine
