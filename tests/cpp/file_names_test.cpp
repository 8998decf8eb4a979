#include "directory/file_names.h"

#include <gtest/gtest.h>

#include <regex>

#include "support.h"

namespace torch_ckpt::directory {

std::ostream& operator<<(std::ostream& out, FileKind kind) { return out << static_cast<int>(kind); }

namespace {

using namespace test;

void expect_file(std::string_view name, FileKind kind, std::string_view rank) {
  const FileName file = parse_file_name(name);
  EXPECT_EQ(file.kind, kind) << name;
  EXPECT_EQ(file.rank, rank) << name;
}

TEST(FileNames, DataFilesHaveARankABucketAndOptionallyATagAndAHint) {
  expect_file("__3_0.distcp", FileKind::data, "3");
  expect_file("__12_345.distcp", FileKind::data, "12");
  expect_file("__3_5f0c19ab_0.distcp", FileKind::data, "3");
  expect_file("__12345678_0.distcp", FileKind::data, "12345678");
  expect_file("__7_12345678_0.distcp", FileKind::data, "7");
  expect_file("model__3_0.distcp", FileKind::data, "3");
  expect_file("model__9___3_5f0c19ab_0.distcp", FileKind::data, "3");
}

TEST(FileNames, MetadataBelongsToAllRanksOrToOne) {
  expect_file(".metadata", FileKind::metadata, "");
  expect_file("__4.metadata", FileKind::metadata, "4");
}

TEST(FileNames, TemporaryMetadataMayHaveASuffixOfThirtyTwoDigits) {
  const std::string digits(32, 'a');
  expect_file(".metadata.tmp", FileKind::temporary, "");
  expect_file(".metadata.tmp-" + digits, FileKind::temporary, "");
  expect_file("__4.metadata.tmp-" + digits, FileKind::temporary, "4");
}

TEST(FileNames, AllOtherNamesAreOther) {
  const std::string digits(32, 'a');
  const std::vector<std::string> names = {"",
                                          "distcp",
                                          ".distcp",
                                          "0.distcp",
                                          "_0.distcp",
                                          "__0.distcp",
                                          "___0.distcp",
                                          "_3_0.distcp",
                                          "__3_.distcp",
                                          "__3_0.distcp.bak",
                                          "__3_x_0.distcp",
                                          "__3_5f0c19a_0.distcp",
                                          "__3_5f0c19abc_0.distcp",
                                          "__3_5F0C19AB_0.distcp",
                                          "__x_0.distcp",
                                          "metadata",
                                          "x.metadata",
                                          "_4.metadata",
                                          "__.metadata",
                                          "x__4.metadata",
                                          ".metadata.bak",
                                          ".metadata-" + digits,
                                          ".metadata.tmp-" + digits + "a",
                                          ".metadata.tmp-" + digits.substr(1),
                                          ".metadata.tmp" + digits,
                                          "x.metadata.tmp"};
  for (const std::string& name : names) {
    expect_file(name, FileKind::other, "");
  }
}

TEST(FileNames, AreParsedLikeTheEquivalentRegularExpressions) {
  const std::regex data("__([0-9]+)_(?:[0-9a-f]{8}_)?[0-9]+\\.distcp$");
  const std::regex metadata("^(?:__([0-9]+))?\\.metadata$");
  const std::regex temporary("^(?:__([0-9]+))?\\.metadata\\.tmp(?:-[0-9a-f]{32})?$");
  const std::vector<std::string> parts = {"_",        "__",   "0",         "17",
                                          "5f0c19ab", ".tmp", ".metadata", ".distcp",
                                          "hint",     "-",    "abcdef",    std::string(32, '7')};
  test::Random random(7);
  for (int i = 0; i < 20'000; ++i) {
    std::string name;
    for (std::uint64_t left = random.between(1, 7); left > 0; --left) {
      name += parts[random.between(0, parts.size() - 1)];
    }
    std::smatch match;
    if (std::regex_search(name, match, data)) {
      expect_file(name, FileKind::data, match[1].str());
    } else if (std::regex_match(name, match, metadata)) {
      expect_file(name, FileKind::metadata, match[1].str());
    } else if (std::regex_match(name, match, temporary)) {
      expect_file(name, FileKind::temporary, match[1].str());
    } else {
      expect_file(name, FileKind::other, "");
    }
  }
}

TEST(ChoosePrefix, IsUnchangedIfTheRankHasNoFiles) {
  TempDir directory;
  write_file(directory.file("__4_0.distcp"), "of another rank");
  const auto prefix = choose_prefix(open_directory(directory), "__3_", {"__4_"});
  ASSERT_TRUE(ok(prefix));
  EXPECT_EQ(*prefix, "__3_");
}

TEST(ChoosePrefix, HasATagIfTheRankHasFilesOrThereIsMetadataOrItIsTaken) {
  for (const char* there : {"__3_0.distcp", "__3_5f0c19ab_7.distcp", ".metadata", "__9.metadata"}) {
    TempDir directory;
    write_file(directory.file(there), "");
    const auto prefix = choose_prefix(open_directory(directory), "__3_", {});
    ASSERT_TRUE(ok(prefix));
    EXPECT_TRUE(std::regex_match(*prefix, std::regex("__3_[0-9a-f]{8}_"))) << there << *prefix;
  }
  TempDir directory;
  const auto prefix = choose_prefix(open_directory(directory), "__3_", {"__3_"});
  ASSERT_TRUE(ok(prefix));
  EXPECT_TRUE(std::regex_match(*prefix, std::regex("__3_[0-9a-f]{8}_"))) << *prefix;
}

TEST(ChoosePrefix, ReplacesTheTagOfAnotherSave) {
  TempDir directory;
  write_file(directory.file(".metadata"), "");
  const auto prefix = choose_prefix(open_directory(directory), "__3_5f0c19ab_", {});
  ASSERT_TRUE(ok(prefix));
  EXPECT_TRUE(std::regex_match(*prefix, std::regex("__3_[0-9a-f]{8}_"))) << *prefix;
  EXPECT_NE(*prefix, "__3_5f0c19ab_");
}

TEST(ChoosePrefix, IsUnchangedForPrefixesOfOtherForms) {
  TempDir directory;
  write_file(directory.file(".metadata"), "");
  for (const char* given : {"", "_", "__", "__3", "x__3_", "__x_", "__3_5f0c19a_"}) {
    const auto prefix = choose_prefix(open_directory(directory), given, {});
    ASSERT_TRUE(ok(prefix));
    EXPECT_EQ(*prefix, given);
  }
}

}  // namespace
}  // namespace torch_ckpt::directory
