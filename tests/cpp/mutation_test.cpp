// Passes thousands of damaged records, damaged programs and generated programs to the functions
// that the fuzzers call, so that builds with sanitizers always cover them. They are the same in
// every run unless the environment asks for more:
//
//   TORCH_CKPT_PROGRAMS=100000   number of generated programs of up to 256 KiB; prints their cost
//   TORCH_CKPT_SEED=17           seed of the first program; it increases by 1 for each program

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
constexpr std::size_t kMaxSeedBytes = 8192;

/// Makes one to four changes: flips a bit, writes a random byte or the limit of an integer, copies
/// or removes bytes, or truncates the data.
std::string mutated(std::string data, Random& random) {
  static constexpr std::string_view kEdges[] = {
      std::string_view("\xff\xff\xff\xff", 4), std::string_view("\0\0\0\0", 4),
      std::string_view("\xff\xff\xff\x7f", 4), std::string_view("\0\0\0\x80", 4),
      std::string_view("\xff\xff\xff\xff\xff\xff\xff\xff", 8)};
  const auto position = [&] { return random.between(0, data.empty() ? 0 : data.size() - 1); };
  for (std::uint64_t change = random.between(1, 4); change > 0 && !data.empty(); --change) {
    const std::uint64_t at = position();
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
        data.insert(position(), data.substr(at, count));
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
    if (stock.payload_bytes > kMaxSeedBytes) continue;
    seeds.push_back(record_of(stock.header(), std::string(stock.payload_bytes, 'p')));
  }
  std::vector<format::RecordSums> sums(3);
  sums[1].offset = 100;
  sums[1].block_bytes = 64;
  sums[1].block_crcs = {1, 2, 3};
  sums[2].offset = 1000;
  sums[2].raw = true;
  seeds.push_back(format::encode_checksum_table(sums));
  // The table without its checksum, which use_record() appends.
  seeds.push_back(seeds.back().substr(0, seeds.back().size() - 4));
  return seeds;
}

TEST(Mutations, OfRecordsAreRejectedOrReadInsideTheirBounds) {
  Random random(11);
  const auto seeds = record_seeds();
  for (const std::string& seed : seeds) ASSERT_EQ(use_record(bytes_of(seed)), "");
  for (int round = 0; round < kRounds; ++round) {
    const std::string& seed = seeds[random.between(0, seeds.size() - 1)];
    ASSERT_EQ(use_record(bytes_of(mutated(seed, random))), "") << "round " << round;
  }
}

TEST(Mutations, OfMetadataAreRejectedOrEndWithStop) {
  Random random(12);
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

/// Generates a program of up to `max_bytes`. Sizes are distributed logarithmically.
std::string generated(std::uint64_t seed, double max_bytes) {
  Random random(seed);
  const double scale = static_cast<double>(random.between(0, 1 << 20)) / (1 << 20);
  const auto bytes = static_cast<std::size_t>(64 * std::pow(max_bytes / 64, scale));
  return metadata_program(
      [&](std::uint64_t low, std::uint64_t high) { return random.between(low, high); }, bytes);
}

TEST(MetadataPrograms, NeedMemoryAndStepsInProportionToTheirSize) {
  const std::uint64_t first = from_environment("TORCH_CKPT_SEED", 1);
  for (std::uint64_t seed = first; seed < first + 4000; ++seed) {
    ASSERT_EQ(use_metadata_within_cost(bytes_of(generated(seed, 1 << 14))), "")
        << "TORCH_CKPT_SEED=" << seed;
  }
}

TEST(MetadataPrograms, InLargeNumbersStayBelowTheLimitsForEachByte) {
  const std::uint64_t count = from_environment("TORCH_CKPT_PROGRAMS", 0);
  if (count == 0) GTEST_SKIP() << "Set TORCH_CKPT_PROGRAMS to the number of programs";
  const std::uint64_t first = from_environment("TORCH_CKPT_SEED", 1);
  double max_heap = 0;
  double max_steps = 0;
  double max_seconds = 0;
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
    max_heap = std::max(max_heap, (static_cast<double>(cost.heap_bytes) - fixed) / bytes);
    const double steps = static_cast<double>(cost.steps) - static_cast<double>(kFixedSteps);
    max_steps = std::max(max_steps, steps / bytes);
    max_seconds = std::max(max_seconds, (seconds - 1e-3) / bytes);
    accepted += cost.is_accepted ? 1 : 0;
    all_bytes += program.size();
  }
  std::printf(
      "%llu programs, %llu bytes, %llu accepted: at most %.1f bytes of memory, %.1f steps and "
      "%.3f us for each byte, plus %zu bytes, %llu steps and 1 ms\n",
      static_cast<unsigned long long>(count), static_cast<unsigned long long>(all_bytes),
      static_cast<unsigned long long>(accepted), max_heap, max_steps, 1e6 * max_seconds,
      kFixedHeapBytes, static_cast<unsigned long long>(kFixedSteps));
  EXPECT_LT(max_seconds, 1e-5);
}

}  // namespace
}  // namespace torch_ckpt::test
