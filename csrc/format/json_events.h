#pragma once

#include <boost/json/basic_parser_impl.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace torch_ckpt::format {

// Base of the receivers of a JSON parser's events. Accepts all events, and joins the parts of keys
// and strings. A receiver defines the events that it needs: on_object_begin(), on_object_end(),
// on_array_begin(), on_array_end(), on_key(), on_string(), on_int64(), on_uint64(), on_double(),
// on_bool() and on_null().
class JsonEvents {
 public:
  using Code = boost::system::error_code;
  using View = boost::json::string_view;

  static constexpr std::size_t max_object_size = ~std::size_t{0};
  static constexpr std::size_t max_array_size = ~std::size_t{0};
  static constexpr std::size_t max_key_size = ~std::size_t{0};
  static constexpr std::size_t max_string_size = ~std::size_t{0};

  bool on_document_begin(Code&) { return true; }
  bool on_document_end(Code&) { return true; }
  bool on_comment_part(View, Code&) { return true; }
  bool on_comment(View, Code&) { return true; }
  bool on_number_part(View, Code&) { return true; }
  bool on_key_part(View part, std::size_t, Code&) { return add(part); }
  bool on_string_part(View part, std::size_t, Code&) { return add(part); }

  /// The reason why the receiver has stopped the parser; empty if it has not.
  const std::string& problem() const { return problem_; }

 protected:
  /// Stops the parser. Returns false, which events return to stop it.
  bool refuse(Code& code, std::string problem) {
    problem_ = std::move(problem);
    code = boost::json::error::exception;
    return false;
  }
  /// Returns a key or string, given its last part.
  std::string joined(View last) {
    add(last);
    return std::exchange(text_, {});
  }

 private:
  bool add(View part) {
    text_.append(part.data(), part.size());
    return true;
  }

  std::string problem_;
  std::string text_;  // parts of a key or string so far
};

/// Passes the events of a JSON object, which only white space may follow, to the parser's receiver.
/// Returns the reason why the text is refused; empty if it is accepted.
template <class Events>
std::string parse_json_object(std::string_view json, boost::json::basic_parser<Events>& parser) {
  if (!json.starts_with('{')) return "it is not a JSON object";
  JsonEvents::Code code;
  const std::size_t parsed = parser.write_some(false, json.data(), json.size(), code);
  if (!parser.handler().problem().empty()) return parser.handler().problem();
  // The parser stops after the object.
  if (!code && json.find_first_not_of(" \t\r\n", parsed) != std::string_view::npos) {
    code = boost::json::error::extra_data;
  }
  return code ? "it is not valid JSON: " + code.message() : std::string();
}

/// Limits the depth of arrays and objects, because the parser's memory grows with it.
inline boost::json::parse_options json_options() {
  boost::json::parse_options options;
  options.max_depth = 32;
  return options;
}

}  // namespace torch_ckpt::format
