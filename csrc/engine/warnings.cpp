#include "engine/warnings.h"

#include <set>
#include <utility>

#include "os/fork_guard.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {
namespace {

struct Warnings {
  os::Mutex mutex;
  std::set<std::string, std::less<>> topics TC_GUARDED_BY(mutex);
  std::vector<std::string> texts TC_GUARDED_BY(mutex);  // not taken yet
};

}  // namespace

void warn_once(std::string_view topic, const std::string& text) {
  Warnings& warnings = os::ForkLocal<Warnings>::get();
  const os::MutexLock lock(warnings.mutex);
  if (warnings.topics.emplace(topic).second) warnings.texts.push_back(text);
}

std::vector<std::string> take_warnings() {
  Warnings* const warnings = os::ForkLocal<Warnings>::existing();
  if (warnings == nullptr) return {};
  const os::MutexLock lock(warnings->mutex);
  return std::exchange(warnings->texts, {});
}

void forget_warning(std::string_view topic) {
  Warnings* const warnings = os::ForkLocal<Warnings>::existing();
  if (warnings == nullptr) return;
  const os::MutexLock lock(warnings->mutex);
  if (const auto found = warnings->topics.find(topic); found != warnings->topics.end()) {
    warnings->topics.erase(found);
  }
}

}  // namespace torch_ckpt::engine
