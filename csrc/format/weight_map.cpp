#include "format/weight_map.h"

#include "format/json_events.h"

namespace torch_ckpt::format {
namespace {

// Receives the events of an index.
class WeightMapEvents : public JsonEvents {
 public:
  WeightMap files;
  bool has_map = false;

  bool on_object_begin(Code& code) {
    if (depth_ == 1 && key_ == "weight_map") {
      if (has_map) return refuse(code, "the key weight_map occurs twice");
      has_map = true;
      is_in_map_ = true;
    } else if (!ignore(code)) {
      return false;
    }
    ++depth_;
    return true;
  }
  bool on_object_end(std::size_t, Code&) {
    if (--depth_ == 1) is_in_map_ = false;
    return true;
  }
  bool on_array_begin(Code& code) {
    ++depth_;
    return ignore(code);
  }
  bool on_array_end(std::size_t, Code&) {
    --depth_;
    return true;
  }
  bool on_key(View part, std::size_t, Code&) {
    key_ = joined(part);
    return true;
  }
  bool on_string(View part, std::size_t, Code& code) {
    std::string file = joined(part);
    if (!is_in_map_) return ignore(code);
    files.emplace_back(std::move(key_), std::move(file));
    return true;
  }
  bool on_int64(std::int64_t, View, Code& code) { return ignore(code); }
  bool on_uint64(std::uint64_t, View, Code& code) { return ignore(code); }
  bool on_double(double, View, Code& code) { return ignore(code); }
  bool on_bool(bool, Code& code) { return ignore(code); }
  bool on_null(Code& code) { return ignore(code); }

 private:
  /// Accepts a value outside the map.
  bool ignore(Code& code) {
    return !is_in_map_ || refuse(code, "the values of weight_map are not file names");
  }

  std::size_t depth_ = 0;
  bool is_in_map_ = false;
  std::string key_;
};

}  // namespace

Result<WeightMap> decode_weight_map(std::string_view json) {
  boost::json::basic_parser<WeightMapEvents> parser(json_options());
  std::string problem = parse_json_object(json, parser);
  WeightMapEvents& events = parser.handler();
  if (problem.empty() && !events.has_map) problem = "it has no weight_map";
  if (problem.empty()) return std::move(events.files);
  return format_error(Errc::metadata_inconsistent,
                      "this is not a valid index of safetensors files: " + problem);
}

}  // namespace torch_ckpt::format
