#include "staging/device_copy.h"

#include <utility>

#include "os/fork_guard.h"

namespace torch_ckpt::staging {
namespace {
const DeviceSupport* registered = nullptr;
}  // namespace

void register_device_support(const DeviceSupport* support) { registered = support; }

const DeviceSupport* device_support() { return registered; }

Result<std::shared_ptr<DeviceCopier>> make_copier(const std::vector<ReadyEvent>& ready, Warn warn) {
  if (registered == nullptr) {
    return format_error(Errc::invalid_argument,
                        "a tensor is on a device, but torch has loaded no CUDA runtime "
                        "(libcudart.so) that torch_ckpt can use; move the tensor to the CPU, or "
                        "install torch from PyPI or pytorch.org");
  }
  std::unique_ptr<DeviceCopier> copier = registered->make_copier(ready, std::move(warn));
  return std::shared_ptr<DeviceCopier>(copier.release(),
                                       [process = os::ProcessMark()](const DeviceCopier* made) {
                                         if (!process.inherited()) delete made;
                                       });
}

RecordedEvents::~RecordedEvents() {
  for (const ReadyEvent& recorded : events_) {
    registered->destroy_event(recorded.device, recorded.event);
  }
}

Result<> RecordedEvents::record(int device, void* stream) {
  ReadyEvent& added = events_.emplace_back();
  auto event = registered->record_event(device, stream);
  if (!event) {
    events_.pop_back();
    return event.error();
  }
  added = {device, *event};
  return {};
}

}  // namespace torch_ckpt::staging
