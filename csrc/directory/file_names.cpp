#include "directory/file_names.h"

#include <algorithm>
#include <random>

namespace torch_ckpt::directory {
namespace {

constexpr std::string_view kMetadata = ".metadata";
constexpr std::string_view kData = ".distcp";
constexpr std::string_view kTemporary = ".tmp";

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool remove_end(std::string_view& text, std::string_view end) {
  if (!text.ends_with(end)) return false;
  text.remove_suffix(end.size());
  return true;
}

/// Removes the digits at the end of `text` and returns them.
std::string_view take_number(std::string_view& text) {
  std::size_t begin = text.size();
  while (begin > 0 && is_digit(text[begin - 1])) --begin;
  const std::string_view number = text.substr(begin);
  text.remove_suffix(number.size());
  return number;
}

/// Returns the rank of a text that ends in "__{rank}", or an empty text if it does not.
std::string_view rank_at_end(std::string_view text) {
  const std::string_view rank = take_number(text);
  return text.ends_with("__") ? rank : std::string_view();
}

/// Returns the rank of a prefix that ends in "__{rank}_" or "__{rank}_{tag}_", or an empty text.
std::string_view rank_of_prefix(std::string_view prefix) {
  if (!remove_end(prefix, "_")) return {};
  if (const auto rank = rank_at_end(prefix); !rank.empty()) return rank;
  if (prefix.size() < kTagDigits || !is_hex(prefix.substr(prefix.size() - kTagDigits))) return {};
  prefix.remove_suffix(kTagDigits);
  return remove_end(prefix, "_") ? rank_at_end(prefix) : std::string_view();
}

}  // namespace

bool is_hex(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return is_digit(c) || (c >= 'a' && c <= 'f'); });
}

FileName parse_file_name(std::string_view name) {
  if (std::string_view rest = name; remove_end(rest, kData)) {
    if (take_number(rest).empty()) return {};
    const auto rank = rank_of_prefix(rest);
    return rank.empty() ? FileName{} : FileName{FileKind::data, rank};
  }
  std::string_view rest = name;
  if (rest.size() > kSuffixDigits && is_hex(rest.substr(rest.size() - kSuffixDigits)) &&
      rest[rest.size() - kSuffixDigits - 1] == '-') {
    rest.remove_suffix(kSuffixDigits + 1);
    if (!rest.ends_with(kTemporary)) return {};
  }
  const FileKind kind = remove_end(rest, kTemporary) ? FileKind::temporary : FileKind::metadata;
  if (!remove_end(rest, kMetadata)) return {};
  if (rest.empty()) return {kind, {}};
  const auto rank = rank_at_end(rest);
  return rank.empty() || rest.size() != rank.size() + 2 ? FileName{} : FileName{kind, rank};
}

std::string metadata_name(std::optional<int> rank) {
  return (rank ? "__" + std::to_string(*rank) : std::string()) + std::string(kMetadata);
}

std::string random_hex(std::size_t digits) {
  std::random_device entropy;
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (unsigned value = 0; digits > 0; --digits, value >>= 4) {
    if (text.size() % 8 == 0) value = entropy();
    text += kDigits[value & 15];
  }
  return text;
}

Result<std::string> choose_prefix(const os::Directory& directory, const std::string& prefix,
                                  const std::set<std::string>& taken) {
  const std::string rank(rank_of_prefix(prefix));
  if (rank.empty() || !prefix.starts_with("__" + rank + "_")) return prefix;
  auto names = directory.names();
  if (!names) return names.error();
  const bool is_taken =
      taken.contains(prefix) || std::any_of(names->begin(), names->end(), [&](const auto& name) {
        const FileName file = parse_file_name(name);
        return file.kind == FileKind::metadata ||
               (file.kind == FileKind::data && file.rank == rank);
      });
  // Replace an existing tag as well: a reused plan has the tag of an earlier save.
  return is_taken ? "__" + rank + "_" + random_hex(kTagDigits) + "_" : prefix;
}

}  // namespace torch_ckpt::directory
