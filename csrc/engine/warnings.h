#pragma once

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "os/mutex.h"

namespace torch_ckpt::engine {

// What the engine has to tell people although it goes on, each once. The bindings take it and tell
// it. Safe for concurrent use by multiple threads.
class Warnings {
 public:
  /// Only the first text on a topic is kept.
  void add_once(std::string_view topic, const std::string& text);

  /// add_once() as a function, for code that does not know this class. It outlives no Warnings.
  std::function<void(const std::string& topic, const std::string& text)> once() {
    return [this](const std::string& topic, const std::string& text) { add_once(topic, text); };
  }

  /// All that nobody has taken yet, in order.
  std::vector<std::string> take();

  /// Whatever there was on the topic, it may be told again.
  void forget(std::string_view topic);

 private:
  os::Mutex mutex_;
  std::set<std::string, std::less<>> topics_ TC_GUARDED_BY(mutex_);
  std::vector<std::string> texts_ TC_GUARDED_BY(mutex_);  // not taken yet
};

}  // namespace torch_ckpt::engine
