#include "engine/save_layout.h"

#include <gtest/gtest.h>

#include "support.h"

namespace torch_ckpt::engine {
namespace {

using namespace test;

using Names = std::vector<std::string>;

SaveItem tensor(std::string name, std::uint64_t bytes) {
  SaveItem item;
  item.name = std::move(name);
  item.source.bytes = bytes;
  item.tensor = std::make_shared<const format::TensorHeader>(row_major("uint8", {bytes}));
  return item;
}

SaveItem raw(std::string name, std::uint64_t bytes) {
  SaveItem item;
  item.name = std::move(name);
  item.source.bytes = bytes;
  return item;
}

NamingOptions naming(std::size_t buckets) {
  NamingOptions options;
  options.prefix = "__3_";
  options.buckets = {buckets};
  return options;
}

TEST(SaveLayout, NamesFilesByRankAndNumber) {
  const auto layout = lay_out_save({tensor("a", 5), tensor("b", 4)}, naming(2));
  ASSERT_TRUE(ok(layout));
  EXPECT_EQ(layout->file_names, (Names{"__3_0.distcp", "__3_1.distcp"}));
  EXPECT_EQ(layout->files[1].name, "__3_1.distcp");
}

TEST(SaveLayout, ReturnsTheLocationOfEachItem) {
  const auto layout = lay_out_save({tensor("a", 10), raw("b", 1), tensor("c", 30)}, naming(2));
  ASSERT_TRUE(ok(layout));
  ASSERT_EQ(layout->locations.size(), 3);
  for (std::size_t i = 0; i < 3; ++i) {
    const ImageItem& item =
        layout->files[layout->locations[i].file].image.items()[layout->locations[i].index];
    constexpr std::uint64_t kBytes[] = {10, 1, 30};
    EXPECT_EQ(item.source.bytes, kBytes[i]);
    EXPECT_EQ(item.record != nullptr, i != 1);
  }
  EXPECT_NE(layout->locations[0].file, layout->locations[2].file);
}

TEST(SaveLayout, PutsBytesBeforeTensors) {
  const auto layout = lay_out_save({tensor("a", 10), raw("b", 1)}, naming(1));
  ASSERT_TRUE(ok(layout));
  EXPECT_EQ(layout->locations[1].index, 0);
  EXPECT_EQ(layout->locations[0].index, 1);
}

TEST(SaveLayout, HasNoFileForAnEmptyBucket) {
  const auto layout = lay_out_save({tensor("a", 5)}, naming(4));
  ASSERT_TRUE(ok(layout));
  EXPECT_EQ(layout->file_names, Names{"__3_0.distcp"});
}

TEST(SaveLayout, WithoutItemsHasNoFiles) {
  const auto layout = lay_out_save({}, naming(4));
  ASSERT_TRUE(ok(layout));
  EXPECT_TRUE(layout->files.empty());
}

TEST(SaveLayout, HasOneFileForEachItemIfRequested) {
  NamingOptions options = naming(1);
  options.file_per_item = true;
  const auto layout = lay_out_save({tensor("a", 5), raw("b", 5), tensor("c", 0)}, options);
  ASSERT_TRUE(ok(layout));
  EXPECT_EQ(layout->file_names, (Names{"__3_0.distcp", "__3_1.distcp", "__3_2.distcp"}));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(layout->locations[i].file, i);
    EXPECT_EQ(layout->files[i].image.items().size(), 1);
  }
}

TEST(SaveLayout, PrefixesFileNamesWithTheSeparationHint) {
  NamingOptions options = naming(2);
  options.separation_hint = "optim";
  const auto layout = lay_out_save({tensor("optim.a", 5), tensor("model.a", 5)}, options);
  ASSERT_TRUE(ok(layout));
  EXPECT_EQ(layout->file_names, (Names{"__3_0.distcp", "optim__3_1.distcp"}));
  EXPECT_EQ(layout->locations[0].file, 1);
  EXPECT_EQ(layout->locations[1].file, 0);
}

TEST(SaveLayout, PrefixesNamesOfFilesOfOneItemWithTheSeparationHintToo) {
  NamingOptions options = naming(2);
  options.file_per_item = true;
  options.separation_hint = "optim";
  const auto layout =
      lay_out_save({tensor("optim.a", 5), tensor("model.a", 5), raw("optim.b", 5)}, options);
  ASSERT_TRUE(ok(layout));
  EXPECT_EQ(layout->file_names, (Names{"__3_0.distcp", "optim__3_1.distcp", "optim__3_2.distcp"}));
  EXPECT_EQ(layout->locations[0].file, 1);
  EXPECT_EQ(layout->locations[1].file, 0);
  EXPECT_EQ(layout->locations[2].file, 2);
}

TEST(SaveLayout, RejectsASeparationHintWithOneFile) {
  NamingOptions options = naming(1);
  options.separation_hint = "optim";
  EXPECT_TRUE(fails(lay_out_save({tensor("optim.a", 5)}, options), Errc::invalid_argument));
}

TEST(SaveLayout, BalancesBytesAndNotTheNumberOfItems) {
  std::vector<SaveItem> items;
  items.push_back(tensor("large", 1'000'000));
  for (int i = 0; i < 10; ++i) items.push_back(tensor("small", 1000));
  const auto layout = lay_out_save(std::move(items), naming(2));
  ASSERT_TRUE(ok(layout));
  EXPECT_EQ(layout->files[0].image.items().size(), 1);
  EXPECT_EQ(layout->files[1].image.items().size(), 10);
}

}  // namespace
}  // namespace torch_ckpt::engine
