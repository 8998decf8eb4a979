#include "fake_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <latch>
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

// A stream of its own: submissions arrive one after another, late, in a thread.
class FakeDevice::Copier final : public staging::DeviceCopier {
 public:
  explicit Copier(const std::vector<staging::DeviceMoment>& ready) : ready_(ready) {}
  ~Copier() override {
    while (!submissions_.empty()) static_cast<void>(wait_oldest());
  }

  Result<> submit(std::span<const staging::DeviceRun> runs) override {
    EXPECT_FALSE(busy_.exchange(true)) << "one copier, two threads";
    const auto result = submit_alone(runs);
    busy_ = false;
    return result;
  }

  Result<> wait_oldest() override {
    EXPECT_FALSE(submissions_.empty()) << "nothing is left to be waited for";
    submissions_.front().join();
    submissions_.pop_front();
    std::lock_guard lock(current->mutex_);
    return current->wait_result_;
  }

  Result<> hold_back(int device, void* stream) override {
    std::lock_guard lock(current->mutex_);
    current->held_back_.emplace_back(device, stream);
    return {};
  }

 private:
  Result<> submit_alone(std::span<const staging::DeviceRun> runs) {
    std::vector<std::pair<std::span<std::byte>, std::string>> copies;
    CopyHook hook;
    {
      std::lock_guard lock(current->mutex_);
      hook = current->copy_hook_;
      ++current->submissions_;
    }
    for (const staging::DeviceRun& run : runs) {
      if (hook) {
        if (auto done = hook(*run.source, run.offset); !done) return done;
      }
      // What is there before the bytes arrive must never be written.
      std::memset(run.out.data(), 0xdd, run.out.size());
      const auto address = reinterpret_cast<std::uintptr_t>(run.source->address);
      copies.emplace_back(run.out, current->payload_at(address, run.offset, run.out.size()));
    }
    submissions_.emplace_back(
        [copies = std::move(copies), moments = ready_, copied = current->arrive_hook()] {
          for (const auto& moment : moments) static_cast<std::latch*>(moment.event)->wait();
          if (copied) copied();
          for (const auto& [out, bytes] : copies) {
            for (std::size_t left = bytes.size(); left > 0;) {
              const std::size_t count = std::min<std::size_t>(left, 1000);
              left -= count;
              std::memcpy(out.data() + left, bytes.data() + left, count);
              std::this_thread::yield();
            }
          }
        });
    return {};
  }

  const std::vector<staging::DeviceMoment> ready_;
  std::deque<std::thread> submissions_;
  std::atomic<bool> busy_{false};
};

std::string FakeDevice::payload_at(std::uintptr_t address, std::uint64_t offset,
                                   std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(tensors_.begin(), tensors_.end(),
                                  [&](const Tensor& t) { return t.address == address; });
  if (found == tensors_.end()) {
    ADD_FAILURE() << "no tensor at this address";
    return std::string(bytes, '?');
  }
  EXPECT_TRUE(inside(offset, bytes, found->payload.size()));
  return found->payload.substr(offset, bytes);
}

std::function<void()> FakeDevice::arrive_hook() const {
  std::lock_guard lock(mutex_);
  return arrive_hook_;
}

FakeDevice::FakeDevice() : before_(staging::device_support()) {
  EXPECT_EQ(current, nullptr) << "one at a time";
  current = this;
  // Chunks that another device pinned must not be unpinned by this one.
  staging::ChunkPool::instance().trim(0);
  static constexpr staging::DeviceSupport kSupport{
      [](const std::vector<staging::DeviceMoment>& ready) {
        std::lock_guard lock(current->mutex_);
        ++current->copiers_;
        return std::unique_ptr<staging::DeviceCopier>(std::make_unique<Copier>(ready));
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

void FakeDevice::on_arrival(std::function<void()> hook) {
  std::lock_guard lock(mutex_);
  arrive_hook_ = std::move(hook);
}

void FakeDevice::fail_pins(Error error) {
  std::lock_guard lock(mutex_);
  pin_result_ = std::move(error);
}

void FakeDevice::fail_waits(Error error) {
  std::lock_guard lock(mutex_);
  wait_result_ = std::move(error);
}

std::size_t FakeDevice::copiers() const {
  std::lock_guard lock(mutex_);
  return copiers_;
}

std::size_t FakeDevice::submissions() const {
  std::lock_guard lock(mutex_);
  return submissions_;
}

std::vector<std::pair<int, void*>> FakeDevice::held_back() const {
  std::lock_guard lock(mutex_);
  return held_back_;
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
