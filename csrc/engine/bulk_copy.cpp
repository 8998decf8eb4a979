#include "engine/bulk_copy.h"

#include <algorithm>
#include <utility>

#include "checked_math.h"
#include "engine/parallel.h"
#include "os/file.h"
#include "os/fork_guard.h"
#include "staging/host_copy.h"

namespace torch_ckpt::engine {
namespace {

// Small enough that each thread copies several blocks and all threads finish at about the same
// time; large enough for huge pages.
constexpr std::uint64_t kBlockBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kAlignment = 64;

// Sources [first, last), whose copies share a chunk.
struct Block {
  std::size_t first = 0;
  std::size_t last = 0;
  std::uint64_t bytes = 0;
};

std::vector<Block> blocks_of(std::span<const staging::Source> sources) {
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::uint64_t bytes = align_up(sources[i].bytes, kAlignment);
    if (blocks.empty() || blocks.back().bytes + bytes > kBlockBytes) blocks.push_back({i, i, 0});
    blocks.back().bytes += bytes;
    blocks.back().last = i + 1;
  }
  return blocks;
}

Result<> copy_block(staging::ChunkPool& pool, std::span<const staging::Source> sources,
                    const Block& block, std::vector<PooledCopy>& copies) {
  const std::uint64_t bytes =
      align_up(std::max(block.bytes, kAlignment), std::uint64_t{os::kDirectAlignment});
  auto taken = pool.take(bytes);
  if (!taken) return taken.error();
  const std::shared_ptr<staging::Chunk> memory(
      taken->release(), [&pool, process = os::ProcessMark()](staging::Chunk* chunk) {
        // A forked child does not have this memory: its address may belong to another mapping.
        if (process.inherited()) return;
        pool.give_back(std::unique_ptr<staging::Chunk>(chunk));
      });
  std::uint64_t offset = 0;
  for (std::size_t i = block.first; i < block.last; ++i) {
    const std::span<std::byte> out = memory->bytes().subspan(offset, sources[i].bytes);
    staging::copy_past_caches(sources[i], 0, out);
    copies[i] = {out.data(), memory};
    offset += align_up(sources[i].bytes, kAlignment);
  }
  return {};
}

}  // namespace

Result<std::vector<PooledCopy>> copy_to_pool(Context& context,
                                             std::span<const staging::Source> sources) {
  const std::vector<Block> blocks = blocks_of(sources);
  std::vector<PooledCopy> copies(sources.size());
  const auto copied = run_parallel(context, blocks.size(), "copy", [&](std::size_t n) {
    return copy_block(context.chunks, sources, blocks[n], copies);
  });
  if (!copied) return copied.error();
  return copies;
}

}  // namespace torch_ckpt::engine
