// Loads of random regions into random targets deliver the bytes that an oracle computes.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "engine/load_session.h"
#include "fake_device.h"
#include "format/checksum_table.h"
#include "reads.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using planning::Region;
using namespace test;
using Dims = std::vector<std::uint64_t>;
using Steps = std::vector<std::int64_t>;

constexpr std::size_t kPage = 4096;

/// A conversion between items of any two sizes: each byte depends on all bytes of the source.
staging::Convert mix(std::size_t in_bytes, std::size_t out_bytes) {
  return [in_bytes, out_bytes](std::byte* out, const std::byte* in, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      std::size_t sum = 0;
      for (std::size_t b = 0; b < in_bytes; ++b) {
        sum += static_cast<std::size_t>(in[i * in_bytes + b]) * (b + 1);
      }
      for (std::size_t b = 0; b < out_bytes; ++b) {
        out[i * out_bytes + b] = static_cast<std::byte>(sum + b);
      }
    }
  };
}

// Dimensions in random order, the last one innermost.
std::vector<std::size_t> any_order(Random& random, std::size_t dims) {
  std::vector<std::size_t> order(dims);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = dims; i > 1; --i) std::swap(order[i - 1], order[random.between(0, i - 1)]);
  return order;
}

template <class Strides>
Strides strides_in(const std::vector<std::size_t>& order, const Dims& extents) {
  Strides strides(extents.size());
  std::uint64_t stride = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride *= std::max<std::uint64_t>(extents[order[i]], 1);
  }
  return strides;
}

Dims any_sizes(Random& random) {
  // Small shapes, shapes of a few long rows, and shapes of many rows.
  switch (random.between(0, 3)) {
    case 0:
      return {random.between(1, 6), random.between(1, 60'000)};
    case 1:
      return {random.between(1, 40'000), random.between(1, 8)};
    default: {
      Dims sizes(random.between(0, 4));
      for (std::uint64_t& size : sizes) size = random.between(random.coin() ? 0 : 1, 12);
      return sizes;
    }
  }
}

/// A request and the expected contents of its target.
struct Expected {
  OwnedRead request;
  std::string target;
};

Expected any_region(Random& random, const Stored& stored, bool transposed, bool on_device) {
  const Dims& sizes = stored.header.sizes;
  Dims offsets(sizes.size());
  Dims lengths(sizes.size());
  std::uint64_t count = 1;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    const bool whole = random.coin();
    offsets[d] = whole ? 0 : random.between(0, sizes[d]);
    lengths[d] = whole ? sizes[d] : random.between(0, sizes[d] - offsets[d]);
    count *= lengths[d];
  }
  const std::size_t item = stored.header.dtype->item_bytes;
  const bool convert = random.coin();
  const std::size_t target_item = convert ? std::size_t{1} << random.between(0, 4) : item;

  // Targets on a device are contiguous in stored order; targets on the host may have any strides.
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (!on_device && random.coin()) {
    order = any_order(random, sizes.size());
  } else {
    // A dimension of size one may have the stride of the next, since it does not move.
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return stored.header.strides[a] > stored.header.strides[b];
    });
  }
  Dims room = lengths;
  if (!on_device && random.coin()) {
    for (std::uint64_t& extent : room) extent += random.between(0, 2);
  }
  const Steps target_strides = strides_in<Steps>(order, room);

  Expected expected;
  expected.request = stored.request(ReadKind::tensor);
  OwnedRead& request = expected.request;
  if (transposed) request.layout = std::make_shared<format::TensorHeader>(stored.header);
  const auto region = Region::of_box(sizes, transposed ? stored.header.strides : Dims{}, offsets,
                                     lengths, target_strides, item, target_item);
  EXPECT_TRUE(region.has_value());
  request.region = *region;
  if (convert) request.target.convert = mix(item, target_item);

  std::uint64_t last = 0;
  for (std::size_t d = 0; d < sizes.size() && count > 0; ++d) {
    last += (lengths[d] - 1) * static_cast<std::uint64_t>(target_strides[d]);
  }
  expected.target.assign(count == 0 ? 0 : (last + 1) * target_item, '?');
  const std::byte* const payload = test::bytes_of(stored.payload).data();
  std::byte* const out = reinterpret_cast<std::byte*>(expected.target.data());
  for (std::uint64_t number = 0; number < count; ++number) {
    std::uint64_t rest = number;
    std::uint64_t from = 0;
    std::uint64_t to = 0;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      const std::uint64_t at = rest % lengths[d];
      rest /= lengths[d];
      from += (offsets[d] + at) * stored.header.strides[d];
      to += at * static_cast<std::uint64_t>(target_strides[d]);
    }
    if (convert) {
      request.target.convert(out + to * target_item, payload + from * item, 1);
    } else {
      std::copy_n(payload + from * item, item, out + to * item);
    }
  }
  return expected;
}

class AnyLoad : public ::testing::TestWithParam<std::tuple<DirectIo, bool>> {};

TEST_P(AnyLoad, DeliversTheBytesThatTheOracleExpects) {
  const auto [mode, on_device] = GetParam();
  std::optional<FakeDevice> device;
  if (on_device) device.emplace();
  for (std::uint64_t seed = 1; seed <= 25; ++seed) {
    Random random(seed);
    TempDir directory;
    Reads reads(directory);
    std::vector<Expected> expected;
    const bool with_tables = random.coin();
    const std::size_t files = random.between(1, 3);
    for (std::size_t file = 0; file < files; ++file) {
      std::string contents = random.bytes(random.between(0, 100));
      std::vector<format::RecordSums> sums;
      for (std::uint64_t i = random.between(1, 8); i > 0; --i) {
        constexpr std::string_view kDtypes[] = {"uint8", "int16", "float32", "int64", "complex128"};
        auto header = row_major(kDtypes[random.between(0, 4)], any_sizes(random));
        const bool transposed = header.storage_bytes > 0 && random.between(0, 3) == 0;
        if (transposed) {
          header.strides = strides_in<Dims>(any_order(random, header.sizes.size()), header.sizes);
        }
        const std::uint64_t block = random.coin() ? 0 : std::uint64_t{1} << random.between(4, 18);
        const Stored stored =
            store(header, random.bytes(header.storage_bytes), contents.size(), block);
        contents += stored.record + random.bytes(random.between(0, 3) * 1000);
        sums.push_back(stored.sums);
        for (std::uint64_t count = random.between(1, 3); count > 0; --count) {
          const bool to_device = on_device && random.between(0, 3) > 0;
          expected.push_back(any_region(random, stored, transposed, to_device));
          OwnedRead& request = expected.back().request;
          request.stored.file = file;
          if (to_device) {
            request.target.device = 0;
            request.target.address = device->allocate(expected.back().target.size());
          }
        }
      }
      reads.add_raw_file(contents);
      if (with_tables) reads.set_table(file, format::encode_checksum_table(sums));
    }
    for (Expected& of : expected) {
      if (of.request.target.device == staging::Source::kHost) {
        reads.add_to_host(of.request, of.target.size());
      } else {
        reads.add_as_it_is(of.request);
      }
    }
    LoadOptions given = load_options(mode);
    // On a device an item may grow sixteenfold.
    given.chunk_bytes = kPage * random.between(on_device ? 17 : 1, 60);
    given.threads = random.between(1, 4);
    reads.run_all(given);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const Target& target = expected[i].request.target;
      const bool as_expected = target.device == staging::Source::kHost
                                   ? reads.result(i) == expected[i].target
                                   : device->contents(target.address) == expected[i].target;
      ASSERT_TRUE(as_expected) << "request " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, AnyLoad,
                         ::testing::Combine(::testing::Values(DirectIo::on, DirectIo::off),
                                            ::testing::Bool()),
                         [](const auto& c) {
                           std::ostringstream name;
                           name << std::get<0>(c.param)
                                << (std::get<1>(c.param) ? "ToADevice" : "ToTheHost");
                           return name.str();
                         });

}  // namespace
}  // namespace torch_ckpt::engine
