#include "format/pickle_reader.h"

#include <algorithm>
#include <array>

namespace torch_ckpt::format {
namespace {

enum class Argument : std::uint8_t { none, number, counted, two_lines };

struct Form {
  Argument argument = Argument::none;
  std::uint8_t bytes = 0;  // size of the number or count
};

constexpr std::array<Form, 256> kForms = [] {
  std::array<Form, 256> forms{};
  const auto set = [&](Argument argument, std::uint8_t bytes, auto... codes) {
    ((forms[codes] = {argument, bytes}), ...);
  };
  set(Argument::number, 1, op::kProto, op::kBinint1, op::kBinget, op::kBinput);
  set(Argument::number, 2, op::kBinint2);
  set(Argument::number, 4, op::kBinint, op::kLongBinget, op::kLongBinput);
  set(Argument::number, 8, op::kBinfloat, op::kFrame);
  set(Argument::counted, 1, op::kShortBinunicode, op::kShortBinbytes, op::kLong1);
  set(Argument::counted, 4, op::kBinunicode, op::kBinbytes);
  set(Argument::counted, 8, op::kBinunicode8, op::kBinbytes8);
  set(Argument::two_lines, 0, op::kGlobal);
  return forms;
}();

}  // namespace

bool PickleReader::next(PickleToken& token) {
  token = {};
  token.at = position();
  token.code = static_cast<unsigned char>(unread_.number(1));
  const Form form = kForms[token.code];
  switch (form.argument) {
    case Argument::none:
      break;
    case Argument::number:
      token.number = unread_.number(form.bytes);
      break;
    case Argument::counted:
      token.number = unread_.number(form.bytes);
      if (token.code == op::kLong1 && token.number > kIntegerBytes) {
        fail(Errc::pickle_too_large, token.at, "an integer has more than 16 bytes");
        return false;
      }
      token.bytes = unread_.text(token.number);
      break;
    case Argument::two_lines:
      token.bytes = line(token.at);
      if (!error_) token.name = line(token.at);
      break;
  }
  if (unread_.has_failed()) {
    fail(Errc::pickle_truncated, token.at, "the pickle ends within an opcode");
  }
  return !error_;
}

std::string_view PickleReader::line(std::size_t token_at) {
  ByteReader ahead = unread_;
  const auto text = ahead.text(std::min(ahead.left(), kNameBytes + 1));
  const auto end = text.find('\n');
  if (end == std::string_view::npos) {
    if (text.size() > kNameBytes) {
      fail(Errc::pickle_too_large, token_at, "a name has more than 256 bytes");
    } else {
      fail(Errc::pickle_truncated, token_at, "the pickle ends within a name");
    }
    return {};
  }
  return unread_.text(end + 1).substr(0, end);
}

void PickleReader::fail(Errc code, std::size_t at, const char* detail) {
  error_ = Error{code, 0, "pickle", {}, at, detail};
}

}  // namespace torch_ckpt::format
