#include "staging/device_copy.h"

namespace torch_ckpt::staging {
namespace {
const DeviceSupport* registered = nullptr;
}  // namespace

void register_device_support(const DeviceSupport* support) { registered = support; }

const DeviceSupport* device_support() { return registered; }

}  // namespace torch_ckpt::staging
