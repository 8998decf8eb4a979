#include "engine/image_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <latch>
#include <semaphore>
#include <thread>
#include <utility>

#include "fake_device.h"
#include "format/crc32.h"
#include "gate.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using namespace test;

// An image, the payloads that it points to and its expected bytes.
struct Sample {
  std::deque<std::string> payloads;
  FileImage image;
  std::string expected;
  std::vector<std::uint32_t> checksums;

  /// The checksum table entries of all items, computed from the expected bytes.
  std::vector<format::RecordSums> sums() const {
    std::vector<format::RecordSums> of_items;
    for (const ImageItem& item : image.items()) {
      const auto bytes = std::string_view(expected).substr(item.offset, item.bytes);
      of_items.push_back(test::sums_of(item, bytes));
    }
    return of_items;
  }
  void add_bytes(std::string payload) {
    payloads.push_back(std::move(payload));
    image.add_bytes(host_source(payloads.back()));
    expected += payloads.back();
    checksums.push_back(format::crc32(0, bytes_of(payloads.back())));
  }
  void add_tensor(std::string payload) {
    payloads.push_back(std::move(payload));
    add_tensor_at(host_source(payloads.back()), payloads.back());
  }
  /// Adds a tensor with the payload `bytes`, which `source` points to.
  void add_tensor_at(const staging::Source& source, const std::string& payload) {
    image.add_tensor(row_major("uint8", {payload.size()}), source);
    expected += test::byte_record(payload);
    checksums.push_back(format::crc32(0, bytes_of(payload)));
  }
};

constexpr std::size_t kBlock = std::size_t{16} << 10;  // of a checksum table

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

// Reads an entire image in pieces; `next` returns the size of each piece.
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

/// For EXPECT_TRUE(produced(stream, found, sample)): the contents and the checksums of an image.
::testing::AssertionResult produced(const ImageStream& stream, const std::string& found,
                                    const Sample& sample) {
  if (found != sample.expected) return ::testing::AssertionFailure() << "other contents";
  if (stream.checksums() != sample.checksums) {
    return ::testing::AssertionFailure() << "other checksums of payloads";
  }
  if (stream.sums() != sample.sums()) {
    return ::testing::AssertionFailure() << "other checksum table entries";
  }
  return ::testing::AssertionSuccess();
}

class ImageStreamChunks : public ::testing::TestWithParam<std::size_t> {};

TEST_P(ImageStreamChunks, ContainHeadsPayloadsAndTailsBackToBack) {
  Random random(1);
  const Sample sample = every_kind(random);
  ASSERT_EQ(sample.image.bytes(), sample.expected.size());
  ImageStream stream(sample.image);
  const std::string found = streamed(stream, sample.image.bytes(), [] { return GetParam(); });
  EXPECT_TRUE(produced(stream, found, sample));
}

INSTANTIATE_TEST_SUITE_P(Bytes, ImageStreamChunks,
                         ::testing::Values(1, 7, 63, 4096, std::size_t{1} << 30));

TEST(ImageStream, IsTheSameForAnyChunks) {
  Random random(2);
  const Sample sample = every_kind(random);
  for (int round = 0; round < 200; ++round) {
    ImageStream stream(sample.image);
    const std::uint64_t longest = random.between(1, 3000);
    const std::string found =
        streamed(stream, sample.image.bytes(), [&] { return random.between(1, longest); });
    ASSERT_TRUE(produced(stream, found, sample)) << "round " << round;
  }
}

TEST(ImageStream, ChecksumsPayloadsLargerThanItsCacheBlocks) {
  Random random(3);
  Sample sample;
  sample.add_tensor(random.bytes((1 << 20) + 17));
  ImageStream stream(sample.image);
  const std::string found = streamed(stream, sample.image.bytes(), [] { return 600'001; });
  EXPECT_TRUE(produced(stream, found, sample));
}

TEST(ImageStream, ChecksumsBlocksOfBytesAndOfTensorsLargerThanABlock) {
  Sample sample;
  sample.add_bytes("");
  sample.add_bytes("x");
  sample.add_tensor(std::string(kBlock, 'x'));
  sample.add_tensor(std::string(kBlock + 1, 'x'));
  sample.add_bytes(std::string(kBlock + 1, 'x'));
  ImageStream stream(sample.image);
  streamed(stream, sample.image.bytes(), [] { return 4096; });
  std::vector<std::size_t> blocks;
  for (const format::RecordSums& sums : stream.sums()) blocks.push_back(sums.block_crcs.size());
  EXPECT_EQ(blocks, (std::vector<std::size_t>{0, 1, 0, 2, 2}));
}

TEST(ImageStream, ChecksumsHeadAndTailTogether) {
  Sample sample;
  sample.add_tensor("payload");
  ImageStream stream(sample.image);
  std::string envelope = streamed(stream, sample.image.bytes(), [] { return 4096; });
  envelope.erase(envelope.find("payload"), std::string_view("payload").size());
  EXPECT_EQ(stream.sums()[0].envelope_crc, format::crc32(0, bytes_of(envelope)));
}

TEST(ImageStream, OfAnEmptyImageIsEmpty) {
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

TEST(ImageStream, FailsBeyondTheEndOfTheImage) {
  Sample sample;
  sample.add_bytes("12345");
  ImageStream stream(sample.image);
  std::string out(6, '?');
  EXPECT_TRUE(fails(stream.fill(std::as_writable_bytes(std::span(out))), Errc::internal));
}

TEST(ImageStream, FailsForADeviceTensorWithoutDeviceSupport) {
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

TEST(ImageStream, CopiesAllDeviceTensorsWithOneCopier) {
  Random random(4);
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

TEST(ImageStream, ReturnsTheErrorOfADeviceCopy) {
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

// --- in steps -------------------------------------------------------------------------------

const std::vector<staging::ReadyEvent> kNoEvents;
const staging::Warn kNoWarnings = [](const auto&, const auto&) {};

// Pieces of an image, each with its own memory.
class Pieces {
 public:
  template <class Next>
  Pieces(std::uint64_t bytes, Next next) {
    for (std::uint64_t at = 0; at < bytes; at += memory_.back().size()) {
      memory_.emplace_back(std::min<std::uint64_t>(next(), bytes - at), '?');
    }
    pieces_.resize(memory_.size());
  }

  std::size_t count() const { return memory_.size(); }
  Result<> begin(ImageStream& stream, std::size_t n) {
    auto begun = stream.begin(std::as_writable_bytes(std::span(memory_[n])));
    if (!begun) return begun.error();
    pieces_[n] = std::move(*begun);
    return {};
  }
  Result<> wait_for_copies(ImageStream& stream, std::size_t n) {
    return stream.wait_for_copies(pieces_[n]);
  }
  void complete(ImageStream& stream, std::size_t n) const { stream.complete(pieces_[n]); }

  std::string contents() const {
    std::string all;
    for (const std::string& piece : memory_) all += piece;
    return all;
  }

 private:
  std::deque<std::string> memory_;
  std::vector<ImageStream::Piece> pieces_;
};

void begin_all(ImageStream& stream, Pieces& pieces) {
  for (std::size_t n = 0; n < pieces.count(); ++n) ASSERT_TRUE(ok(pieces.begin(stream, n)));
}

void wait_for_and_complete_all(ImageStream& stream, Pieces& pieces) {
  for (std::size_t n = 0; n < pieces.count(); ++n) {
    ASSERT_TRUE(ok(pieces.wait_for_copies(stream, n)));
    pieces.complete(stream, n);
  }
}

// Tensors on the device and on the host, of sizes around those of the pieces.
Sample on_device_and_host(Random& random, test::FakeDevice& device) {
  Sample sample;
  for (int i = 0; i < 12; ++i) {
    const std::string payload = random.bytes(random.any_scale(3000));
    if (random.coin()) {
      sample.add_tensor_at(device.upload(payload), payload);
    } else {
      random.coin() ? sample.add_tensor(payload) : sample.add_bytes(payload);
    }
  }
  return sample;
}

TEST(ImageStreamSteps, OfAllPiecesAtOnceProduceTheImage) {
  Random random(10);
  const Sample sample = every_kind(random);
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t longest = random.between(1, 3000);
    ImageStream stream(sample.image, kNoEvents, kNoWarnings);
    Pieces pieces(sample.image.bytes(), [&] { return random.between(1, longest); });
    begin_all(stream, pieces);
    wait_for_and_complete_all(stream, pieces);
    ASSERT_TRUE(produced(stream, pieces.contents(), sample)) << "round " << round;
  }
}

TEST(ImageStreamSteps, OfSomePiecesAtOnceProduceTheImage) {
  Random random(11);
  test::FakeDevice device;
  for (int round = 0; round < 30; ++round) {
    const Sample sample = on_device_and_host(random, device);
    const std::uint64_t longest = random.between(50, 3000);
    ImageStream stream(sample.image, kNoEvents, kNoWarnings);
    Pieces pieces(sample.image.bytes(), [&] { return random.between(1, longest); });
    // Each step of a piece comes after the step before it and after the same step of the last
    // piece.
    std::size_t begun = 0;
    std::size_t copied = 0;
    std::size_t completed = 0;
    while (completed < pieces.count()) {
      switch (random.between(0, 2)) {
        case 0:
          if (begun < pieces.count()) {
            ASSERT_TRUE(ok(pieces.begin(stream, begun++)));
          }
          break;
        case 1:
          if (copied < begun) {
            ASSERT_TRUE(ok(pieces.wait_for_copies(stream, copied++)));
          }
          break;
        default:
          if (completed < copied) pieces.complete(stream, completed++);
      }
    }
    ASSERT_TRUE(produced(stream, pieces.contents(), sample)) << "round " << round;
  }
}

TEST(ImageStreamSteps, MayBeCompletedByAnotherThread) {
  Random random(12);
  test::FakeDevice device;
  const Sample sample = on_device_and_host(random, device);
  ImageStream stream(sample.image, kNoEvents, kNoWarnings);
  Pieces pieces(sample.image.bytes(), [&] { return random.between(1, 500); });
  std::counting_semaphore<> arrived(0);
  {
    const std::jthread completer([&] {
      for (std::size_t n = 0; n < pieces.count(); ++n) {
        arrived.acquire();
        pieces.complete(stream, n);
      }
    });
    for (std::size_t n = 0; n < pieces.count(); ++n) {
      EXPECT_TRUE(ok(pieces.begin(stream, n)));
      EXPECT_TRUE(ok(pieces.wait_for_copies(stream, n)));
      arrived.release();
    }
  }
  EXPECT_TRUE(produced(stream, pieces.contents(), sample));
}

// Payloads that end before, at and after a block boundary, in pieces that do the same.
TEST(ImageStreamSteps, ChecksumBlocksThatSpanPieces) {
  Random random(15);
  test::FakeDevice device;
  Sample sample;
  for (const std::size_t bytes : {kBlock - 1, kBlock, kBlock + 1, 2 * kBlock, 5 * kBlock + 123}) {
    const std::string payload = random.bytes(bytes);
    sample.add_bytes(payload);
    sample.add_tensor(payload);
    sample.add_tensor_at(device.upload(payload), payload);
  }
  for (int round = 0; round < 40; ++round) {
    const std::uint64_t longest = random.between(500, 4 * kBlock);
    const bool whole_blocks = random.coin();
    ImageStream stream(sample.image, kNoEvents, kNoWarnings);
    Pieces pieces(sample.image.bytes(), [&] {
      return whole_blocks ? kBlock + random.between(0, 2) - 1 : random.between(1, longest);
    });
    begin_all(stream, pieces);
    wait_for_and_complete_all(stream, pieces);
    ASSERT_TRUE(produced(stream, pieces.contents(), sample)) << "round " << round;
  }
}

// A block boundary at each position relative to the only piece boundary in the payload.
TEST(ImageStreamSteps, ChecksumBlocksWhosePiecesEndNearBlockBoundaries) {
  Random random(16);
  Sample sample;
  sample.add_tensor(random.bytes(2 * kBlock + 2));
  const std::vector<format::RecordSums> expected = sample.sums();
  const std::uint64_t head = sample.image.items().front().record->head.size();
  for (const std::uint64_t around : {head, head + kBlock, head + 2 * kBlock}) {
    for (std::uint64_t split = around - 3; split <= around + 3; ++split) {
      ImageStream stream(sample.image, kNoEvents, kNoWarnings);
      Pieces pieces(sample.image.bytes(), [&, first = true]() mutable {
        return std::exchange(first, false) ? split : sample.image.bytes();
      });
      begin_all(stream, pieces);
      wait_for_and_complete_all(stream, pieces);
      ASSERT_EQ(stream.sums(), expected) << "split at " << split;
    }
  }
}

TEST(ImageStreamSteps, SubmitTheTensorsOfAPieceTogether) {
  test::FakeDevice device;
  Sample sample;
  for (const char letter : {'a', 'b', 'c'}) {
    const std::string payload(100, letter);
    sample.add_tensor_at(device.upload(payload), payload);
  }
  ImageStream stream(sample.image, kNoEvents, kNoWarnings);
  Pieces pieces(sample.image.bytes(), [&] { return sample.image.bytes(); });
  begin_all(stream, pieces);
  EXPECT_EQ(device.submissions(), 1);
  wait_for_and_complete_all(stream, pieces);
  EXPECT_TRUE(pieces.contents() == sample.expected);
}

TEST(ImageStreamSteps, SubmitNothingForAPieceWithoutDeviceMemory) {
  test::FakeDevice device;
  Sample sample;
  sample.add_tensor(std::string(100, 'x'));
  ImageStream stream(sample.image, kNoEvents, kNoWarnings);
  Pieces pieces(sample.image.bytes(), [] { return 64; });
  begin_all(stream, pieces);
  wait_for_and_complete_all(stream, pieces);
  EXPECT_EQ(device.submissions(), 0);
  EXPECT_EQ(stream.copier(), nullptr);
}

TEST(ImageStreamSteps, BeginManyPiecesBeforeTheFirstIsCopied) {
  test::FakeDevice device;
  const std::string payload(10'000, 'x');
  Sample sample;
  sample.add_tensor_at(device.upload(payload), payload);
  test::Gate arrival;
  device.on_arrival(arrival.passage());
  ImageStream stream(sample.image, kNoEvents, kNoWarnings);
  Pieces pieces(sample.image.bytes(), [] { return 2500; });
  begin_all(stream, pieces);
  EXPECT_EQ(device.submissions(), 5);
  arrival.open();
  wait_for_and_complete_all(stream, pieces);
  EXPECT_TRUE(produced(stream, pieces.contents(), sample));
}

TEST(ImageStreamSteps, CopyHostMemoryInBegin) {
  test::FakeDevice device;
  const std::string on_device(1000, 'd');
  Sample sample;
  sample.add_bytes(std::string(1000, 'h'));
  sample.add_tensor_at(device.upload(on_device), on_device);
  sample.add_tensor(std::string(1000, 'h'));
  test::Gate arrival;
  device.on_arrival(arrival.passage());
  ImageStream stream(sample.image, kNoEvents, kNoWarnings);
  Pieces pieces(sample.image.bytes(), [] { return 700; });
  begin_all(stream, pieces);
  for (std::string& payload : sample.payloads) std::fill(payload.begin(), payload.end(), '#');
  arrival.open();
  wait_for_and_complete_all(stream, pieces);
  EXPECT_TRUE(produced(stream, pieces.contents(), sample));
}

TEST(ImageStreamSteps, NeedNoSourceOnceAPieceIsCopied) {
  Random random(13);
  Sample sample = every_kind(random);
  ImageStream stream(sample.image, kNoEvents, kNoWarnings);
  Pieces pieces(sample.image.bytes(), [] { return 1000; });
  begin_all(stream, pieces);
  for (std::size_t n = 0; n < pieces.count(); ++n)
    ASSERT_TRUE(ok(pieces.wait_for_copies(stream, n)));
  for (std::string& payload : sample.payloads) std::fill(payload.begin(), payload.end(), '#');
  for (std::size_t n = 0; n < pieces.count(); ++n) pieces.complete(stream, n);
  EXPECT_TRUE(produced(stream, pieces.contents(), sample));
}

// The checksum is stored in the tail, which the pieces split at every position.
TEST(ImageStreamSteps, WriteTheChecksumIntoATailThatIsSplitAnywhere) {
  Random random(14);
  test::FakeDevice device;
  const std::string payload = random.bytes(200);
  for (const bool on_device : {false, true}) {
    Sample sample;
    if (on_device) {
      sample.add_tensor_at(device.upload(payload), payload);
    } else {
      sample.add_tensor(payload);
    }
    const ImageItem& item = sample.image.items().front();
    const std::uint64_t payload_end = item.record->head.size() + payload.size();
    for (std::uint64_t split = payload_end; split < item.bytes; ++split) {
      ImageStream stream(sample.image, kNoEvents, kNoWarnings);
      Pieces pieces(item.bytes, [&, first = true]() mutable {
        return std::exchange(first, false) ? split : item.bytes;
      });
      ASSERT_EQ(pieces.count(), 2);
      begin_all(stream, pieces);
      wait_for_and_complete_all(stream, pieces);
      ASSERT_TRUE(pieces.contents() == sample.expected) << "split at " << split;
      ASSERT_EQ(stream.sums(), sample.sums()) << "split at " << split;
    }
  }
}

TEST(ImageStreamSteps, WaitForTheReadyEvents) {
  test::FakeDevice device;
  const std::string payload(1000, 'x');
  Sample sample;
  sample.add_tensor_at(device.upload(payload), payload);
  std::latch ready(1);
  std::atomic<bool> early{false};
  device.on_arrival([&] {
    if (!ready.try_wait()) early = true;
  });
  const std::vector<staging::ReadyEvent> moments{{0, &ready}};
  ImageStream stream(sample.image, moments, kNoWarnings);
  Pieces pieces(sample.image.bytes(), [] { return 600; });
  begin_all(stream, pieces);
  ready.count_down();
  wait_for_and_complete_all(stream, pieces);
  EXPECT_TRUE(pieces.contents() == sample.expected);
  EXPECT_FALSE(early);
}

TEST(ImageStreamSteps, ReportAFailedCopy) {
  test::FakeDevice device;
  device.fail_waits(format_error(Errc::system, "the device fell off the bus"));
  const std::string payload(100, 'x');
  Sample sample;
  sample.add_tensor_at(device.upload(payload), payload);
  ImageStream stream(sample.image, kNoEvents, kNoWarnings);
  Pieces pieces(sample.image.bytes(), [&] { return sample.image.bytes(); });
  begin_all(stream, pieces);
  EXPECT_TRUE(fails(pieces.wait_for_copies(stream, 0), Errc::system));
}

TEST(ImageStreamSteps, WaitForAPieceOnlyOnce) {
  test::FakeDevice device;
  const std::string payload(100, 'x');
  Sample sample;
  sample.add_tensor_at(device.upload(payload), payload);
  ImageStream stream(sample.image, kNoEvents, kNoWarnings);
  Pieces pieces(sample.image.bytes(), [&] { return sample.image.bytes(); });
  begin_all(stream, pieces);
  ASSERT_TRUE(ok(pieces.wait_for_copies(stream, 0)));
  EXPECT_TRUE(ok(pieces.wait_for_copies(stream, 0)));
}

}  // namespace
}  // namespace torch_ckpt::engine
