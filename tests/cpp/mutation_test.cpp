// Thousands of damaged records and programs through the functions that the fuzzers call, so that
// the sanitizers' builds always cover them. The same ones in every run.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../fuzz/entries.h"
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

}  // namespace
}  // namespace torch_ckpt::test
