#include "format/delta.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "format/crc32.h"
#include "format/little_endian.h"
#include "support.h"

namespace torch_ckpt::format {
namespace {

using namespace test;

std::span<std::byte> writable(std::string& text) { return std::as_writable_bytes(std::span(text)); }

/// Changes elements of `bytes`, each with this probability in percent.
std::string changed(Random& random, std::string bytes, std::size_t item_bytes, int percent) {
  for (std::size_t at = 0; at < bytes.size(); at += item_bytes) {
    if (random.between(1, 100) <= static_cast<std::uint64_t>(percent)) {
      bytes[at + random.between(0, item_bytes - 1)] ^= '\x55';
    }
  }
  return bytes;
}

/// A block of the base, and its change.
struct Encoded {
  DeltaBlock block;
  std::string payload;
};

Encoded encoded(const std::string& base, const std::string& version, std::size_t item_bytes) {
  Encoded made;
  made.block = encode_change(bytes_of(base), bytes_of(version), item_bytes, made.payload);
  return made;
}

bool is_valid(const Encoded& encoded, std::uint64_t block_bytes, std::size_t item_bytes) {
  DeltaBlock block = encoded.block;
  block.bytes = static_cast<std::uint32_t>(encoded.payload.size());
  block.crc = crc32(0, bytes_of(encoded.payload));
  return is_valid_payload(block, bytes_of(encoded.payload), block_bytes, item_bytes);
}

TEST(DeltaBlocks, ChangeTheBaseToTheVersion) {
  Random random(1);
  for (const std::size_t item_bytes : {1, 2, 4, 8, 16}) {
    for (const int percent : {0, 1, 3, 30, 100}) {
      for (const std::size_t items : {1, 3, 7, 1000, 5001}) {
        std::string base = random.bytes(items * item_bytes);
        const std::string version = changed(random, base, item_bytes, percent);
        const Encoded change = encoded(base, version, item_bytes);
        EXPECT_TRUE(
            is_valid_payload(change.block, bytes_of(change.payload), base.size(), item_bytes));
        EXPECT_LE(change.payload.size(), base.size());
        apply_change(change.block.change, bytes_of(change.payload), writable(base), item_bytes);
        EXPECT_TRUE(base == version) << item_bytes << " " << percent << " " << items;
      }
    }
  }
}

TEST(DeltaBlocks, HaveNoPayloadIfNothingHasChanged) {
  const std::string base(100, 'x');
  const Encoded change = encoded(base, base, 2);
  EXPECT_EQ(change.block.change, BlockChange::none);
  EXPECT_EQ(change.payload, "");
}

TEST(DeltaBlocks, TakeThreeBytesForAChangedHalf) {
  Random random(2);
  const std::string base = random.bytes(200'000);
  const std::string version = changed(random, base, 2, 3);
  std::size_t changes = 0;
  for (std::size_t at = 0; at < base.size(); at += 2) {
    changes += std::memcmp(&base[at], &version[at], 2) != 0 ? 1 : 0;
  }
  const std::size_t bytes = encoded(base, version, 2).payload.size();
  EXPECT_GE(bytes, 3 * changes);
  EXPECT_LE(bytes, 3 * changes + changes / 100 + 4) << "few gaps are longer than 254 elements";
}

TEST(DeltaBlocks, AreFullIfThatIsSmaller) {
  Random random(3);
  const std::string base = random.bytes(1000);
  const Encoded change = encoded(base, changed(random, base, 2, 100), 2);
  EXPECT_EQ(change.block.change, BlockChange::full);
  EXPECT_EQ(change.payload.size(), 1000);
}

TEST(DeltaBlocks, RefuseAnyPayloadThatDoesNotFit) {
  const std::string base(16, 'x');
  std::string version = base;
  version[8] = 'y';  // element 4 of 8
  const Encoded change = encoded(base, version, 2);
  ASSERT_TRUE(is_valid(change, 16, 2));
  EXPECT_FALSE(is_valid(change, 8, 2)) << "past the end of a shorter block";
  for (const auto& payload :
       {std::string(), std::string("\1\0\0", 3), std::string("\1\0\0\0", 4),  // no element
        std::string("\2\0\0\0\4yy", 7),    // fewer elements than counted
        std::string("\1\0\0\0\4\0yy", 8),  // more gaps than elements
        std::string("\1\0\0\0\xffyy", 7),  // a gap without an end
        std::string("\1\0\0\0\x8yy", 7),   // past the end
        std::string("\xff\xff\xff\xff\4yy", 7)}) {
    EXPECT_FALSE(is_valid({change.block, payload}, 16, 2));
  }
}

TEST(DeltaBlocks, RefuseAPayloadThatWasDamaged) {
  const std::string base(16, 'x');
  std::string version = base;
  version[8] = 'y';
  const Encoded change = encoded(base, version, 2);
  for (std::size_t i = 0; i < change.payload.size(); ++i) {
    std::string damaged = change.payload;
    damaged[i] ^= '\x10';
    EXPECT_FALSE(is_valid_payload(change.block, bytes_of(damaged), 16, 2)) << i;
  }
}

TEST(DeltaBlocks, SurviveAnyPayload) {
  Random random(4);
  for (int i = 0; i < 20'000; ++i) {
    std::string block = random.bytes(64);
    Encoded change{{.change = BlockChange::sparse}, random.bytes(random.between(0, 24))};
    if (change.payload.size() > 4) {
      std::fill_n(change.payload.begin(), 4, '\0');
      change.payload[0] = static_cast<char>(random.between(0, 8));
      for (std::size_t at = 4; at < change.payload.size(); ++at) {
        if (random.coin()) change.payload[at] = static_cast<char>(random.between(0, 3));
      }
    }
    if (is_valid(change, block.size(), 2)) {
      apply_change(BlockChange::sparse, bytes_of(change.payload), writable(block), 2);
    }
  }
}

// --- a delta of one file -------------------------------------------------------------------------

/// Contents with a tensor of 40,000 bytes (three blocks), a scalar and an empty tensor; and
/// payloads of the first block.
struct Sample {
  DeltaContents contents;
  std::string delta;
};

Sample sample() {
  std::vector<SafeTensor> tensors = {{"w", find_dtype("bfloat16"), {200, 100}, 0, 0},
                                     {"s", find_dtype("float32"), {}, 0, 0},
                                     {"e", find_dtype("uint8"), {0, 3}, 0, 0}};
  DeltaFile file{.name = "model.safetensors",
                 .bytes = 0,
                 .has_tensors = true,
                 .start = encode_safetensors_header(tensors, {}, 8).value(),
                 .table = {},
                 .tensors = tensors,
                 .changes = {}};
  file.bytes = file.start.size() + 40'004;
  const auto none = [](std::uint32_t crc) { return DeltaBlock{.base_crc = crc, .begin = 4}; };
  const std::uint32_t crc = crc32(0, bytes_of("abcd"));
  file.changes = {{.is_in_base = true,
                   .sums = {tensors[0].begin, 0, 16384, {1, 2, 3}, true},
                   .blocks = {none(1), none(2), none(3)}},
                  {.is_in_base = false,
                   .sums = {tensors[1].begin, 0, 16384, {crc}, true},
                   .blocks = {{BlockChange::full, 4, crc, 0, 4}}},
                  {.is_in_base = true, .sums = {}, .blocks = {}}};
  file.table =
      encode_checksum_table(std::vector<RecordSums>{file.changes[0].sums, file.changes[1].sums});
  DeltaFile config{.name = "config.json",
                   .bytes = 2,
                   .has_tensors = false,
                   .start = "{}",
                   .table = {},
                   .tensors = {},
                   .changes = {}};
  Sample made{{"0000000011", {file, config}}, {}};
  made.delta = std::string(kDeltaMagic) + "abcd" + encode_delta_end(made.contents);
  return made;
}

TEST(DeltaContents, AreDecodedAsEncoded) {
  const Sample made = sample();
  const auto decoded = decode_delta(bytes_of(made.delta));
  ASSERT_TRUE(ok(decoded));
  EXPECT_EQ(decoded->base, "0000000011");
  ASSERT_EQ(decoded->files.size(), 2);
  const DeltaFile& file = decoded->files[0];
  EXPECT_EQ(file.name, "model.safetensors");
  EXPECT_EQ(file.bytes, made.contents.files[0].bytes);
  EXPECT_EQ(file.start, made.contents.files[0].start);
  EXPECT_EQ(file.tensors.size(), 3);
  EXPECT_EQ(file.changes, made.contents.files[0].changes);
  EXPECT_EQ(decoded->files[1].start, "{}");
  EXPECT_FALSE(decoded->files[1].has_tensors);
}

TEST(DeltaContents, AreRefusedIfAnyByteWasDamaged) {
  const Sample made = sample();
  for (std::size_t i = 0; i < made.delta.size(); ++i) {
    if (i >= 4 && i < 8) continue;  // the payload, which has a checksum of its own
    std::string damaged = made.delta;
    damaged[i] ^= '\x01';
    EXPECT_TRUE(fails(decode_delta(bytes_of(damaged)), Errc::checksum_mismatch)) << i;
  }
}

TEST(DeltaContents, AreRefusedIfTheFileWasTruncated) {
  const Sample made = sample();
  for (std::size_t bytes = 0; bytes < made.delta.size(); ++bytes) {
    EXPECT_FALSE(decode_delta(bytes_of(made.delta.substr(0, bytes)))) << bytes;
  }
}

TEST(DeltaContents, AreRefusedIfANameLeadsOutOfTheDirectory) {
  for (const char* name :
       {"../a", "/a", "a/b", "..", "", "config.json", "torch_ckpt.checksums", "torch_ckpt.delta"}) {
    Sample made = sample();
    made.contents.files[0].name = name;
    const std::string delta = std::string(kDeltaMagic) + "abcd" + encode_delta_end(made.contents);
    EXPECT_FALSE(decode_delta(bytes_of(delta))) << name;
  }
}

TEST(DeltaContents, AreRefusedIfChecksumsContradictEachOther) {
  for (const std::size_t tensor : {0, 1}) {
    Sample made = sample();
    DeltaBlock& block = made.contents.files[0].changes[tensor].blocks[0];
    (tensor == 0 ? block.base_crc : block.crc) ^= 1;
    const std::string delta = std::string(kDeltaMagic) + "abcd" + encode_delta_end(made.contents);
    EXPECT_TRUE(fails(decode_delta(bytes_of(delta)), Errc::metadata_inconsistent)) << tensor;
  }
}

/// Replaces the checksum of the contents, as an attacker would.
std::string signed_again(std::string delta) {
  const auto footer = delta.size() - 16;
  const std::uint64_t bytes = little_endian(bytes_of(delta.substr(footer, 8)));
  const std::uint64_t before = std::min<std::uint64_t>(bytes, footer);
  std::string crc;
  put(crc, crc32(0, bytes_of(delta.substr(footer - before, before + 8))), 4);
  return delta.replace(footer + 8, 4, crc);
}

TEST(DeltaContents, AreDecodedSafelyWithAnyContents) {
  Random random(5);
  const Sample made = sample();
  for (int i = 0; i < 20'000; ++i) {
    std::string delta = made.delta;
    for (std::uint64_t n = random.between(1, 3); n > 0; --n) {
      delta[random.between(4, delta.size() - 5)] = static_cast<char>(random.between(0, 255));
    }
    const auto decoded = decode_delta(bytes_of(signed_again(delta)));
    if (!decoded) continue;
    for (const DeltaFile& file : decoded->files) {
      for (const DeltaTensor& tensor : file.changes) {
        for (const DeltaBlock& block : tensor.blocks) {
          ASSERT_LE(block.begin + block.bytes, delta.size());
        }
      }
    }
  }
}

}  // namespace
}  // namespace torch_ckpt::format
