#include "engine/reserve.h"

#include <algorithm>

#include "engine/parallel.h"
#include "os/cores.h"

namespace torch_ckpt::engine {
namespace {

// Even fewer threads than this can clear pages at full memory bandwidth.
constexpr std::size_t kMaxThreads = 16;

}  // namespace

Result<std::size_t> grow_reserve(Context& context, std::size_t max_bytes, const PoolSpec& spec,
                                 int device) {
  staging::ChunkPool& pool = context.chunks;
  const auto grown =
      run_tasks(context, spec, std::min(os::usable_cores(), kMaxThreads), "grow_reserve",
                [&] { return pool.grow_reserve(max_bytes, device); });
  if (!grown) return grown.error();
  // Another caller may still be allocating chunks of the same reserve.
  pool.wait_until_grown();
  return pool.reserved_bytes();
}

}  // namespace torch_ckpt::engine
