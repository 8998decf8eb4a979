#pragma once

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "os/mutex.h"

namespace torch_ckpt::engine {

// Warnings for the user, at most one per topic. The Python bindings take and issue them. Safe for
// concurrent use by multiple threads.
class Warnings {
 public:
  /// Adds a warning, unless one was already added for the topic.
  void add_once(std::string_view topic, const std::string& text);

  /// Returns add_once() as a function, for code that does not depend on this class. The Warnings
  /// must outlive the function.
  std::function<void(const std::string& topic, const std::string& text)> callback() {
    return [this](const std::string& topic, const std::string& text) { add_once(topic, text); };
  }

  /// Removes and returns all pending warnings, oldest first.
  std::vector<std::string> take();

  /// Allows another warning for the topic.
  void forget(std::string_view topic);

 private:
  os::Mutex mutex_;
  std::set<std::string, std::less<>> topics_ TC_GUARDED_BY(mutex_);
  std::vector<std::string> texts_ TC_GUARDED_BY(mutex_);  // pending
};

}  // namespace torch_ckpt::engine
