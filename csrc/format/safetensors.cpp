#include "format/safetensors.h"

#include <algorithm>
#include <array>
#include <boost/json/src.hpp>
#include <optional>
#include <unordered_set>

#include "checked_math.h"
#include "format/json_events.h"
#include "format/little_endian.h"
#include "utf8.h"

namespace torch_ckpt::format {
namespace {

struct DtypeName {
  std::string_view safe;
  std::string_view torch;
};

constexpr DtypeName kNames[] = {
    {"BOOL", "bool"},
    {"U8", "uint8"},
    {"I8", "int8"},
    {"U16", "uint16"},
    {"I16", "int16"},
    {"U32", "uint32"},
    {"I32", "int32"},
    {"U64", "uint64"},
    {"I64", "int64"},
    {"F16", "float16"},
    {"BF16", "bfloat16"},
    {"F32", "float32"},
    {"F64", "float64"},
    {"C64", "complex64"},
    {"F8_E4M3", "float8_e4m3fn"},
    {"F8_E4M3FNUZ", "float8_e4m3fnuz"},
    {"F8_E5M2", "float8_e5m2"},
    {"F8_E5M2FNUZ", "float8_e5m2fnuz"},
    {"F8_E8M0", "float8_e8m0fnu"},
    {"F4", "float4_e2m1fn_x2"},
};

constexpr std::string_view kMetadataKey = "__metadata__";
// The library has no limit. Real files have a few keys.
constexpr std::size_t kMaxMetadataKeys = std::size_t{1} << 16;

const Dtype* dtype_of_safe_name(std::string_view name) {
  const auto* found = std::ranges::find(kNames, name, &DtypeName::safe);
  return found == std::end(kNames) ? nullptr : find_dtype(found->torch);
}

/// True if one element in torch holds two elements of the format.
bool is_packed(const Dtype& dtype) { return dtype.name == "float4_e2m1fn_x2"; }

Error invalid(std::string reason) {
  return format_error(Errc::metadata_inconsistent,
                      "this is not a valid safetensors file: " + std::move(reason));
}

std::string quoted(std::span<const std::uint64_t> numbers) {
  std::string text = "[";
  for (const std::uint64_t number : numbers) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(number);
  }
  return text + "]";
}

/// Returns the size of a tensor in bytes, or nullopt if it overflows.
std::optional<std::uint64_t> bytes_of(std::span<const std::uint64_t> sizes, const Dtype& dtype) {
  // A tensor without elements has 0 bytes, however large its other sizes are.
  if (std::ranges::count(sizes, std::uint64_t{0}) > 0) return 0;
  std::optional<std::uint64_t> bytes = dtype.item_bytes;
  for (const std::uint64_t size : sizes) {
    if (bytes) bytes = checked_mul(*bytes, size);
  }
  return bytes;
}

/// The fields of a tensor's entry, before they are checked.
struct RawEntry {
  std::string name;
  std::string dtype;
  std::optional<std::vector<std::uint64_t>> shape;
  std::optional<std::vector<std::uint64_t>> offsets;
  bool has_dtype = false;
};

// Receives the events of a header.
class HeaderEvents : public JsonEvents {
 public:
  std::vector<RawEntry> entries;
  SafeMetadata metadata;

  bool on_object_begin(Code& code) {
    if (depth_ == 1 && is_in_metadata_) {
      if (has_metadata_) return refuse(code, "the key __metadata__ occurs twice");
      has_metadata_ = true;
    } else if (depth_ == 1) {
      entries.emplace_back().name = key_;
    }
    if (depth_ == 2 && !require_ignored(code)) return false;
    if (numbers_ != nullptr) return refuse_numbers(code);
    ++depth_;
    return true;
  }
  bool on_object_end(std::size_t, Code& code) {
    // Check this now, because a short text could otherwise contain many empty entries.
    return --depth_ != 1 || is_in_metadata_ || require_complete(code);
  }
  bool on_array_begin(Code& code) {
    if (depth_ == 0) return refuse(code, "the header is not a JSON object");
    if (depth_ == 1) return refuse_entry(code);
    if (depth_ == 2) {
      numbers_ = list_of(field_);
      if (numbers_ != nullptr && numbers_->has_value()) return refuse_repeated(code);
      if (numbers_ != nullptr) {
        numbers_->emplace();
      } else if (!require_ignored(code)) {
        return false;
      }
    } else if (numbers_ != nullptr) {
      return refuse_numbers(code);
    }
    ++depth_;
    return true;
  }
  bool on_array_end(std::size_t, Code&) {
    if (--depth_ == 2) numbers_ = nullptr;
    return true;
  }

  bool on_key(View part, std::size_t, Code&) {
    std::string key = joined(part);
    if (depth_ == 1) {
      key_ = std::move(key);
      is_in_metadata_ = key_ == kMetadataKey;
    } else if (depth_ == 2) {
      field_ = std::move(key);
    }
    return true;
  }
  bool on_string(View part, std::size_t, Code& code) {
    std::string text = joined(part);
    if (depth_ == 2 && is_in_metadata_) {
      if (metadata.size() == kMaxMetadataKeys) {
        return refuse(code,
                      "__metadata__ has more than " + std::to_string(kMaxMetadataKeys) + " keys");
      }
      metadata.emplace_back(field_, std::move(text));
      return true;
    }
    if (depth_ == 2 && field_ == "dtype") {
      if (entries.back().has_dtype) return refuse_repeated(code);
      entries.back().dtype = std::move(text);
      entries.back().has_dtype = true;
      return true;
    }
    return scalar(code);
  }
  bool on_int64(std::int64_t value, View, Code& code) {
    if (value < 0) return scalar(code);
    return on_uint64(static_cast<std::uint64_t>(value), {}, code);
  }
  bool on_uint64(std::uint64_t value, View, Code& code) {
    if (depth_ != 3 || numbers_ == nullptr) return scalar(code);
    if ((*numbers_)->size() == kMaxSafeDimensions) return refuse_numbers(code);
    (*numbers_)->push_back(value);
    return true;
  }
  bool on_double(double, View, Code& code) { return scalar(code); }
  bool on_bool(bool, Code& code) { return scalar(code); }
  bool on_null(Code& code) { return scalar(code); }

 private:
  std::optional<std::vector<std::uint64_t>>* list_of(std::string_view field) {
    if (is_in_metadata_) return nullptr;
    if (field == "shape") return &entries.back().shape;
    if (field == "data_offsets") return &entries.back().offsets;
    return nullptr;
  }
  bool refuse_entry(Code& code) {
    if (is_in_metadata_) return refuse_metadata(code);
    return refuse(code, key_ + ": its entry is not a JSON object");
  }
  bool require_complete(Code& code) {
    const RawEntry& entry = entries.back();
    if (!entry.has_dtype) return refuse(code, key_ + ": its dtype is not a string");
    field_ = entry.shape ? "data_offsets" : "shape";
    if (!entry.shape || !entry.offsets || entry.offsets->size() != 2) return refuse_numbers(code);
    return true;
  }
  bool refuse_metadata(Code& code) {
    return refuse(code, "__metadata__ is not a JSON object whose values are strings");
  }
  bool refuse_repeated(Code& code) {
    return refuse(code, key_ + ": the key " + field_ + " occurs twice");
  }
  bool refuse_numbers(Code& code) {
    if (field_ == "shape") {
      return refuse(code, key_ + ": its shape is not a list of at most " +
                              std::to_string(kMaxSafeDimensions) + " sizes");
    }
    return refuse(code, key_ + ": its data_offsets are not two sizes");
  }
  /// Accepts a value that is not needed.
  bool require_ignored(Code& code) {
    if (is_in_metadata_) return refuse_metadata(code);
    if (field_ == "dtype") return refuse(code, key_ + ": its dtype is not a string");
    if (list_of(field_) != nullptr) return refuse_numbers(code);
    return true;
  }
  bool scalar(Code& code) {
    if (depth_ == 0) return refuse(code, "the header is not a JSON object");
    if (depth_ == 1) return refuse_entry(code);
    if (depth_ == 2) return require_ignored(code);
    return numbers_ == nullptr || refuse_numbers(code);
  }

  std::size_t depth_ = 0;
  bool is_in_metadata_ = false;
  bool has_metadata_ = false;
  std::string key_;                                               // name of the tensor
  std::string field_;                                             // key in the tensor's entry
  std::optional<std::vector<std::uint64_t>>* numbers_ = nullptr;  // the list that is being read
};

/// Checks a complete entry. The offset of the tensor is relative to the data.
Result<SafeTensor> tensor_of(RawEntry entry, std::uint64_t data_bytes) {
  const auto refuse = [&](const std::string& reason) {
    return invalid(entry.name + ": " + reason);
  };
  const Dtype* dtype = dtype_of_safe_name(entry.dtype);
  if (dtype == nullptr) return refuse("the dtype \"" + entry.dtype + "\" is not known");
  const std::uint64_t begin = (*entry.offsets)[0];
  const std::uint64_t end = (*entry.offsets)[1];
  if (begin > end || end > data_bytes) {
    return refuse("its data_offsets " + quoted(*entry.offsets) + " exceed the " +
                  std::to_string(data_bytes) + " bytes of data");
  }
  std::vector<std::uint64_t> sizes = *entry.shape;
  const bool can_pack = !is_packed(*dtype) || (!sizes.empty() && sizes.back() % 2 == 0);
  if (is_packed(*dtype) && can_pack) sizes.back() /= 2;
  if (!can_pack || bytes_of(sizes, *dtype) != end - begin) {
    return refuse("a " + entry.dtype + " tensor of shape " + quoted(*entry.shape) +
                  " does not take " + std::to_string(end - begin) + " bytes");
  }
  return SafeTensor{std::move(entry.name), dtype, std::move(sizes), begin, end - begin};
}

/// Returns a name that occurs twice.
template <class Items, class NameOf>
std::optional<std::string_view> repeated(const Items& items, NameOf name_of) {
  std::unordered_set<std::string_view> seen;
  seen.reserve(items.size());
  for (const auto& item : items) {
    if (!seen.insert(name_of(item)).second) return name_of(item);
  }
  return std::nullopt;
}

}  // namespace

void append_json_string(std::string& out, std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      out += "\\u00";
      out += kDigits[static_cast<std::size_t>(c) >> 4];
      out += kDigits[static_cast<std::size_t>(c) & 0xf];
    } else {
      out += c;
    }
  }
  out += '"';
}

std::string_view safe_dtype_name(const Dtype& dtype) {
  const auto* found = std::ranges::find(kNames, dtype.name, &DtypeName::torch);
  return found == std::end(kNames) ? std::string_view() : found->safe;
}

Result<> require_safe(std::string_view name, const Dtype* dtype,
                      std::span<const std::uint64_t> sizes) {
  const auto refuse = [&](std::string_view reason) {
    Error error = format_error(Errc::unsavable, std::string(reason));
    error.subject = is_utf8(name) ? name : "a name that is not UTF-8";
    return error;
  };
  if (!is_utf8(name)) return refuse("safetensors files hold only UTF-8 names; rename the tensor");
  if (name == kMetadataKey) {
    return refuse("safetensors files reserve this name; rename the tensor");
  }
  if (dtype == nullptr || safe_dtype_name(*dtype).empty()) {
    return refuse("safetensors files cannot hold a tensor of dtype " +
                  std::string(dtype == nullptr ? "unknown to the engine" : dtype->name));
  }
  if (is_packed(*dtype) && sizes.empty()) {
    return refuse("safetensors files cannot hold a zero-dimensional " + std::string(dtype->name) +
                  " tensor, because its elements are packed in pairs along the last dimension");
  }
  if (sizes.size() > kMaxSafeDimensions) {
    return refuse("the tensor has " + std::to_string(sizes.size()) +
                  " dimensions, but safetensors files hold tensors of at most " +
                  std::to_string(kMaxSafeDimensions));
  }
  return {};
}

Result<std::string> encode_safetensors_header(std::span<SafeTensor> tensors,
                                              const SafeMetadata& metadata, std::size_t alignment) {
  std::string json = "{";
  const auto add = [&](std::string_view name, std::string_view value) {
    if (json.size() > 1) json += ',';
    append_json_string(json, name);
    json += ':';
    json += value;
  };
  if (!metadata.empty()) {
    std::string text = "{";
    for (const auto& [key, value] : metadata) {
      if (text.size() > 1) text += ',';
      append_json_string(text, key);
      text += ':';
      append_json_string(text, value);
    }
    add(kMetadataKey, text + "}");
  }
  std::uint64_t begin = 0;
  for (SafeTensor& tensor : tensors) {
    std::vector<std::uint64_t> shape = tensor.sizes;
    if (is_packed(*tensor.dtype)) shape.back() *= 2;
    tensor.bytes = bytes_of(tensor.sizes, *tensor.dtype).value();
    tensor.begin = begin;
    begin += tensor.bytes;
    std::string text = "{\"dtype\":";
    append_json_string(text, safe_dtype_name(*tensor.dtype));
    text += ",\"shape\":" + quoted(shape);
    text += ",\"data_offsets\":[" + std::to_string(tensor.begin) + "," + std::to_string(begin);
    add(tensor.name, text + "]}");
  }
  json += '}';
  const std::uint64_t data = align_up(kSafeLengthBytes + json.size(), alignment);
  json.resize(data - kSafeLengthBytes, ' ');
  if (json.size() > kMaxSafeHeaderBytes) {
    return format_error(Errc::unsavable, "the header of the safetensors file would have " +
                                             std::to_string(json.size()) + " bytes for " +
                                             std::to_string(tensors.size()) +
                                             " tensors, but readers accept at most " +
                                             std::to_string(kMaxSafeHeaderBytes) +
                                             "; pass a smaller max_shard_size");
  }
  for (SafeTensor& tensor : tensors) tensor.begin += data;
  std::string header;
  put(header, json.size(), kSafeLengthBytes);
  return header + json;
}

Result<std::uint64_t> safetensors_header_bytes(std::span<const std::byte> begin,
                                               std::uint64_t file_bytes) {
  const std::uint64_t bytes = little_endian(begin.first(std::min(begin.size(), kSafeLengthBytes)));
  if (begin.size() < kSafeLengthBytes || !inside(kSafeLengthBytes, bytes, file_bytes)) {
    return invalid("the file is shorter than its header");
  }
  if (bytes > kMaxSafeHeaderBytes) {
    return invalid("the header has " + std::to_string(bytes) + " bytes, more than the limit of " +
                   std::to_string(kMaxSafeHeaderBytes));
  }
  return bytes;
}

Result<SafetensorsHeader> decode_safetensors_header(std::string_view json,
                                                    std::uint64_t file_bytes) {
  boost::json::basic_parser<HeaderEvents> parser(json_options());
  std::string problem = parse_json_object(json, parser);
  if (!problem.empty()) return invalid("the header: " + problem);
  HeaderEvents& found = parser.handler();
  const auto first = [](const auto& item) -> std::string_view { return item.first; };
  const auto name_of = [](const RawEntry& entry) -> std::string_view { return entry.name; };
  auto twice = repeated(found.entries, name_of);
  if (!twice) twice = repeated(found.metadata, first);
  if (twice) return invalid("the key " + std::string(*twice) + " occurs twice");

  const std::uint64_t data = kSafeLengthBytes + json.size();
  const std::uint64_t data_bytes = file_bytes - data;
  SafetensorsHeader header;
  header.metadata = std::move(found.metadata);
  header.tensors.reserve(found.entries.size());
  for (RawEntry& entry : found.entries) {
    auto tensor = tensor_of(std::move(entry), data_bytes);
    if (!tensor) return tensor.error();
    header.tensors.push_back(std::move(*tensor));
  }
  std::ranges::sort(header.tensors, [](const SafeTensor& a, const SafeTensor& b) {
    return std::tie(a.begin, a.bytes) < std::tie(b.begin, b.bytes);
  });
  std::uint64_t end = 0;
  for (SafeTensor& tensor : header.tensors) {
    if (tensor.begin != end) {
      return invalid(tensor.name + ": its data starts at " + std::to_string(tensor.begin) +
                     ", but the preceding data ends at " + std::to_string(end));
    }
    end += tensor.bytes;
    tensor.begin += data;
  }
  if (end != data_bytes) {
    return invalid("the tensors take " + std::to_string(end) + " bytes, but the file has " +
                   std::to_string(data_bytes) + " bytes of data");
  }
  return header;
}

}  // namespace torch_ckpt::format
