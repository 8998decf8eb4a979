#include "fake_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "checked_math.h"
#include "engine/executor.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::test {
namespace {

// The registered functions have no state of their own.
FakeDevice* current = nullptr;

// Far from anything mapped: a host that dereferences it dies.
constexpr std::uintptr_t kFirstAddress = 0x10000;

}  // namespace

class FakeDevice::Copier final : public staging::DeviceCopier {
 public:
  Result<> copy(const staging::Source& source, std::uint64_t offset,
                std::span<std::byte> out) override {
    EXPECT_FALSE(busy_.exchange(true)) << "one copier, two threads";
    const auto result = copy_alone(source, offset, out);
    busy_ = false;
    return result;
  }

 private:
  static Result<> copy_alone(const staging::Source& source, std::uint64_t offset,
                             std::span<std::byte> out) {
    CopyHook hook;
    std::string bytes;
    {
      std::lock_guard lock(current->mutex_);
      hook = current->copy_hook_;
      const auto address = reinterpret_cast<std::uintptr_t>(source.address);
      const auto found = std::find_if(current->tensors_.begin(), current->tensors_.end(),
                                      [&](const Tensor& t) { return t.address == address; });
      if (found == current->tensors_.end()) {
        ADD_FAILURE() << "no tensor at this address";
        return {};
      }
      EXPECT_TRUE(inside(offset, out.size(), found->payload.size()));
      bytes = found->payload.substr(offset, out.size());
    }
    if (hook) {
      if (auto done = hook(source, offset); !done) return done;
    }
    // What is there before the bytes arrive must never be written.
    std::memset(out.data(), 0xdd, out.size());
    std::thread stream([&] {
      for (std::size_t left = bytes.size(); left > 0;) {
        const std::size_t count = std::min<std::size_t>(left, 1000);
        left -= count;
        std::memcpy(out.data() + left, bytes.data() + left, count);
        std::this_thread::yield();
      }
    });
    stream.join();
    return {};
  }

  std::atomic<bool> busy_{false};
};

FakeDevice::FakeDevice() : before_(staging::device_support()) {
  EXPECT_EQ(current, nullptr) << "one at a time";
  current = this;
  // Chunks that another device pinned must not be unpinned by this one.
  staging::ChunkPool::instance().trim(0);
  static constexpr staging::DeviceSupport kSupport{
      [] {
        std::lock_guard lock(current->mutex_);
        ++current->copiers_;
        return std::unique_ptr<staging::DeviceCopier>(std::make_unique<Copier>());
      },
      &FakeDevice::pin, &FakeDevice::unpin};
  staging::register_device_support(&kSupport);
}

FakeDevice::~FakeDevice() {
  engine::join_executor();
  staging::ChunkPool::instance().trim(0);
  EXPECT_EQ(pinned_now(), 0) << "chunks were freed and not unpinned";
  staging::register_device_support(before_);
  current = nullptr;
}

staging::Source FakeDevice::upload(std::string payload) {
  std::lock_guard lock(mutex_);
  staging::Source source;
  source.device = 0;
  source.bytes = payload.size();
  const std::uintptr_t address = kFirstAddress + tensors_.size();
  source.address = reinterpret_cast<const std::byte*>(address);
  tensors_.push_back({address, std::move(payload)});
  return source;
}

void FakeDevice::on_copy(CopyHook hook) {
  std::lock_guard lock(mutex_);
  copy_hook_ = std::move(hook);
}

void FakeDevice::fail_pins(Error error) {
  std::lock_guard lock(mutex_);
  pin_result_ = std::move(error);
}

std::size_t FakeDevice::copiers() const {
  std::lock_guard lock(mutex_);
  return copiers_;
}

std::size_t FakeDevice::pins() const {
  std::lock_guard lock(mutex_);
  return pins_;
}

std::size_t FakeDevice::pinned_now() const {
  std::lock_guard lock(mutex_);
  return pinned_.size();
}

Result<> FakeDevice::pin(std::span<std::byte> memory, int device) {
  std::lock_guard lock(current->mutex_);
  if (!current->pin_result_) return current->pin_result_;
  for (const auto& [address, by] : current->pinned_) EXPECT_NE(address, memory.data()) << "twice";
  current->pinned_.emplace_back(memory.data(), device);
  ++current->pins_;
  return {};
}

void FakeDevice::unpin(std::span<std::byte> memory, int device) {
  std::lock_guard lock(current->mutex_);
  const std::pair<const void*, int> pinned(memory.data(), device);
  EXPECT_EQ(std::erase(current->pinned_, pinned), 1) << "was not pinned, or by another device";
}

}  // namespace torch_ckpt::test
