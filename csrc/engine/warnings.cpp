#include "engine/warnings.h"

#include <utility>

namespace torch_ckpt::engine {

void Warnings::add_once(std::string_view topic, const std::string& text) {
  const os::MutexLock lock(mutex_);
  if (topics_.emplace(topic).second) texts_.push_back(text);
}

std::vector<std::string> Warnings::take() {
  const os::MutexLock lock(mutex_);
  return std::exchange(texts_, {});
}

void Warnings::forget(std::string_view topic) {
  const os::MutexLock lock(mutex_);
  if (const auto found = topics_.find(topic); found != topics_.end()) topics_.erase(found);
}

}  // namespace torch_ckpt::engine
