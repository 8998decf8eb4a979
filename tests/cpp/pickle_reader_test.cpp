#include "format/pickle_reader.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace torch_ckpt::format {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

/// Returns the error of reading the first token.
Error refusal(std::string_view pickle) {
  PickleReader reader(bytes_of(pickle));
  PickleToken token;
  EXPECT_FALSE(reader.next(token));
  return reader.error().value_or(Error{});
}

TEST(PickleReader, ReadsTheOffsetAndArgumentOfEachToken) {
  using namespace std::string_view_literals;
  constexpr std::string_view kPickle =
      "\x80\x02"
      "ctorch\nSize\n"
      "X\x03\0\0\0abc"
      "M\x01\x02."sv;
  PickleReader reader(bytes_of(kPickle));
  std::vector<PickleToken> tokens(5);
  for (PickleToken& token : tokens) ASSERT_TRUE(reader.next(token));
  EXPECT_EQ(tokens[0].number, 2);
  EXPECT_EQ(tokens[1].bytes, "torch");
  EXPECT_EQ(tokens[1].name, "Size");
  EXPECT_EQ(tokens[2].at, 14);
  EXPECT_EQ(tokens[2].bytes, "abc");
  EXPECT_EQ(tokens[3].number, 0x0201);
  EXPECT_EQ(tokens[4].code, op::kStop);
  EXPECT_EQ(reader.position(), kPickle.size());
}

TEST(PickleReader, RejectsATruncatedToken) {
  using namespace std::string_view_literals;
  for (const std::string_view pickle :
       {""sv, "J\0\0\0"sv, "X\x04\0\0\0abc"sv, "\x8e\xff\xff\xff\xff\xff\xff\xff\xff"sv,
        "ctorch\nSize"sv}) {
    EXPECT_EQ(refusal(pickle).code, Errc::pickle_truncated);
  }
}

TEST(PickleReader, RejectsLongNamesAndIntegers) {
  EXPECT_EQ(refusal("c" + std::string(PickleReader::kNameBytes + 1, 'n')).code,
            Errc::pickle_too_large);
  EXPECT_EQ(refusal("\x8a\x11" + std::string(17, '\1')).code, Errc::pickle_too_large);
}

}  // namespace
}  // namespace torch_ckpt::format
