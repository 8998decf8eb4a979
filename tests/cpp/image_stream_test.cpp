#include "engine/image_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

#include "fake_device.h"
#include "format/crc32.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using test::bytes_of;
using test::fails;
using test::host_source;
using test::ok;
using test::Random;
using test::row_major;

// An image, the payloads that it points to and the bytes that it must give.
struct Sample {
  std::deque<std::string> payloads;
  FileImage image;
  std::string expected;
  std::vector<std::uint32_t> checksums;

  void add_bytes(std::string payload) {
    payloads.push_back(std::move(payload));
    image.add_bytes(host_source(payloads.back()));
    expected += payloads.back();
    checksums.push_back(format::crc32(0, bytes_of(payloads.back())));
  }
  void add_tensor(std::string payload) {
    payloads.push_back(std::move(payload));
    image.add_tensor(row_major("uint8", {payloads.back().size()}), host_source(payloads.back()));
    expected += test::byte_record(payloads.back());
    checksums.push_back(format::crc32(0, bytes_of(payloads.back())));
  }
};

Sample every_kind(Random& random) {
  Sample sample;
  sample.add_bytes("");
  sample.add_bytes(random.bytes(1));
  sample.add_tensor(random.bytes(100));
  sample.add_tensor("");
  sample.add_bytes(random.bytes(5000));
  sample.add_tensor(random.bytes(100));
  sample.add_tensor(random.bytes(4096));
  // A transposed matrix, gathered: 30 rows of 20 items of 4 bytes, column by column.
  sample.payloads.push_back(random.bytes(2400));
  staging::Source transposed = host_source(sample.payloads.back());
  transposed.dims = {{20, 4}, {30, 80}};
  transposed.item_bytes = 4;
  std::string gathered;
  for (int column = 0; column < 20; ++column) {
    for (int row = 0; row < 30; ++row) {
      gathered += sample.payloads.back().substr(row * 80 + column * 4, 4);
    }
  }
  sample.image.add_tensor(row_major("float32", {20, 30}), transposed);
  sample.expected += test::record_of(row_major("float32", {20, 30}), gathered);
  sample.checksums.push_back(format::crc32(0, bytes_of(gathered)));
  sample.add_bytes("");
  return sample;
}

// Reads a whole image in pieces; `next` says how long each is to be.
template <class Next>
std::string streamed(ImageStream& stream, std::uint64_t bytes, Next next) {
  std::string out;
  while (out.size() < bytes) {
    std::string piece(std::min<std::uint64_t>(next(), bytes - out.size()), '?');
    EXPECT_TRUE(ok(stream.fill(std::as_writable_bytes(std::span(piece)))));
    out += piece;
  }
  return out;
}

class ImageStreamChunks : public ::testing::TestWithParam<std::size_t> {};

TEST_P(ImageStreamChunks, GiveHeadsPayloadsAndTailsOneBehindTheOther) {
  Random random(1);
  SCOPED_TRACE(random.seed_text());
  const Sample sample = every_kind(random);
  ASSERT_EQ(sample.image.bytes(), sample.expected.size());
  ImageStream stream(sample.image);
  const std::string found = streamed(stream, sample.image.bytes(), [] { return GetParam(); });
  EXPECT_TRUE(found == sample.expected);
  EXPECT_EQ(stream.checksums(), sample.checksums);
}

INSTANTIATE_TEST_SUITE_P(Bytes, ImageStreamChunks,
                         ::testing::Values(1, 7, 63, 4096, std::size_t{1} << 30));

TEST(ImageStream, IsTheSameWhateverTheChunks) {
  Random random(2);
  SCOPED_TRACE(random.seed_text());
  const Sample sample = every_kind(random);
  for (int round = 0; round < 200; ++round) {
    ImageStream stream(sample.image);
    const std::uint64_t longest = random.between(1, 3000);
    const std::string found =
        streamed(stream, sample.image.bytes(), [&] { return random.between(1, longest); });
    ASSERT_TRUE(found == sample.expected) << "round " << round;
    ASSERT_EQ(stream.checksums(), sample.checksums) << "round " << round;
  }
}

TEST(ImageStream, ChecksumsPayloadsLargerThanItsCacheBlocks) {
  Random random(3);
  SCOPED_TRACE(random.seed_text());
  Sample sample;
  sample.add_tensor(random.bytes((1 << 20) + 17));
  ImageStream stream(sample.image);
  const std::string found = streamed(stream, sample.image.bytes(), [] { return 600'001; });
  EXPECT_TRUE(found == sample.expected);
  EXPECT_EQ(stream.checksums(), sample.checksums);
}

TEST(ImageStream, OfNothingGivesNothing) {
  FileImage image;
  ImageStream stream(image);
  EXPECT_TRUE(ok(stream.fill({})));
  EXPECT_TRUE(stream.checksums().empty());
}

TEST(ImageStream, NeverTouchesTheAddressOfAnEmptySource) {
  FileImage image;
  image.add_bytes({});
  image.add_tensor(row_major("uint8", {0}), {});
  ImageStream stream(image);
  const std::string found = streamed(stream, image.bytes(), [] { return 4096; });
  EXPECT_TRUE(found == test::byte_record(""));
}

TEST(ImageStream, AskedForMoreThanThereIsSaysSo) {
  Sample sample;
  sample.add_bytes("12345");
  ImageStream stream(sample.image);
  std::string out(6, '?');
  EXPECT_TRUE(fails(stream.fill(std::as_writable_bytes(std::span(out))), Errc::internal));
}

TEST(ImageStream, WithADeviceTensorAndNoDeviceSupportIsAnError) {
  test::NoDevice none;
  staging::Source source;
  source.bytes = 10;
  source.device = 0;
  FileImage image;
  image.add_bytes(source);
  ImageStream stream(image);
  std::string out(10, '?');
  const auto filled = stream.fill(std::as_writable_bytes(std::span(out)));
  ASSERT_TRUE(fails(filled, Errc::invalid_argument));
  EXPECT_NE(filled.error().message().find("device"), std::string::npos);
}

TEST(ImageStream, TakesDeviceTensorsThroughOneCopier) {
  Random random(4);
  SCOPED_TRACE(random.seed_text());
  test::FakeDevice device;
  const std::string first = random.bytes(10'000);
  const std::string second = random.bytes(500);
  FileImage image;
  image.add_tensor(row_major("uint8", {first.size()}), device.upload(first));
  image.add_bytes(host_source(second));
  image.add_tensor(row_major("uint8", {second.size()}), device.upload(second));
  ImageStream stream(image);
  const std::string found = streamed(stream, image.bytes(), [] { return 4096; });
  EXPECT_TRUE(found == test::byte_record(first) + second + test::byte_record(second));
  EXPECT_EQ(stream.checksums()[0], format::crc32(0, bytes_of(first)));
  EXPECT_EQ(device.copiers(), 1);
}

TEST(ImageStream, AFailedDeviceCopyIsTheError) {
  test::FakeDevice device;
  device.on_copy([](const auto&, auto) -> Result<> {
    return format_error(Errc::system, "the device fell off the bus");
  });
  FileImage image;
  image.add_bytes(device.upload("12345"));
  ImageStream stream(image);
  std::string out(5, '?');
  const auto filled = stream.fill(std::as_writable_bytes(std::span(out)));
  ASSERT_TRUE(fails(filled, Errc::system));
  EXPECT_EQ(filled.error().detail, "the device fell off the bus");
}

}  // namespace
}  // namespace torch_ckpt::engine
