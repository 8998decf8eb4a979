// Headers of safetensors files, and indexes of several files. tests/python/loading/
// test_safetensors.py compares them with the safetensors library.

#include "format/safetensors.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "format/little_endian.h"
#include "format/weight_map.h"
#include "support.h"

namespace torch_ckpt::format {
namespace {

using namespace test;
using Sizes = std::vector<std::uint64_t>;

SafeTensor tensor(std::string name, std::string_view dtype, Sizes sizes) {
  SafeTensor made;
  made.name = std::move(name);
  made.dtype = find_dtype(dtype);
  made.sizes = std::move(sizes);
  return made;
}

/// Decodes a header with `data_bytes` bytes of data behind it.
Result<SafetensorsHeader> decoded(std::string_view json, std::uint64_t data_bytes) {
  return decode_safetensors_header(json, kSafeLengthBytes + json.size() + data_bytes);
}

std::string entry(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return "{\"dtype\":\"" + std::string(dtype) + "\",\"shape\":" + std::string(shape) +
         ",\"data_offsets\":" + std::string(offsets) + "}";
}

TEST(SafetensorsHeader, IsDecodedAsItWasEncoded) {
  std::vector<SafeTensor> tensors{tensor("float", "bfloat16", {2, 3}), tensor("", "bool", {}),
                                  tensor("packed", "float4_e2m1fn_x2", {3, 2}),
                                  tensor("\"\\\n\x01 \xc3\xa9", "int64", {0, 1u << 30})};
  const SafeMetadata metadata{{"format", "pt"}, {"\t", "\x7f"}};
  for (const std::size_t alignment : {8, 4096}) {
    const auto encoded = encode_safetensors_header(tensors, metadata, alignment);
    ASSERT_TRUE(ok(encoded));
    EXPECT_EQ(encoded->size() % alignment, 0);
    const auto bytes = bytes_of(*encoded);
    const std::uint64_t file_bytes = encoded->size() + 12 + 1 + 6;
    const auto length = safetensors_header_bytes(bytes, file_bytes);
    ASSERT_TRUE(ok(length));
    ASSERT_EQ(*length, encoded->size() - kSafeLengthBytes);
    const auto header =
        decode_safetensors_header(std::string_view(*encoded).substr(kSafeLengthBytes), file_bytes);
    ASSERT_TRUE(ok(header));
    EXPECT_EQ(header->metadata, metadata);
    ASSERT_EQ(header->tensors.size(), tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_EQ(header->tensors[i].name, tensors[i].name);
      EXPECT_EQ(header->tensors[i].dtype, tensors[i].dtype);
      EXPECT_EQ(header->tensors[i].sizes, tensors[i].sizes);
      EXPECT_EQ(header->tensors[i].begin, tensors[i].begin);
      EXPECT_EQ(header->tensors[i].bytes, tensors[i].bytes);
    }
    EXPECT_EQ(tensors.front().begin, encoded->size());
  }
}

TEST(SafetensorsHeader, IsNotEncodedIfReadersWouldRefuseIt) {
  std::vector<SafeTensor> tensors{tensor(std::string(kMaxSafeHeaderBytes, 'n'), "uint8", {1})};
  EXPECT_TRUE(fails(encode_safetensors_header(tensors, {}, 8), Errc::unsavable));
}

TEST(SafetensorsHeader, TensorsAreInTheOrderOfTheirData) {
  const auto header = decoded(
      "{\"b\":" + entry("U8", "[2]", "[4,6]") + ",\"a\":" + entry("F32", "[]", "[0,4]") + "}  ", 6);
  ASSERT_TRUE(ok(header));
  ASSERT_EQ(header->tensors.size(), 2);
  EXPECT_EQ(header->tensors[0].name, "a");
  EXPECT_EQ(header->tensors[1].name, "b");
}

TEST(SafetensorsHeader, UnknownFieldsAreIgnored) {
  const auto header = decoded(
      R"({"a":{"x":[[1],{"shape":[7]}],"dtype":"U8","y":null,"shape":[1],"data_offsets":[0,1]}})",
      1);
  ASSERT_TRUE(ok(header));
  EXPECT_EQ(header->tensors[0].sizes, Sizes{1});
}

TEST(SafetensorsHeader, IsRefusedIfTheLengthExceedsTheFileOrTheLimit) {
  const auto length = [](std::uint64_t header, std::uint64_t file, std::size_t bytes = 8) {
    std::string begin;
    put(begin, header, kSafeLengthBytes);
    return safetensors_header_bytes(bytes_of(begin.substr(0, bytes)), file);
  };
  EXPECT_TRUE(ok(length(2, 10)));
  EXPECT_TRUE(fails(length(3, 10), Errc::metadata_inconsistent));
  EXPECT_TRUE(fails(length(0, 7, 7), Errc::metadata_inconsistent));
  EXPECT_TRUE(fails(length(~std::uint64_t{0}, 10), Errc::metadata_inconsistent));
  EXPECT_TRUE(
      fails(length(kMaxSafeHeaderBytes + 1, ~std::uint64_t{0}), Errc::metadata_inconsistent));
}

TEST(SafetensorsHeader, IsRefusedIfItIsNotValid) {
  const std::string one = entry("U8", "[1]", "[0,1]");
  const std::string deep(40, '[');
  const std::vector<std::string> headers{
      "",
      "[]",
      "1",
      "{",
      "{}x",
      " {}",
      "{\"a\":7}",
      "{\"a\":[]}",
      "{\"a\":{}}",
      "{\"a\":" + one,
      "{\"a\":" + one + ",\"a\":" + one + "}",
      "{\"a\":" + entry("U9", "[1]", "[0,1]") + "}",
      "{\"a\":" + entry("U8", "[2]", "[0,1]") + "}",
      "{\"a\":" + entry("U8", "[-1]", "[0,1]") + "}",
      "{\"a\":" + entry("U8", "[1.0]", "[0,1]") + "}",
      "{\"a\":" + entry("U8", "[true]", "[0,1]") + "}",
      "{\"a\":" + entry("U8", "[[1]]", "[0,1]") + "}",
      "{\"a\":" + entry("U8", "[{}]", "[0,1]") + "}",
      "{\"a\":" + entry("U8", "{}", "[0,1]") + "}",
      "{\"a\":" + entry("U8", "[18446744073709551616]", "[0,1]") + "}",
      "{\"a\":" + entry("U8", "[4294967296,4294967296,4294967296]", "[0,1]") + "}",
      "{\"a\":" + entry("U8", "[9223372036854775808,2,1]", "[0,1]") + "}",
      "{\"a\":" + entry("U8", "[1]", "[1,0]") + "}",
      "{\"a\":" + entry("U8", "[1]", "[0]") + "}",
      "{\"a\":" + entry("U8", "[1]", "[0,1,1]") + "}",
      "{\"a\":" + entry("U8", "[2]", "[0,2]") + "}",
      "{\"a\":" + entry("F4", "[1]", "[0,1]") + "}",
      "{\"a\":" + entry("F4", "[]", "[0,1]") + "}",
      "{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,1]}}",
      "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
      "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,1]}}",
      "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}",
      "{\"a\":{\"x\":" + deep + std::string(40, ']') + "," + one.substr(1) + "}",
      "{\"\xff\":" + one + "}",
      "{\"\xed\xa0\x80\":" + one + "}",
      "{\"\\ud800\":" + one + "}",
      "{\"a\":" + one + ",\"__metadata__\":{\"k\":1}}",
      "{\"a\":" + one + ",\"__metadata__\":{\"k\":{}}}",
      "{\"a\":" + one + ",\"__metadata__\":[]}",
      "{\"a\":" + one + ",\"__metadata__\":{\"k\":\"\",\"k\":\"\"}}",
      "{\"a\":" + one + ",\"__metadata__\":{\"k\":\"\"},\"__metadata__\":{\"l\":\"\"}}",
  };
  ASSERT_TRUE(ok(decoded("{\"a\":" + one + "}", 1)));
  for (const std::string& header : headers) {
    EXPECT_TRUE(fails(decoded(header, 1), Errc::metadata_inconsistent)) << header;
  }
}

TEST(SafetensorsHeader, IsRefusedUnlessTheTensorsFillTheFile) {
  const auto with = [](std::string_view a, std::string_view b, std::uint64_t data_bytes) {
    return decoded("{\"a\":" + entry("U8", "[2]", a) + ",\"b\":" + entry("U8", "[2]", b) + "}",
                   data_bytes);
  };
  EXPECT_TRUE(ok(with("[2,4]", "[0,2]", 4)));
  EXPECT_TRUE(fails(with("[0,2]", "[1,3]", 4), Errc::metadata_inconsistent));
  EXPECT_TRUE(fails(with("[0,2]", "[3,5]", 5), Errc::metadata_inconsistent));
  EXPECT_TRUE(fails(with("[0,2]", "[2,4]", 5), Errc::metadata_inconsistent));
  EXPECT_TRUE(fails(with("[0,2]", "[2,4]", 3), Errc::metadata_inconsistent));
  EXPECT_TRUE(fails(with("[1,3]", "[3,5]", 5), Errc::metadata_inconsistent));
}

TEST(SafetensorsHeader, IsDecodedOrRefusedIfAnyByteIsChanged) {
  const std::string json =
      "{\"__metadata__\":{\"k\":\"v\"},\"a\":" + entry("F16", "[1,2]", "[0,4]") +
      ",\"b\":" + entry("U8", "[]", "[4,5]") + "}";
  for (std::size_t at = 0; at < json.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string changed = json;
      changed[at] = static_cast<char>(value);
      const auto header = decoded(changed, 5);
      if (!header) {
        ASSERT_EQ(header.error().code, Errc::metadata_inconsistent);
        continue;
      }
      std::uint64_t bytes = 0;
      for (const SafeTensor& found : header->tensors) bytes += found.bytes;
      ASSERT_EQ(bytes, 5);
    }
  }
}

TEST(RequireSafe, RefusesWhatTheFormatCannotHold) {
  const Dtype* const byte = find_dtype("uint8");
  EXPECT_TRUE(ok(require_safe("\xc3\xa9", byte, Sizes(kMaxSafeDimensions, 1))));
  EXPECT_TRUE(fails(require_safe("a", byte, Sizes(kMaxSafeDimensions + 1, 1)), Errc::unsavable));
  EXPECT_TRUE(fails(require_safe("\xed\xa0\x80", byte, {}), Errc::unsavable));
  EXPECT_TRUE(fails(require_safe("__metadata__", byte, {}), Errc::unsavable));
  EXPECT_TRUE(fails(require_safe("a", nullptr, {}), Errc::unsavable));
  EXPECT_TRUE(fails(require_safe("a", find_dtype("complex128"), {}), Errc::unsavable));
  const Dtype* const packed = find_dtype("float4_e2m1fn_x2");
  EXPECT_TRUE(ok(require_safe("a", packed, Sizes{1})));
  EXPECT_TRUE(fails(require_safe("a", packed, {}), Errc::unsavable));
}

TEST(WeightMap, NamesTheFileOfEachTensor) {
  const auto map = decode_weight_map(
      R"({"metadata":{"total_size":7,"weight_map":{"x":1}},"weight_map":{"b":"2","a":"1"},"x":[]})");
  ASSERT_TRUE(ok(map));
  EXPECT_EQ(*map, (WeightMap{{"b", "2"}, {"a", "1"}}));
}

TEST(WeightMap, IsRefusedIfItIsNotValid) {
  for (const std::string_view text :
       {"", "[]", "{}", "{\"weight_map\":\"a\"}", "{\"weight_map\":[]}",
        "{\"weight_map\":{\"a\":1}}", "{\"weight_map\":{\"a\":[]}}",
        "{\"weight_map\":{\"a\":{\"b\":\"c\"}}}", "{\"weight_map\":{},\"weight_map\":{}}",
        "{\"weight_map\":{}", "{\"weight_map\":{}}x", "{\"weight_map\":{\"\\ud800\":\"a\"}}"}) {
    EXPECT_TRUE(fails(decode_weight_map(text), Errc::metadata_inconsistent)) << text;
  }
}

}  // namespace
}  // namespace torch_ckpt::format
