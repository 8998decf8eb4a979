// Thousands of damaged records, damaged programs and generated programs through the functions that
// the fuzzers call, so that the sanitizers' builds always cover them. The same ones in every run,
// unless the environment asks for more:
//
//   TORCH_CKPT_PROGRAMS=100000   so many generated programs, of up to 256 KiB; prints what they cost
//   TORCH_CKPT_SEED=17           the seed of the first one; each later program has the next one

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

#include "../fuzz/entries.h"
#include "../fuzz/programs.h"
#include "format/checksum_table.h"
#include "stock_metadata.h"
#include "stock_records.h"
#include "support.h"

namespace torch_ckpt::test {
namespace {

constexpr int kRounds = 4000;
constexpr std::size_t kMostSeedBytes = 8192;

/// One to four of: a bit flipped, a byte or an edge of an integer put in, bytes doubled, moved,
/// taken away.
std::string mutated(std::string data, Random& random) {
  static constexpr std::string_view kEdges[] = {
      std::string_view("\xff\xff\xff\xff", 4), std::string_view("\0\0\0\0", 4),
      std::string_view("\xff\xff\xff\x7f", 4), std::string_view("\0\0\0\x80", 4),
      std::string_view("\xff\xff\xff\xff\xff\xff\xff\xff", 8)};
  const auto place = [&] { return random.between(0, data.empty() ? 0 : data.size() - 1); };
  for (std::uint64_t change = random.between(1, 4); change > 0 && !data.empty(); --change) {
    const std::uint64_t at = place();
    const std::uint64_t count = std::min<std::uint64_t>(random.between(1, 16), data.size() - at);
    switch (random.between(0, 5)) {
      case 0:
        data[at] = static_cast<char>(data[at] ^ (1 << random.between(0, 7)));
        break;
      case 1:
        data[at] = random.bytes(1)[0];
        break;
      case 2: {
        const std::string_view edge = kEdges[random.between(0, std::size(kEdges) - 1)];
        data.replace(at, std::min(edge.size(), data.size() - at), edge);
        break;
      }
      case 3:
        data.insert(place(), data.substr(at, count));
        break;
      case 4:
        data.erase(at, count);
        break;
      default:
        data.resize(at);
        break;
    }
  }
  return data;
}

std::vector<std::string> record_seeds() {
  std::vector<std::string> seeds;
  for (const StockRecord& stock : stock_records()) {
    seeds.emplace_back(stock.pickle);
    if (stock.payload_bytes > kMostSeedBytes) continue;
    seeds.push_back(record_of(stock.header(), std::string(stock.payload_bytes, 'p')));
  }
  std::vector<format::RecordSums> sums(3);
  sums[1].offset = 100;
  sums[1].block_bytes = 64;
  sums[1].block_crcs = {1, 2, 3};
  sums[2].offset = 1000;
  sums[2].raw = true;
  seeds.push_back(format::encode_checksum_table(sums));
  // Its sum is put behind it again.
  seeds.push_back(seeds.back().substr(0, seeds.back().size() - 4));
  return seeds;
}

TEST(Mutations, OfRecordsAreRefusedOrReadWithinTheirBounds) {
  Random random(11);
  SCOPED_TRACE(random.seed_text());
  const auto seeds = record_seeds();
  for (const std::string& seed : seeds) ASSERT_EQ(use_record(bytes_of(seed)), "");
  for (int round = 0; round < kRounds; ++round) {
    const std::string& seed = seeds[random.between(0, seeds.size() - 1)];
    ASSERT_EQ(use_record(bytes_of(mutated(seed, random))), "") << "round " << round;
  }
}

TEST(Mutations, OfMetadataAreRefusedOrEndWithStop) {
  Random random(12);
  SCOPED_TRACE(random.seed_text());
  const auto& seeds = stock_metadata();
  for (int round = 0; round < kRounds; ++round) {
    const std::string seed(seeds[random.between(0, seeds.size() - 1)].pickle);
    ASSERT_EQ(use_metadata(bytes_of(mutated(seed, random))), "") << "round " << round;
  }
}

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

double cpu_seconds() {
  struct timespec now {};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// A generated program, small ones as likely as large ones.
std::string generated(std::uint64_t seed, double most_bytes) {
  Random random(seed);
  const double scale = static_cast<double>(random.between(0, 1 << 20)) / (1 << 20);
  const auto bytes = static_cast<std::size_t>(64 * std::pow(most_bytes / 64, scale));
  return metadata_program(
      [&](std::uint64_t low, std::uint64_t high) { return random.between(low, high); }, bytes);
}

TEST(MetadataPrograms, AreReadWithMemoryAndStepsInProportionToTheirBytes) {
  const std::uint64_t first = from_environment("TORCH_CKPT_SEED", 1);
  for (std::uint64_t seed = first; seed < first + 4000; ++seed) {
    ASSERT_EQ(use_metadata_within_cost(bytes_of(generated(seed, 1 << 14))), "")
        << "TORCH_CKPT_SEED=" << seed;
  }
}

TEST(MetadataPrograms, InLargeNumbersCostNoMoreThanALimitForEachByte) {
  const std::uint64_t count = from_environment("TORCH_CKPT_PROGRAMS", 0);
  if (count == 0) GTEST_SKIP() << "TORCH_CKPT_PROGRAMS says how many";
  const std::uint64_t first = from_environment("TORCH_CKPT_SEED", 1);
  double most_heap = 0;
  double most_steps = 0;
  double most_seconds = 0;
  std::uint64_t accepted = 0;
  std::uint64_t all_bytes = 0;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    const std::string program = generated(seed, 1 << 18);
    ASSERT_EQ(use_metadata_within_cost(bytes_of(program)), "") << "TORCH_CKPT_SEED=" << seed;
    const double begin = cpu_seconds();
    const Cost cost = cost_of_metadata(bytes_of(program));
    const double seconds = cpu_seconds() - begin;
    const auto bytes = static_cast<double>(program.size());
    const double fixed = kFixedHeapBytes;
    most_heap = std::max(most_heap, (static_cast<double>(cost.heap_bytes) - fixed) / bytes);
    const double steps = static_cast<double>(cost.steps) - static_cast<double>(kFixedSteps);
    most_steps = std::max(most_steps, steps / bytes);
    most_seconds = std::max(most_seconds, (seconds - 1e-3) / bytes);
    accepted += cost.is_accepted ? 1 : 0;
    all_bytes += program.size();
  }
  std::printf(
      "%llu programs, %llu bytes, %llu accepted: at most %.1f bytes of memory, %.1f steps and "
      "%.3f us for a byte, beyond %zu bytes, %llu steps and 1 ms\n",
      static_cast<unsigned long long>(count), static_cast<unsigned long long>(all_bytes),
      static_cast<unsigned long long>(accepted), most_heap, most_steps, 1e6 * most_seconds,
      kFixedHeapBytes, static_cast<unsigned long long>(kFixedSteps));
  EXPECT_LT(most_seconds, 1e-5);
}

}  // namespace
}  // namespace torch_ckpt::test
