#include "engine/image_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <latch>
#include <numeric>
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

// Starts the copies from devices; returns nullptr if there are none.
Result<std::shared_ptr<staging::DeviceCopier>> submit(const std::vector<staging::DeviceRun>& runs) {
  static const std::vector<staging::ReadyEvent> no_events;
  if (runs.empty()) return std::shared_ptr<staging::DeviceCopier>();
  auto copier = staging::make_copier(no_events, [](const auto&, const auto&) {});
  if (!copier) return copier;
  if (auto submitted = (*copier)->submit(runs); !submitted) return submitted.error();
  return copier;
}

// Fills a piece of an image, with copies from devices.
Result<> fill(ImageStream& stream, std::uint64_t offset, std::string& out) {
  std::vector<staging::DeviceRun> runs;
  auto piece = stream.begin(offset, std::as_writable_bytes(std::span(out)), runs);
  if (!piece) return piece.error();
  const auto copier = submit(runs);
  if (!copier) return copier.error();
  if (*copier != nullptr) {
    if (auto waited = (*copier)->wait_oldest(); !waited) return waited.error();
  }
  stream.complete(*piece);
  return {};
}

// Reads an entire image in pieces; `next` returns the size of each piece.
template <class Next>
std::string streamed(ImageStream& stream, std::uint64_t bytes, Next next) {
  std::string out;
  while (out.size() < bytes) {
    std::string piece(std::min<std::uint64_t>(next(), bytes - out.size()), '?');
    EXPECT_TRUE(ok(fill(stream, out.size(), piece)));
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
  std::string nothing;
  EXPECT_TRUE(ok(fill(stream, 0, nothing)));
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
  EXPECT_TRUE(fails(fill(stream, 0, out), Errc::internal));
}

// --- in steps -------------------------------------------------------------------------------

// Pieces of an image, each with its own memory and its own copier.
class Pieces {
 public:
  template <class Next>
  Pieces(std::uint64_t bytes, Next next) {
    for (std::uint64_t at = 0; at < bytes; at += pieces_.back().memory.size()) {
      pieces_.push_back({at, std::string(std::min<std::uint64_t>(next(), bytes - at), '?')});
    }
  }

  std::size_t count() const { return pieces_.size(); }
  Result<> begin(const ImageStream& stream, std::size_t n) {
    Piece& piece = pieces_[n];
    std::vector<staging::DeviceRun> runs;
    auto begun = stream.begin(piece.offset, std::as_writable_bytes(std::span(piece.memory)), runs);
    if (!begun) return begun.error();
    piece.rest = std::move(*begun);
    auto copier = submit(runs);
    if (!copier) return copier.error();
    piece.copier = *copier;
    return {};
  }
  Result<> wait_for_copies(std::size_t n) {
    return pieces_[n].copier == nullptr ? Result<>{} : pieces_[n].copier->wait_oldest();
  }
  void complete(ImageStream& stream, std::size_t n) const { stream.complete(pieces_[n].rest); }

  std::string contents() const {
    std::string all;
    for (const Piece& piece : pieces_) all += piece.memory;
    return all;
  }

 private:
  struct Piece {
    std::uint64_t offset = 0;
    std::string memory;
    ImageStream::Piece rest = {};
    std::shared_ptr<staging::DeviceCopier> copier = nullptr;
  };
  std::deque<Piece> pieces_;
};

void begin_all(const ImageStream& stream, Pieces& pieces) {
  for (std::size_t n = 0; n < pieces.count(); ++n) ASSERT_TRUE(ok(pieces.begin(stream, n)));
}

void wait_for_and_complete_all(ImageStream& stream, Pieces& pieces) {
  for (std::size_t n = 0; n < pieces.count(); ++n) {
    ASSERT_TRUE(ok(pieces.wait_for_copies(n)));
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

TEST(ImageStreamSteps, OfPiecesBegunInAnyOrderProduceTheImage) {
  Random random(11);
  test::FakeDevice device;
  for (int round = 0; round < 100; ++round) {
    const Sample sample = on_device_and_host(random, device);
    const std::uint64_t longest = random.between(50, 3000);
    ImageStream stream(sample.image);
    Pieces pieces(sample.image.bytes(), [&] { return random.between(1, longest); });
    std::vector<std::size_t> order(pieces.count());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random.generator());
    for (const std::size_t n : order) ASSERT_TRUE(ok(pieces.begin(stream, n)));
    wait_for_and_complete_all(stream, pieces);
    ASSERT_TRUE(produced(stream, pieces.contents(), sample)) << "round " << round;
  }
}

TEST(ImageStreamSteps, MayBeTakenByThreadsAtTheSameTime) {
  Random random(12);
  test::FakeDevice device;
  const Sample sample = on_device_and_host(random, device);
  ImageStream stream(sample.image);
  Pieces pieces(sample.image.bytes(), [&] { return random.between(1, 500); });
  std::deque<std::latch> copied;
  for (std::size_t n = 0; n < pieces.count(); ++n) copied.emplace_back(1);
  std::atomic<std::size_t> next{0};
  {
    std::vector<std::jthread> stagers;
    for (int i = 0; i < 3; ++i) {
      stagers.emplace_back([&] {
        for (std::size_t n = next++; n < pieces.count(); n = next++) {
          EXPECT_TRUE(ok(pieces.begin(stream, n)));
          EXPECT_TRUE(ok(pieces.wait_for_copies(n)));
          copied[n].count_down();
        }
      });
    }
    for (std::size_t n = 0; n < pieces.count(); ++n) {
      copied[n].wait();
      pieces.complete(stream, n);
    }
  }
  EXPECT_TRUE(produced(stream, pieces.contents(), sample));
}

TEST(ImageStreamSteps, AskForTheCopiesOfAPieceTogether) {
  test::FakeDevice device;
  Sample sample;
  for (const char letter : {'a', 'b', 'c'}) {
    const std::string payload(100, letter);
    sample.add_tensor_at(device.upload(payload), payload);
  }
  const ImageStream stream(sample.image);
  std::string memory(sample.image.bytes(), '?');
  std::vector<staging::DeviceRun> runs;
  ASSERT_TRUE(ok(stream.begin(0, std::as_writable_bytes(std::span(memory)), runs)));
  EXPECT_EQ(runs.size(), 3);
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
    ImageStream stream(sample.image);
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
  const std::uint64_t head = sample.image.items().front().record->head().size();
  for (const std::uint64_t around : {head, head + kBlock, head + 2 * kBlock}) {
    for (std::uint64_t split = around - 3; split <= around + 3; ++split) {
      ImageStream stream(sample.image);
      Pieces pieces(sample.image.bytes(), [&, first = true]() mutable {
        return std::exchange(first, false) ? split : sample.image.bytes();
      });
      begin_all(stream, pieces);
      wait_for_and_complete_all(stream, pieces);
      ASSERT_EQ(stream.sums(), expected) << "split at " << split;
    }
  }
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
  ImageStream stream(sample.image);
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
  ImageStream stream(sample.image);
  Pieces pieces(sample.image.bytes(), [] { return 1000; });
  begin_all(stream, pieces);
  for (std::size_t n = 0; n < pieces.count(); ++n) ASSERT_TRUE(ok(pieces.wait_for_copies(n)));
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
    const std::uint64_t payload_end = item.record->head().size() + payload.size();
    for (std::uint64_t split = payload_end; split < item.bytes; ++split) {
      ImageStream stream(sample.image);
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

}  // namespace
}  // namespace torch_ckpt::engine
