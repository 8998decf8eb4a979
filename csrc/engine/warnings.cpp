#include "engine/warnings.h"

#include <mutex>
#include <set>
#include <utility>

#include "os/fork_guard.h"

namespace torch_ckpt::engine {
namespace {

struct Warnings {
  std::mutex mutex;
  std::set<std::string, std::less<>> topics;  // guarded by mutex
  std::vector<std::string> texts;             // not taken yet; guarded by mutex
};

}  // namespace

void warn_once(std::string_view topic, const std::string& text) {
  Warnings& warnings = os::ForkLocal<Warnings>::get();
  const std::lock_guard lock(warnings.mutex);
  if (warnings.topics.emplace(topic).second) warnings.texts.push_back(text);
}

std::vector<std::string> take_warnings() {
  Warnings* const warnings = os::ForkLocal<Warnings>::existing();
  if (warnings == nullptr) return {};
  const std::lock_guard lock(warnings->mutex);
  return std::exchange(warnings->texts, {});
}

void forget_warning(std::string_view topic) {
  Warnings* const warnings = os::ForkLocal<Warnings>::existing();
  if (warnings == nullptr) return;
  const std::lock_guard lock(warnings->mutex);
  if (const auto found = warnings->topics.find(topic); found != warnings->topics.end()) {
    warnings->topics.erase(found);
  }
}

}  // namespace torch_ckpt::engine
