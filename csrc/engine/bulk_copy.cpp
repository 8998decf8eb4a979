#include "engine/bulk_copy.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/post.hpp>
#include <latch>
#include <thread>
#include <utility>

#include "checked_math.h"
#include "engine/first_failure.h"
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
  const std::size_t threads =
      std::min<std::size_t>(blocks.size(), std::max(1U, std::thread::hardware_concurrency()));
  if (auto ensured = context.executor.ensure_threads({}, 0); !ensured) return ensured.error();
  std::atomic<std::size_t> next{0};
  FirstFailure<> failure;
  std::latch done(static_cast<std::ptrdiff_t>(threads));
  const auto copy_blocks = [&] {
    try {
      for (std::size_t n = next++; n < blocks.size(); n = next++) {
        auto copied = copy_block(context.chunks, sources, blocks[n], copies);
        if (!copied) return failure.set(copied.error());
      }
    } catch (...) {
      failure.set(exception_error(std::current_exception(), "copy"));
    }
  };
  for (std::size_t t = 0; t < threads; ++t) {
    try {
      boost::asio::post(context.executor.pool(), [&] {
        copy_blocks();
        done.count_down();
      });
    } catch (...) {
      // Tasks posted earlier use local variables, so wait for them.
      failure.set(exception_error(std::current_exception(), "copy"));
      done.count_down();
    }
  }
  done.wait();
  if (auto error = failure.get()) return *error;
  return copies;
}

}  // namespace torch_ckpt::engine
