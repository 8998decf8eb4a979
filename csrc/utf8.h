#pragma once

#include <cstddef>
#include <string_view>

namespace torch_ckpt {

/// Returns true if Python can unpickle these bytes as a str: UTF-8 without overlong encodings, but
/// with surrogates.
inline bool is_text(std::string_view bytes) {
  for (std::size_t i = 0; i < bytes.size();) {
    const auto lead = static_cast<unsigned char>(bytes[i]);
    if (lead < 0x80) {
      ++i;
      continue;
    }
    const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || i + length > bytes.size()) return false;
    for (std::size_t k = 1; k < length; ++k) {
      if ((static_cast<unsigned char>(bytes[i + k]) & 0xc0) != 0x80) return false;
    }
    const auto second = static_cast<unsigned char>(bytes[i + 1]);
    if ((lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90) ||
        (lead == 0xf4 && second >= 0x90)) {
      return false;
    }
    i += length;
  }
  return true;
}

/// Returns true if a text has an encoded surrogate, which UTF-8 does not permit.
inline bool has_surrogates(std::string_view text) {
  for (std::size_t i = 0; i + 1 < text.size(); ++i) {
    if (text[i] == '\xed' && static_cast<unsigned char>(text[i + 1]) >= 0xa0) return true;
  }
  return false;
}

inline bool is_utf8(std::string_view bytes) { return is_text(bytes) && !has_surrogates(bytes); }

}  // namespace torch_ckpt
