#include "format/tensor_pickle.h"

#include <gtest/gtest.h>

#include <limits>

#include "stock_records.h"
#include "support.h"

namespace torch_ckpt::format {
namespace {

using namespace test;

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

Result<TensorHeader> decode(std::string_view pickle) {
  return decode_tensor_pickle(bytes_of(pickle));
}

void expect_same(const TensorHeader& found, const TensorHeader& expected) {
  EXPECT_EQ(found.dtype, expected.dtype);
  EXPECT_EQ(found.storage_bytes, expected.storage_bytes);
  EXPECT_EQ(found.storage_offset, expected.storage_offset);
  EXPECT_EQ(found.sizes, expected.sizes);
  EXPECT_EQ(found.strides, expected.strides);
  EXPECT_EQ(found.conj, expected.conj);
  EXPECT_EQ(found.neg, expected.neg);
}

// Checks the header of a damaged pickle that was accepted.
void expect_well_formed(const Result<TensorHeader>& decoded) {
  ASSERT_NE(decoded->dtype, nullptr);
  ASSERT_EQ(decoded->sizes.size(), decoded->strides.size());
  ASSERT_LE(decoded->sizes.size(), 64);
  const auto again = decode(encode_tensor_pickle(*decoded));
  ASSERT_TRUE(ok(again));
  expect_same(*again, *decoded);
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out(text);
  const auto at = out.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return out.replace(at, from.size(), to);
}

const StockRecord& stock(std::string_view name) {
  for (const StockRecord& record : stock_records()) {
    if (record.name == name) return record;
  }
  ADD_FAILURE() << "no stock record " << name;
  return stock_records().front();
}

// A random dimension or offset, often at a limit of the pickle's integers.
std::uint64_t random_integer(Random& random) {
  static constexpr std::uint64_t kEdges[] = {
      0,          1,          0xff,       0x100,     0xffff,          0x10000, 0x7fffffff,
      0x80000000, 0xffffffff, 1ULL << 32, kMax >> 1, (kMax >> 1) + 1, kMax};
  if (random.coin()) return kEdges[random.between(0, std::size(kEdges) - 1)];
  return random.any_scale(kMax);
}

class StockPickle : public ::testing::TestWithParam<StockRecord> {};

TEST_P(StockPickle, IsEncodedByteForByte) {
  EXPECT_EQ(encode_tensor_pickle(GetParam().header()), GetParam().pickle);
}

TEST_P(StockPickle, IsDecoded) {
  const auto header = decode(GetParam().pickle);
  ASSERT_TRUE(ok(header));
  expect_same(*header, GetParam().header());
}

INSTANTIATE_TEST_SUITE_P(Records, StockPickle, ::testing::ValuesIn(stock_records()),
                         [](const auto& record) { return record.param.name; });

TEST(TensorPickle, SurvivesARoundTrip) {
  Random random(1);
  const std::string_view dtypes[] = {"float32", "bool", "complex128", "uint16", "float8_e8m0fnu"};
  for (int round = 0; round < 5000; ++round) {
    TensorHeader header;
    header.dtype = find_dtype(dtypes[random.between(0, std::size(dtypes) - 1)]);
    header.storage_bytes = random.any_scale(kMax / 16) * header.dtype->item_bytes;
    header.storage_offset = random_integer(random);
    const std::size_t dims = random.any_scale(64);
    for (std::size_t d = 0; d < dims; ++d) {
      header.sizes.push_back(random_integer(random));
      header.strides.push_back(random_integer(random));
    }
    header.conj = random.coin();
    header.neg = random.coin();
    const auto decoded = decode(encode_tensor_pickle(header));
    ASSERT_TRUE(ok(decoded)) << "round " << round;
    expect_same(*decoded, header);
    if (HasFailure()) FAIL() << "round " << round;
  }
}

TEST(TensorPickle, IsRejectedIfTruncatedAnywhere) {
  for (const StockRecord& record : stock_records()) {
    for (std::size_t length = 0; length < record.pickle.size(); ++length) {
      ASSERT_TRUE(fails(decode(record.pickle.substr(0, length)), Errc::pickle_unknown))
          << record.name << " cut to " << length;
    }
  }
}

TEST(TensorPickle, WithAnyByteChangedIsRejectedOrWellFormed) {
  for (const StockRecord& record : stock_records()) {
    for (std::size_t at = 0; at < record.pickle.size(); ++at) {
      std::string damaged(record.pickle);
      for (int change = 1; change < 256; ++change) {
        damaged[at] = static_cast<char>(record.pickle[at] ^ change);
        const auto decoded = decode(damaged);
        if (decoded.has_value()) expect_well_formed(decoded);
        if (::testing::Test::HasFailure()) {
          FAIL() << record.name << ", byte " << at << " changed by " << change;
        }
      }
    }
  }
}

TEST(TensorPickle, OfRandomBytesIsRejected) {
  Random random(2);
  for (int round = 0; round < 5000; ++round) {
    std::string noise(stock("row").pickle.substr(0, random.between(0, 60)));
    noise += random.bytes(random.between(1, 100));
    ASSERT_TRUE(fails(decode(noise), Errc::pickle_unknown)) << "round " << round;
  }
}

TEST(TensorPickle, OfAnotherDeviceIsRejected) {
  const auto moved = replaced(stock("row").pickle, std::string_view("\3\0\0\0cpu", 7),
                              std::string_view("\6\0\0\0cuda:0", 10));
  EXPECT_TRUE(fails(decode(moved), Errc::pickle_unknown));
}

TEST(TensorPickle, WithACallOfAnotherFunctionIsRejected) {
  const auto hostile =
      replaced(stock("row").pickle, "torch._utils\n_rebuild_tensor_v2", "os\nsystem");
  EXPECT_TRUE(fails(decode(hostile), Errc::pickle_unknown));
}

TEST(TensorPickle, OfAnUnknownStorageClassIsRejected) {
  const auto quantized = replaced(stock("row").pickle, "FloatStorage", "QInt8Storage");
  EXPECT_TRUE(fails(decode(quantized), Errc::pickle_unknown));
}

TEST(TensorPickle, OfATensorThatRequiresGradIsRejected) {
  // NEWFALSE before the OrderedDict becomes NEWTRUE.
  const auto grad = replaced(stock("row").pickle,
                             "\x89"
                             "ccollections",
                             "\x88"
                             "ccollections");
  EXPECT_TRUE(fails(decode(grad), Errc::pickle_unknown));
}

TEST(TensorPickle, WithMoreDimensionsThanTorchSupportsIsRejected) {
  TensorHeader header = row_major("float32", std::vector<std::uint64_t>(64, 1));
  EXPECT_TRUE(ok(decode(encode_tensor_pickle(header))));
  header.sizes.push_back(1);
  header.strides.push_back(1);
  EXPECT_TRUE(fails(decode(encode_tensor_pickle(header)), Errc::pickle_unknown));
}

TEST(TensorPickle, WithFewerStridesThanSizesIsRejected) {
  TensorHeader header = row_major("float32", {2, 3});
  header.strides.pop_back();
  EXPECT_TRUE(fails(decode(encode_tensor_pickle(header)), Errc::pickle_unknown));
}

TEST(TensorPickle, WithANegativeStrideIsRejected) {
  // BININT1 1 becomes BININT -1.
  const auto negative = replaced(stock("row").pickle, std::string_view("K\1\x85", 3),
                                 std::string_view("J\xff\xff\xff\xff\x85", 6));
  EXPECT_TRUE(fails(decode(negative), Errc::pickle_unknown));
  // LONG1 of one byte, -1.
  const auto negative_long = replaced(stock("row").pickle, std::string_view("K\1\x85", 3),
                                      std::string_view("\x8a\1\xff\x85", 4));
  EXPECT_TRUE(fails(decode(negative_long), Errc::pickle_unknown));
}

TEST(TensorPickle, WithAStorageSizeThatOverflowsIsRejected) {
  // LONG1 2^62 items of eight bytes.
  const auto huge = replaced(stock("scalar").pickle, std::string_view("K\1t", 3),
                             std::string_view("\x8a\10\0\0\0\0\0\0\0\x40t", 11));
  EXPECT_TRUE(fails(decode(huge), Errc::pickle_unknown));
}

TEST(TensorPickle, WithTheMemoOfAnotherPicklerIsDecoded) {
  // Stock readers ignore the memo, so it may be missing or written with LONG_BINPUT.
  const auto without = replaced(stock("row").pickle, std::string_view("q\5Q", 3), "Q");
  EXPECT_TRUE(ok(decode(without)));
  const auto with_long =
      replaced(stock("row").pickle, std::string_view("q\5Q", 3), std::string_view("r\5\0\0\0Q", 6));
  EXPECT_TRUE(ok(decode(with_long)));
}

TEST(RowMajor, IsTrueForATensorThatOwnsItsStorage) {
  EXPECT_TRUE(row_major("float32", {}).is_plain_row_major());
  EXPECT_TRUE(row_major("float32", {3, 4}).is_plain_row_major());
}

TEST(RowMajor, IgnoresTheStrideOfADimensionOfLengthOne) {
  TensorHeader header = row_major("float32", {3, 1, 4});
  header.strides[1] = 77;
  EXPECT_TRUE(header.is_plain_row_major());
}

TEST(RowMajor, IsFalseForATransposedTensor) {
  TensorHeader header = row_major("float32", {3, 4});
  header.strides = {1, 3};
  EXPECT_FALSE(header.is_plain_row_major());
}

TEST(RowMajor, IsFalseForASliceOfALargerStorage) {
  TensorHeader header = row_major("float32", {3, 4});
  header.storage_bytes += 4;
  EXPECT_FALSE(header.is_plain_row_major());
  header = row_major("float32", {3, 4});
  header.storage_offset = 1;
  EXPECT_FALSE(header.is_plain_row_major());
}

TEST(RowMajor, IsFalseForALazyConjugateOrNegative) {
  TensorHeader header = row_major("complex64", {2});
  header.conj = true;
  EXPECT_FALSE(header.is_plain_row_major());
  header.conj = false;
  header.neg = true;
  EXPECT_FALSE(header.is_plain_row_major());
}

TEST(RowMajor, IsTrueForAnEmptyTensorWithoutStorage) {
  TensorHeader header = row_major("float32", {0, 5});
  EXPECT_TRUE(header.is_plain_row_major());
  header.storage_bytes = 4;
  EXPECT_FALSE(header.is_plain_row_major());
}

TEST(RowMajor, IsFalseForATensorWhoseSizeOverflows) {
  TensorHeader header = row_major("float32", {2, 2});
  header.sizes = {kMax, kMax};
  header.strides = {kMax, 1};
  EXPECT_FALSE(header.is_plain_row_major());
}

}  // namespace
}  // namespace torch_ckpt::format
