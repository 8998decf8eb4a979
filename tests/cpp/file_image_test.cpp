#include "engine/file_image.h"

#include <gtest/gtest.h>

#include "support.h"

namespace torch_ckpt::engine {
namespace {

using test::host_source;
using test::row_major;

TEST(FileImage, WithoutItemsHasNoBytes) {
  FileImage image;
  EXPECT_EQ(image.bytes(), 0);
  EXPECT_TRUE(image.items().empty());
  EXPECT_EQ(image.device(), staging::Source::kHost);
}

TEST(FileImage, PlacesItemsBackToBack) {
  const std::string payload(100, 'x');
  FileImage image;
  image.add_bytes(host_source(payload));
  image.add_tensor(row_major("uint8", {100}), host_source(payload));
  image.add_bytes(host_source(""));
  image.add_tensor(row_major("uint8", {100}), host_source(payload));
  const std::uint64_t record = test::byte_record(payload).size();
  ASSERT_EQ(image.items().size(), 4);
  EXPECT_EQ(image.items()[0].offset, 0);
  EXPECT_EQ(image.items()[0].bytes, 100);
  EXPECT_EQ(image.items()[1].offset, 100);
  EXPECT_EQ(image.items()[1].bytes, record);
  EXPECT_EQ(image.items()[2].offset, 100 + record);
  EXPECT_EQ(image.items()[2].bytes, 0);
  EXPECT_EQ(image.items()[3].offset, 100 + record);
  EXPECT_EQ(image.bytes(), 100 + 2 * record);
}

PartPlace bytes_at(std::uint64_t offset, std::uint64_t bytes) {
  const std::vector<std::uint64_t> size = {bytes};
  const std::vector<std::uint64_t> zero = {0};
  return {.tensor = offset, .runs = planning::BoxRuns::of(size, zero, size, 1).value()};
}

TEST(FileImage, OfPartsForAStoreHasTheOffsetsOfTheFile) {
  const std::string payload(100, 'x');
  FileImage image;
  image.pack(std::string(4096, 'h'));
  image.add_part(host_source(payload), bytes_at(4096, 100));
  image.add_part(host_source(payload), bytes_at(4196, 100));
  EXPECT_TRUE(image.is_of_parts());
  EXPECT_EQ(image.items()[0].offset, 4096);
  EXPECT_EQ(image.items()[1].offset, 4196);
  EXPECT_EQ(image.bytes(), 4296);
}

TEST(FileImage, SharesATemplateBetweenTensorsOfOneShape) {
  const std::string payload(100, 'x');
  FileImage image;
  for (int i = 0; i < 3; ++i) image.add_tensor(row_major("uint8", {100}), host_source(payload));
  EXPECT_EQ(image.items()[0].record, image.items()[2].record);
}

TEST(FileImage, SharesNoTemplateBetweenTwoShapesOfOneSize) {
  const std::string payload(100, 'x');
  FileImage image;
  image.add_tensor(row_major("uint8", {100}), host_source(payload));
  image.add_tensor(row_major("uint8", {10, 10}), host_source(payload));
  image.add_tensor(row_major("int8", {10, 10}), host_source(payload));
  EXPECT_NE(image.items()[0].record, image.items()[1].record);
  EXPECT_NE(image.items()[1].record, image.items()[2].record);
}

TEST(FileImage, ReportsTheDeviceOfItsSources) {
  FileImage image;
  staging::Source source;
  source.bytes = 100;
  source.device = 0;
  image.add_tensor(row_major("uint8", {100}), source);
  image.add_bytes(host_source("x"));
  EXPECT_EQ(image.device(), 0);
}

}  // namespace
}  // namespace torch_ckpt::engine
