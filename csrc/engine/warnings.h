#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace torch_ckpt::engine {

// What the engine has to tell people although it goes on, each once in a process. The bindings take
// it and tell it. Safe for concurrent use by multiple threads.

/// Only the first text on a topic is kept.
void warn_once(std::string_view topic, const std::string& text);

/// All that nobody has taken yet, in order.
std::vector<std::string> take_warnings();

/// Whatever there was on the topic, it may be told again.
void forget_warning(std::string_view topic);

}  // namespace torch_ckpt::engine
