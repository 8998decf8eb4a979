#include "engine/save_plan.h"

#include <gtest/gtest.h>

#include "support.h"

namespace torch_ckpt::engine {
namespace {

using test::fails;
using test::ok;
using test::row_major;

using Names = std::vector<std::string>;

SaveItem tensor(std::string name, std::uint64_t bytes) {
  SaveItem item;
  item.name = std::move(name);
  item.source.bytes = bytes;
  item.tensor = row_major("uint8", {bytes});
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

TEST(SavePlan, NamesFilesByRankAndNumber) {
  const auto plan = plan_save({tensor("a", 5), tensor("b", 4)}, naming(2));
  ASSERT_TRUE(ok(plan));
  EXPECT_EQ(plan->file_names, (Names{"__3_0.distcp", "__3_1.distcp"}));
  EXPECT_EQ(plan->files[1].name, "__3_1.distcp");
}

TEST(SavePlan, SaysWhereEachItemWent) {
  const auto plan = plan_save({tensor("a", 10), raw("b", 1), tensor("c", 30)}, naming(2));
  ASSERT_TRUE(ok(plan));
  ASSERT_EQ(plan->places.size(), 3);
  for (std::size_t i = 0; i < 3; ++i) {
    const ImageItem& item = plan->files[plan->places[i].file].image.items()[plan->places[i].index];
    constexpr std::uint64_t kBytes[] = {10, 1, 30};
    EXPECT_EQ(item.source.bytes, kBytes[i]);
    EXPECT_EQ(item.record != nullptr, i != 1);
  }
  EXPECT_NE(plan->places[0].file, plan->places[2].file);
}

TEST(SavePlan, PutsBytesBeforeTensors) {
  const auto plan = plan_save({tensor("a", 10), raw("b", 1)}, naming(1));
  ASSERT_TRUE(ok(plan));
  EXPECT_EQ(plan->places[1].index, 0);
  EXPECT_EQ(plan->places[0].index, 1);
}

TEST(SavePlan, MakesNoFileForAnEmptyBucket) {
  const auto plan = plan_save({tensor("a", 5)}, naming(4));
  ASSERT_TRUE(ok(plan));
  EXPECT_EQ(plan->file_names, Names{"__3_0.distcp"});
}

TEST(SavePlan, OfNothingMakesNoFiles) {
  const auto plan = plan_save({}, naming(4));
  ASSERT_TRUE(ok(plan));
  EXPECT_TRUE(plan->files.empty());
}

TEST(SavePlan, GivesEachItemItsOwnFileWhereThatIsWanted) {
  NamingOptions options = naming(1);
  options.file_per_item = true;
  const auto plan = plan_save({tensor("a", 5), raw("b", 5), tensor("c", 0)}, options);
  ASSERT_TRUE(ok(plan));
  EXPECT_EQ(plan->file_names, (Names{"__3_0.distcp", "__3_1.distcp", "__3_2.distcp"}));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(plan->places[i].file, i);
    EXPECT_EQ(plan->files[i].image.items().size(), 1);
  }
}

TEST(SavePlan, PutsTheSeparationHintBeforeTheNamesOfItsFiles) {
  NamingOptions options = naming(2);
  options.separation_hint = "optim";
  const auto plan = plan_save({tensor("optim.a", 5), tensor("model.a", 5)}, options);
  ASSERT_TRUE(ok(plan));
  EXPECT_EQ(plan->file_names, (Names{"__3_0.distcp", "optim__3_1.distcp"}));
  EXPECT_EQ(plan->places[0].file, 1);
  EXPECT_EQ(plan->places[1].file, 0);
}

TEST(SavePlan, PutsTheSeparationHintBeforeTheNamesOfFilesOfOneItemToo) {
  NamingOptions options = naming(2);
  options.file_per_item = true;
  options.separation_hint = "optim";
  const auto plan =
      plan_save({tensor("optim.a", 5), tensor("model.a", 5), raw("optim.b", 5)}, options);
  ASSERT_TRUE(ok(plan));
  EXPECT_EQ(plan->file_names, (Names{"__3_0.distcp", "optim__3_1.distcp", "optim__3_2.distcp"}));
  EXPECT_EQ(plan->places[0].file, 1);
  EXPECT_EQ(plan->places[1].file, 0);
  EXPECT_EQ(plan->places[2].file, 2);
}

TEST(SavePlan, WithAHintAndOneFileIsRefused) {
  NamingOptions options = naming(1);
  options.separation_hint = "optim";
  EXPECT_TRUE(fails(plan_save({tensor("optim.a", 5)}, options), Errc::invalid_argument));
}

TEST(SavePlan, BalancesWhatIsWrittenAndNotTheCountOfItems) {
  std::vector<SaveItem> items;
  items.push_back(tensor("large", 1'000'000));
  for (int i = 0; i < 10; ++i) items.push_back(tensor("small", 1000));
  const auto plan = plan_save(std::move(items), naming(2));
  ASSERT_TRUE(ok(plan));
  EXPECT_EQ(plan->files[0].image.items().size(), 1);
  EXPECT_EQ(plan->files[1].image.items().size(), 10);
}

}  // namespace
}  // namespace torch_ckpt::engine
