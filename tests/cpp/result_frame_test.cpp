#include "format/result_frame.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support.h"

namespace torch_ckpt::format {
namespace {

using namespace test;

FileResult some_result() {
  const std::vector<ItemLocation> locations{{2, 0, 100}, {0, 100, ~std::uint64_t{0}}};
  return {"__3_0.distcp", ItemLocations(locations), {0xdeadbeef, 0}, "a table"};
}

std::string some_frames() {
  return encode_file(some_result(), 2) +
         encode_failure(system_error(EIO, "pwrite", "/c/__3_1.distcp", 4096)) +
         encode_value(FrameKind::object, {123, 456}, bytes_of("an object"));
}

TEST(ResultFrame, EncodesTheResultOfAFile) {
  const auto frames = decode_frames(bytes_of(encode_file(some_result(), 2)));
  ASSERT_TRUE(ok(frames));
  ASSERT_EQ(frames->size(), 1);
  EXPECT_EQ(frames->at(0).kind, FrameKind::file);
  EXPECT_EQ(frames->at(0).files, 2);
  EXPECT_EQ(frames->at(0).file, some_result());
}

TEST(ResultFrame, EncodesAnError) {
  Error error = system_error(ENOSPC, "pwrite", "/c/__3_1.distcp", 4096);
  error.detail = "the disk is full";
  const auto frames = decode_frames(bytes_of(encode_failure(error)));
  ASSERT_TRUE(ok(frames));
  EXPECT_EQ(frames->at(0).kind, FrameKind::failure);
  EXPECT_EQ(frames->at(0).failure.code, Errc::system);
  EXPECT_EQ(frames->at(0).failure.message(), error.message());
}

TEST(ResultFrame, EncodesAnAnnouncementWithItsSender) {
  const Sender sender{123, 456};
  const auto frames =
      decode_frames(bytes_of(encode_value(FrameKind::begin, sender, bytes_of("files __0_*"))));
  ASSERT_TRUE(ok(frames));
  EXPECT_EQ(frames->at(0).kind, FrameKind::begin);
  EXPECT_EQ(frames->at(0).sender, sender);
  EXPECT_EQ(frames->at(0).value, "files __0_*");
}

TEST(ResultFrame, CanBeConcatenated) {
  const auto frames = decode_frames(bytes_of(some_frames()));
  ASSERT_TRUE(ok(frames));
  ASSERT_EQ(frames->size(), 3);
  EXPECT_EQ(frames->at(0).kind, FrameKind::file);
  EXPECT_EQ(frames->at(1).kind, FrameKind::failure);
  EXPECT_EQ(frames->at(2).kind, FrameKind::object);
}

TEST(ResultFrame, IsRefusedIfItIsTruncatedAnywhere) {
  const std::string whole = encode_file(some_result(), 2);
  for (std::size_t length = 1; length < whole.size(); ++length) {
    EXPECT_TRUE(fails(decode_frames(bytes_of(whole.substr(0, length))), Errc::frame_damaged))
        << length;
  }
}

TEST(ResultFrame, IsRefusedIfItHasMoreLocationsThanChecksums) {
  FileResult result = some_result();
  result.crcs.pop_back();
  EXPECT_TRUE(fails(decode_frames(bytes_of(encode_file(result, 2))), Errc::frame_damaged));
}

TEST(ResultFrame, IsRefusedIfAnyByteIsChanged) {
  const std::string whole = some_frames();
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] ^= 0x10;
    EXPECT_TRUE(fails(decode_frames(bytes_of(changed)), Errc::frame_damaged)) << at;
  }
}

TEST(ResultFrame, DecodesAllFilesOfASave) {
  const std::vector<FileResult> results = {some_result(), some_result()};
  const auto decoded = decode_files(bytes_of(encode_files(results)));
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(*decoded, results);
}

TEST(ResultFrame, OfASaveIsRefusedIfFilesAreMissingOrAdditionalOrAnObjectIsAmongThem) {
  const std::string file = encode_file(some_result(), 2);
  const std::string object = encode_value(FrameKind::object, {}, bytes_of("object"));
  EXPECT_TRUE(fails(decode_files(bytes_of(file)), Errc::frame_damaged));
  EXPECT_TRUE(fails(decode_files(bytes_of(file + file + file)), Errc::frame_damaged));
  EXPECT_TRUE(fails(decode_files(bytes_of(file + object)), Errc::frame_damaged));
}

}  // namespace
}  // namespace torch_ckpt::format
