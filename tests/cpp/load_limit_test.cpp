#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/load_session.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using test::fails;
using test::ok;

constexpr std::uint64_t kLimit = LoadOptions::kMinScratchBytes + 100;

class LoadLimitTest : public ::testing::Test {
 protected:
  LoadLimitTest() {
    test::write_file(temporary_.file("data"), std::string(1000, 'x'));
    options_.max_scratch_bytes = kLimit;
  }

  static planning::StoredRecord record(std::string name, std::uint64_t offset,
                                       std::uint64_t length) {
    return {std::move(name), 0, offset, length};
  }
  Result<> check(const std::vector<planning::StoredRecord>& records) const {
    return check_records_fit(directory_, files_, records, options_);
  }
  /// Loads a complete record into a target, and returns the error.
  std::optional<Error> load(const planning::StoredRecord& stored, std::string& target) {
    RegionRead read{&stored};
    read.region = planning::Region::of_bytes(0, stored.length);
    read.target.address = reinterpret_cast<std::byte*>(target.data());
    auto session = LoadSession::start(context(), test::open_directory(temporary_), files_,
                                      {std::move(read)}, options_);
    if (!session) return session.error();
    test::wait_for_end(**session);
    return (*session)->failure();
  }

  test::TempDir temporary_;
  const Folder directory_ = test::open_directory(temporary_);
  const std::vector<LoadFile> files_{{"data", {}}};
  LoadOptions options_;
};

TEST_F(LoadLimitTest, RejectsALimitBelowTheMinimumScratchMemory) {
  EXPECT_TRUE(ok(options_.check()));
  options_.max_scratch_bytes = LoadOptions::kMinScratchBytes - 1;
  EXPECT_TRUE(fails(options_.check(), Errc::invalid_argument));
}

TEST_F(LoadLimitTest, RejectsRecordsThatDoNotFitTogether) {
  EXPECT_TRUE(ok(check({record("a", 0, 50), record("b", 50, 50)})));
  const auto result = check({record("a", 0, 50), record("b", 50, 51)});
  ASSERT_TRUE(fails(result, Errc::invalid_argument));
  EXPECT_EQ(result.error().subject, "b");
}

TEST_F(LoadLimitTest, RejectsARecordBeyondTheEndOfItsFileByName) {
  const auto result = check({record("a", 999, 2)});
  ASSERT_TRUE(fails(result, Errc::range_past_end));
  EXPECT_EQ(result.error().subject, "a");
  EXPECT_EQ(result.error().path, temporary_.file("data"));
}

TEST_F(LoadLimitTest, NamesTheRecordInAnErrorOfALoad) {
  std::string room(2, '?');
  options_.target_bytes = room.size();
  const auto error = load(record("a", 999, 2), room);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code, Errc::range_past_end);
  EXPECT_EQ(error->subject, "a");
}

TEST_F(LoadLimitTest, TargetsLeaveTheRemainderForScratchMemory) {
  std::string room(2, '?');
  options_.target_bytes = options_.max_scratch_bytes - 4095;
  const auto error = load(record("a", 0, 2), room);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code, Errc::invalid_argument);
  options_.target_bytes = options_.max_scratch_bytes - 4096;
  EXPECT_FALSE(load(record("a", 0, 2), room).has_value());
  EXPECT_EQ(room, "xx");
}

}  // namespace
}  // namespace torch_ckpt::engine
