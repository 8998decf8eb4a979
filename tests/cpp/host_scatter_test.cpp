#include "staging/host_scatter.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "support.h"

namespace torch_ckpt::staging {
namespace {

using planning::Region;
using test::bytes_of;
using test::Random;

// Converts items of `kIn` bytes to items of `kOut` bytes. Each byte of the result depends on all
// bytes of the source item and on its own position.
template <std::size_t kIn, std::size_t kOut>
void convert_items(std::byte* out, const std::byte* in, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    unsigned sum = 0;
    for (std::size_t b = 0; b < kIn; ++b) sum += static_cast<unsigned>(in[i * kIn + b]) * (b + 1);
    for (std::size_t b = 0; b < kOut; ++b) out[i * kOut + b] = static_cast<std::byte>(sum + b);
  }
}

struct Case {
  std::string name;
  std::size_t in_bytes;
  std::size_t out_bytes;
  Convert convert;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// Copies one run between buffers of exactly the size of the run.
class CopyRun : public ::testing::TestWithParam<Case> {
 protected:
  /// `gap`s are in items; negative gaps run backwards.
  void check(std::uint64_t count, std::uint64_t in_gap, std::int64_t out_gap) {
    SCOPED_TRACE(std::to_string(count) + " items, " + std::to_string(in_gap) + " and " +
                 std::to_string(out_gap) + " between");
    const std::size_t in_bytes = GetParam().in_bytes;
    const std::size_t out_bytes = GetParam().out_bytes;
    const std::uint64_t in_stride = (1 + in_gap) * in_bytes;
    const bool backwards = out_gap < 0;
    const std::size_t steps = backwards ? -out_gap : 1 + out_gap;
    const std::size_t out_stride = steps * out_bytes;
    const std::string in = random_.bytes((count - 1) * in_stride + in_bytes);
    std::string out((count - 1) * out_stride + out_bytes, '?');
    const std::size_t first = backwards ? (count - 1) * out_stride : 0;

    std::string expected = out;
    for (std::size_t i = 0; i < count; ++i) {
      std::string item = in.substr(i * in_stride, in_bytes);
      if (GetParam().convert) {
        std::string converted(out_bytes, '?');
        GetParam().convert(reinterpret_cast<std::byte*>(converted.data()), bytes_of(item).data(),
                           1);
        item = converted;
      }
      const std::size_t at = backwards ? first - i * out_stride : i * out_stride;
      expected.replace(at, out_bytes, item);
    }

    const auto signed_stride = static_cast<std::int64_t>(out_stride);
    const Region::Run run{7, 9, count, in_stride, backwards ? -signed_stride : signed_stride};
    copy_run(reinterpret_cast<std::byte*>(out.data() + first), bytes_of(in).data(), run, in_bytes,
             out_bytes, GetParam().convert);
    EXPECT_TRUE(out == expected);
  }

  /// Counts around the number of items that fit into the conversion buffers.
  std::vector<std::uint64_t> counts() const {
    const std::size_t items = 4096 / std::max(GetParam().in_bytes, GetParam().out_bytes);
    return {1, 2, 3, 17, items - 1, items, items + 1, 2 * items - 1, 2 * items, 2 * items + 1};
  }

  Random random_{1};
};

TEST_P(CopyRun, CopiesContiguousItems) {
  for (const std::uint64_t count : counts()) check(count, 0, 0);
}

TEST_P(CopyRun, GathersItemsWithGapsBetweenThem) {
  for (const std::uint64_t count : counts()) check(count, 3, 0);
}

TEST_P(CopyRun, ScattersItemsAndLeavesTheGapsUntouched) {
  for (const std::uint64_t count : counts()) check(count, 0, 2);
}

TEST_P(CopyRun, GathersAndScattersAtOnce) {
  for (const std::uint64_t count : counts()) check(count, 1, 4);
}

TEST_P(CopyRun, RunsBackwardsInTheTarget) {
  for (const std::uint64_t count : counts()) {
    check(count, 0, -1);
    check(count, 2, -3);
  }
}

INSTANTIATE_TEST_SUITE_P(Items, CopyRun,
                         ::testing::Values(Case{"Of1", 1, 1, {}}, Case{"Of2", 2, 2, {}},
                                           Case{"Of4", 4, 4, {}}, Case{"Of8", 8, 8, {}},
                                           Case{"Of16", 16, 16, {}},
                                           Case{"From4To2", 4, 2, convert_items<4, 2>},
                                           Case{"From2To4", 2, 4, convert_items<2, 4>},
                                           Case{"From2To8", 2, 8, convert_items<2, 8>},
                                           Case{"From8To2", 8, 2, convert_items<8, 2>},
                                           Case{"From2To2", 2, 2, convert_items<2, 2>},
                                           Case{"From16To16", 16, 16, convert_items<16, 16>},
                                           Case{"From1To16", 1, 16, convert_items<1, 16>}),
                         [](const auto& c) { return c.param.name; });

}  // namespace
}  // namespace torch_ckpt::staging
