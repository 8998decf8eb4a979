#include "format/safe_checksums.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "format/crc32.h"
#include "format/little_endian.h"
#include "support.h"

namespace torch_ckpt::format {
namespace {

using namespace test;

std::vector<SafeChecksums> some_files() {
  return {{"model-1.safetensors", 1 << 20, 0xdeadbeef, "a table"},
          {"model-2.safetensors", 0, 0, ""}};
}

/// Returns the contents of a file with a valid CRC-32.
std::string with_crc(std::string body) {
  put(body, crc32(0, bytes_of(body)), 4);
  return body;
}

TEST(SafeChecksums, AreDecodedAsTheyWereEncoded) {
  for (const auto& files : {some_files(), std::vector<SafeChecksums>()}) {
    const auto decoded = decode_safe_checksums(bytes_of(encode_safe_checksums(files)));
    ASSERT_TRUE(ok(decoded));
    EXPECT_EQ(*decoded, files);
  }
}

TEST(SafeChecksums, AreRefusedIfAnyByteIsChanged) {
  const std::string encoded = encode_safe_checksums(some_files());
  for (std::size_t at = 0; at < encoded.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = encoded;
      changed[at] = static_cast<char>(changed[at] ^ (1 << bit));
      EXPECT_TRUE(fails(decode_safe_checksums(bytes_of(changed)), Errc::checksum_mismatch)) << at;
    }
  }
}

TEST(SafeChecksums, AreRefusedIfTheFileIsTruncatedAnywhere) {
  const std::string encoded = encode_safe_checksums(some_files());
  for (std::size_t length = 0; length < encoded.size(); ++length) {
    EXPECT_TRUE(
        fails(decode_safe_checksums(bytes_of(encoded.substr(0, length))), Errc::checksum_mismatch))
        << length;
  }
}

TEST(SafeChecksums, AreRefusedIfLengthsDoNotMatchTheContents) {
  const std::string encoded = encode_safe_checksums(some_files());
  const std::string body = encoded.substr(0, encoded.size() - 4);
  ASSERT_TRUE(ok(decode_safe_checksums(bytes_of(with_crc(body)))));
  std::vector<std::string> bodies{body + "x", body.substr(0, body.size() - 1), "TCF2", "TCF1", ""};
  // The number of files, and the length of the first name.
  for (const std::size_t at : {4, 8}) {
    for (const char* const number : {"\xff\xff\xff\xff", "\x03\x00\x00\x00"}) {
      bodies.push_back(body);
      bodies.back().replace(at, 4, number, 4);
    }
  }
  for (const std::string& changed : bodies) {
    EXPECT_TRUE(
        fails(decode_safe_checksums(bytes_of(with_crc(changed))), Errc::table_inconsistent));
  }
}

}  // namespace
}  // namespace torch_ckpt::format
