#include "index/checkpoint_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "index/metadata_draft.h"
#include "index/metadata_encoder.h"
#include "index/name_table.h"
#include "support.h"

namespace torch_ckpt::index {
namespace {

using test::bytes_of;
using test::ok;

TEST(CheckpointIndex, RejectsAPickleThatIsNotMetadata) {
  const auto index = CheckpointIndex::decode(bytes_of("\x80\x04]."), "here");
  EXPECT_TRUE(test::fails(index, Errc::metadata_inconsistent));
}

TEST(CheckpointIndex, RenamedNeedsOneUniqueNameForEachEntry) {
  MetadataDraft draft;
  for (const char* name : {"a", "b"}) {
    draft.add_object(name, {});
    draft.add_shard({}, {});
  }
  MetadataEncoder encoder(draft);
  const EncodedMetadata metadata = encoder.encode({});
  std::string encoded;
  for (const std::string_view piece : metadata.pieces()) encoded += piece;
  const auto index = CheckpointIndex::decode(bytes_of(encoded), "here");
  ASSERT_TRUE(ok(index));
  const std::vector<std::vector<std::string>> refused = {{}, {"x"}, {"x", "y", "z"}, {"x", "x"}};
  for (const auto& names : refused) {
    EXPECT_TRUE(test::fails(index->renamed(names), Errc::invalid_argument));
  }
  const auto renamed = index->renamed(std::vector<std::string>{"x", "y"});
  ASSERT_TRUE(ok(renamed));
  EXPECT_EQ(renamed->find("y"), 1u);
  EXPECT_EQ(renamed->find("b"), std::nullopt);
  EXPECT_EQ(index->find("b"), 1u);
}

TEST(NameTable, GivesEachNameOneNumber) {
  NameTable table;
  for (int round = 0; round < 2; ++round) {
    for (std::uint32_t i = 0; i < 5000; ++i) {
      const auto [number, is_new] = table.add("name." + std::to_string(i));
      ASSERT_EQ(number, i);
      ASSERT_EQ(is_new, round == 0);
    }
  }
  EXPECT_EQ(table.size(), 5000u);
  EXPECT_EQ(table.at(4321), "name.4321");
  EXPECT_EQ(table.find("name.4321"), 4321u);
  EXPECT_EQ(table.find("name.5000"), std::nullopt);
  EXPECT_EQ(NameTable().find("name"), std::nullopt);
}

TEST(NameTable, DistinguishesNamesWithACommonPrefix) {
  NameTable table;
  std::string name;
  for (std::uint32_t i = 0; i < 100; ++i, name += '\0') {
    ASSERT_EQ(table.add(name).first, i);
  }
}

TEST(ExtentsTable, GivesEqualExtentsOneId) {
  ExtentsTable table;
  std::vector<std::vector<std::int64_t>> added;
  for (std::int64_t i = 0; i < 300; ++i) {
    added.push_back(std::vector<std::int64_t>(static_cast<std::size_t>(i % 5), i));
  }
  std::vector<std::uint32_t> ids;
  for (const auto& extents : added) ids.push_back(table.intern(extents));
  for (std::size_t i = 0; i < added.size(); ++i) {
    EXPECT_EQ(table.intern(added[i]), ids[i]);
    EXPECT_TRUE(std::ranges::equal(table.at(ids[i]), added[i]));
  }
  // All empty lists have the same id.
  EXPECT_EQ(table.size(), 241u);
}

}  // namespace
}  // namespace torch_ckpt::index
