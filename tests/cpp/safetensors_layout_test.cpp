#include "planning/safetensors_layout.h"

#include <gtest/gtest.h>

#include "format/checksum_table.h"
#include "format/part_sums.h"
#include "support.h"

namespace torch_ckpt::planning {
namespace {

using namespace test;
using format::SafeTensor;

SafeTensor tensor(std::string name, std::string_view dtype, std::vector<std::uint64_t> sizes) {
  return {std::move(name), format::find_dtype(dtype), std::move(sizes), 0, 0};
}

std::vector<SafeTensor> tensors_of(const SafetensorsLayout::File& file) {
  const auto json = std::string_view(file.header).substr(format::kSafeLengthBytes);
  return format::decode_safetensors_header(json, file.bytes).value().tensors;
}

TEST(SafetensorsLayout, OfOneFileHasNoIndex) {
  const auto layout = SafetensorsLayout::of({tensor("a", "float32", {3})}, {}).value();
  ASSERT_EQ(layout.files().size(), 1);
  EXPECT_EQ(layout.files()[0].name, "model.safetensors");
  EXPECT_EQ(layout.index(), "");
}

TEST(SafetensorsLayout, WithATagHasAnIndexOfOneFile) {
  SafetensorsLayout::Options options;
  options.tag = "0123abcd";
  const auto layout = SafetensorsLayout::of({tensor("a", "float32", {3})}, options).value();
  EXPECT_EQ(layout.files()[0].name, "model-0123abcd-00001-of-00001.safetensors");
  EXPECT_NE(layout.index().find("\"a\": \"model-0123abcd-00001-of-00001.safetensors\""),
            std::string::npos);
}

TEST(SafetensorsLayout, PlacesTensorsWhereTheHeadersSayThatTheyAre) {
  const std::vector<SafeTensor> given = {
      tensor("b", "bfloat16", {5}), tensor("a", "float64", {2, 2}), tensor("c", "uint8", {}),
      tensor("empty", "float32", {0, 7}), tensor("a2", "float64", {1})};
  const auto layout = SafetensorsLayout::of(given, {.max_shard_bytes = 40}).value();
  ASSERT_EQ(layout.places().size(), given.size());
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto& [file, begin] = layout.places()[i];
    bool is_found = false;
    for (const SafeTensor& found : tensors_of(layout.files()[file])) {
      if (found.name != given[i].name) continue;
      is_found = true;
      EXPECT_EQ(found.begin, begin);
      EXPECT_EQ(found.dtype, given[i].dtype);
      EXPECT_EQ(found.sizes, given[i].sizes);
    }
    EXPECT_TRUE(is_found) << given[i].name;
  }
}

TEST(SafetensorsLayout, KeepsTheSizesOfFilesWithinTheLimit) {
  const auto layout = SafetensorsLayout::of({tensor("a", "uint8", {60}), tensor("b", "uint8", {40}),
                                             tensor("c", "uint8", {1}), tensor("d", "uint8", {500}),
                                             tensor("e", "uint8", {100})},
                                            {.max_shard_bytes = 100})
                          .value();
  ASSERT_EQ(layout.files().size(), 4);
  EXPECT_EQ(layout.files()[0].name, "model-00001-of-00004.safetensors");
  EXPECT_EQ(layout.files()[3].name, "model-00004-of-00004.safetensors");
  EXPECT_EQ(tensors_of(layout.files()[0]).size(), 2);
  EXPECT_EQ(tensors_of(layout.files()[1]).size(), 1);
  EXPECT_EQ(tensors_of(layout.files()[2])[0].name, "d");
  EXPECT_EQ(tensors_of(layout.files()[3])[0].name, "e");
  EXPECT_EQ(layout.index(), R"({
  "metadata": {
    "total_size": 701
  },
  "weight_map": {
    "a": "model-00001-of-00004.safetensors",
    "b": "model-00001-of-00004.safetensors",
    "c": "model-00002-of-00004.safetensors",
    "d": "model-00003-of-00004.safetensors",
    "e": "model-00004-of-00004.safetensors"
  }
}
)");
}

TEST(SafetensorsLayout, BeginsTheDataAtAPageWithTheWidestElementsFirst) {
  const auto layout =
      SafetensorsLayout::of({tensor("n", "uint8", {3}), tensor("w", "int64", {1}),
                             tensor("m", "uint8", {3}), tensor("h", "float16", {1})},
                            {})
          .value();
  std::vector<std::string> names;
  for (const SafeTensor& found : tensors_of(layout.files()[0])) names.push_back(found.name);
  EXPECT_EQ(names, (std::vector<std::string>{"w", "h", "m", "n"}));
  EXPECT_EQ(layout.files()[0].header.size() % 4096, 0);
}

TEST(SafetensorsLayout, OfNothingIsAnEmptyFile) {
  const auto layout = SafetensorsLayout::of({}, {.max_shard_bytes = 1}).value();
  ASSERT_EQ(layout.files().size(), 1);
  EXPECT_TRUE(tensors_of(layout.files()[0]).empty());
}

TEST(SafetensorsLayout, RefusesWhatTheFormatCannotHold) {
  const auto refused = [](std::vector<SafeTensor> tensors) {
    return fails(SafetensorsLayout::of(std::move(tensors), {}), Errc::unsavable);
  };
  EXPECT_TRUE(refused({tensor("a", "complex128", {1})}));
  EXPECT_TRUE(refused({tensor("a", "unheard of", {1})}));
  EXPECT_TRUE(refused({tensor("__metadata__", "uint8", {1})}));
  EXPECT_TRUE(refused({tensor("\xff", "uint8", {1})}));
  EXPECT_TRUE(refused({tensor("a", "uint8", std::vector<std::uint64_t>(65, 1))}));
  EXPECT_TRUE(refused({tensor("a", "uint8", {1}), tensor("a", "uint8", {2})}));
}

/// Encodes a part of `bytes` bytes of a tensor.
std::string part_of(const SafetensorsLayout::Place& place, std::uint64_t tensor_bytes,
                    std::uint64_t bytes) {
  return format::encode_part_sums(
      std::vector<format::PartSums>{{place.begin, tensor_bytes, bytes, 0, {1}}});
}

TEST(SafetensorsLayout, JoinsThePartsOfAllRanksToATableOfEachFile) {
  const auto layout =
      SafetensorsLayout::of({tensor("a", "uint8", {4}), tensor("b", "uint8", {0})}, {}).value();
  const std::string first = part_of(layout.places()[0], 4, 3);
  const std::string second = part_of(layout.places()[0], 4, 1);
  const std::vector<SafetensorsLayout::WrittenParts> written = {{"model.safetensors", first},
                                                                {"model.safetensors", second}};
  const auto tables = layout.checksum_tables(written).value();
  ASSERT_EQ(tables.size(), 1);
  EXPECT_EQ(format::ChecksumTable::decode(bytes_of(tables[0])).value().size(), 1);
}

TEST(SafetensorsLayout, NamesATensorThatTheRanksHaveNotWrittenExactlyOnce) {
  const auto layout = SafetensorsLayout::of({tensor("a", "uint8", {4})}, {}).value();
  for (const std::uint64_t bytes : {3, 5}) {
    const std::string part = part_of(layout.places()[0], 4, bytes);
    const std::vector<SafetensorsLayout::WrittenParts> written = {{"model.safetensors", part}};
    const auto tables = layout.checksum_tables(written);
    ASSERT_TRUE(fails(tables, Errc::internal));
    EXPECT_EQ(tables.error().subject.str(), "a");
  }
  EXPECT_TRUE(fails(layout.checksum_tables({}), Errc::internal));
}

TEST(StoredDtype, IsTheGivenOneForFloatingPointOnly) {
  const auto* const half = format::find_dtype("bfloat16");
  EXPECT_EQ(stored_dtype(format::find_dtype("float32"), half), half);
  EXPECT_EQ(stored_dtype(format::find_dtype("float8_e4m3fn"), half), half);
  for (const char* other : {"int64", "bool", "complex64", "float4_e2m1fn_x2"}) {
    EXPECT_EQ(stored_dtype(format::find_dtype(other), half), format::find_dtype(other)) << other;
  }
  EXPECT_EQ(stored_dtype(format::find_dtype("float32"), nullptr), format::find_dtype("float32"));
}

RankPlaces some_places() {
  RankPlaces places;
  places.are_packed = true;
  places.files = {{"one", 100, "head"}, {"two", std::uint64_t{1} << 40}};
  places.places = {{1, 4096}, {0, 7}};
  return places;
}

TEST(RankPlaces, SurviveTheirEncoding) {
  const auto decoded = RankPlaces::decode(some_places().encode()).value();
  EXPECT_EQ(decoded.encode(), some_places().encode());
  ASSERT_EQ(decoded.files.size(), 2);
  EXPECT_TRUE(decoded.are_packed);
  EXPECT_EQ(decoded.files[0].head, "head");
  EXPECT_EQ(decoded.files[1].name, "two");
  EXPECT_EQ(decoded.files[1].bytes, std::uint64_t{1} << 40);
  EXPECT_EQ(decoded.places[0].begin, 4096);
}

TEST(RankPlaces, ThatAreIncompleteOrNameNoFileAreRefused) {
  const std::string encoded = some_places().encode();
  for (std::size_t bytes = 0; bytes < encoded.size(); ++bytes) {
    EXPECT_TRUE(fails(RankPlaces::decode(encoded.substr(0, bytes)), Errc::frame_damaged));
  }
  EXPECT_TRUE(fails(RankPlaces::decode(encoded + "x"), Errc::frame_damaged));
  RankPlaces outside = some_places();
  outside.places[0].file = 2;
  EXPECT_TRUE(fails(RankPlaces::decode(outside.encode()), Errc::frame_damaged));
}

}  // namespace
}  // namespace torch_ckpt::planning
