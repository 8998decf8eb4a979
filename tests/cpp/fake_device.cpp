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
#include "engine/context.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::test {
namespace {

// The registered functions have no state, so they use this pointer.
FakeDevice* current = nullptr;

// Far from any mapping: dereferencing such an address on the host crashes.
constexpr std::uintptr_t kFirstAddress = 0x10000;
constexpr std::uintptr_t kFirstMemory = std::uintptr_t{1} << 62;
constexpr std::uintptr_t kMostMemory = std::uintptr_t{1} << 40;

}  // namespace

// A stream: submissions arrive one after another, late, in its thread.
class FakeDevice::Copier final : public staging::DeviceCopier {
 public:
  explicit Copier(const std::vector<staging::ReadyEvent>& ready) : ready_(ready) {}
  ~Copier() override {
    while (!submissions_.empty()) static_cast<void>(wait_oldest());
  }

  Result<> submit(std::span<const staging::DeviceRun> runs) override {
    EXPECT_FALSE(busy_.exchange(true)) << "one copier, two threads";
    const auto result = submit_alone(runs);
    busy_ = false;
    return result;
  }

  Result<> submit_to_device(std::span<const staging::HostRun> runs) override {
    EXPECT_FALSE(busy_.exchange(true)) << "one copier, two threads";
    const auto result = submit_writes_alone(runs);
    busy_ = false;
    return result;
  }

  Result<> wait_oldest() override {
    EXPECT_FALSE(submissions_.empty()) << "nothing is left to be waited for";
    if (submissions_.empty()) return {};
    submissions_.front().awaited->count_down();
    submissions_.front().thread.join();
    submissions_.pop_front();
    std::lock_guard lock(current->mutex_);
    return current->wait_result_;
  }

  bool oldest_has_arrived() override { return *submissions_.front().arrived; }

  Result<> make_stream_wait(int device, void* stream) override {
    std::lock_guard lock(current->mutex_);
    current->waiting_streams_.emplace_back(device, stream);
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
      // A marker that must never be written: the memory's contents before the bytes arrive.
      std::memset(run.out.data(), 0xdd, run.out.size());
      const auto address = reinterpret_cast<std::uintptr_t>(run.source->address);
      copies.emplace_back(run.out, current->payload_at(address, run.offset, run.out.size()));
    }
    begin([copies = std::move(copies)] {
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

  Result<> submit_writes_alone(std::span<const staging::HostRun> runs) {
    WriteHook hook;
    {
      std::lock_guard lock(current->mutex_);
      hook = current->write_hook_;
      ++current->submissions_;
    }
    for (const staging::HostRun& run : runs) {
      if (hook) {
        if (auto done = hook(run); !done) return done;
      }
      current->check(run);
    }
    auto awaited = std::make_shared<std::latch>(1);
    begin(
        [copies = std::vector(runs.begin(), runs.end()), awaited] {
          awaited->wait();
          // Without the lock, which would hide a race with another writer of the memory.
          for (const staging::HostRun& run : copies) {
            current->write(
                run.out, std::string(reinterpret_cast<const char*>(run.in.data()), run.in.size()));
          }
        },
        awaited);
    return {};
  }

  void begin(std::function<void()> copies,
             std::shared_ptr<std::latch> awaited = std::make_shared<std::latch>(1)) {
    auto arrived = std::make_shared<std::atomic<bool>>(false);
    std::thread thread(
        [copies = std::move(copies), moments = ready_, copied = current->arrive_hook(), arrived] {
          for (const auto& moment : moments) static_cast<std::latch*>(moment.event)->wait();
          if (copied) copied();
          copies();
          *arrived = true;
          ++current->arrivals_;
          current->arrivals_.notify_all();
        });
    submissions_.push_back({std::move(thread), std::move(awaited), std::move(arrived)});
  }

  struct Submission {
    std::thread thread;
    std::shared_ptr<std::latch> awaited;  // a thread waits for it
    std::shared_ptr<std::atomic<bool>> arrived;
  };

  const std::vector<staging::ReadyEvent> ready_;
  std::deque<Submission> submissions_;
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

bool FakeDevice::Memory::holds(std::uintptr_t at, std::size_t count) const {
  return at >= address && inside(at - address, count, bytes.size());
}

void FakeDevice::check(const staging::HostRun& run) const {
  std::lock_guard lock(mutex_);
  const auto out = reinterpret_cast<std::uintptr_t>(run.out);
  EXPECT_TRUE(std::any_of(memories_.begin(), memories_.end(),
                          [&](const Memory& memory) {
                            return memory.device == run.device && memory.holds(out, run.in.size());
                          }))
      << "outside of what was allocated on device " << run.device;
  if (!pin_result_) return;
  const auto in = reinterpret_cast<std::uintptr_t>(run.in.data());
  EXPECT_TRUE(std::any_of(pinned_.begin(), pinned_.end(), [&](const Pinned& pinned) {
    const auto begin = reinterpret_cast<std::uintptr_t>(pinned.memory.data());
    return in >= begin && inside(in - begin, run.in.size(), pinned.memory.size());
  })) << "from memory that is not pinned";
}

void FakeDevice::write(std::byte* address, std::string_view bytes) {
  std::lock_guard lock(mutex_);
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (Memory& memory : memories_) {
    if (!memory.holds(at, bytes.size())) continue;
    memory.bytes.replace(at - memory.address, bytes.size(), bytes);
  }
}

std::byte* FakeDevice::allocate(std::size_t bytes, int device) {
  std::lock_guard lock(mutex_);
  const std::uintptr_t address = kFirstMemory + memories_.size() * kMostMemory;
  memories_.push_back({address, device, std::string(bytes, '?')});
  return reinterpret_cast<std::byte*>(address);
}

std::byte* FakeDevice::allocate_adjacent(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  const Memory& last = memories_.back();
  const std::uintptr_t address = last.address + last.bytes.size();
  memories_.push_back({address, last.device, std::string(bytes, '?')});
  return reinterpret_cast<std::byte*>(address);
}

std::string FakeDevice::contents(const std::byte* allocated) const {
  std::lock_guard lock(mutex_);
  for (const Memory& memory : memories_) {
    if (memory.address == reinterpret_cast<std::uintptr_t>(allocated)) return memory.bytes;
  }
  ADD_FAILURE() << "was not allocated";
  return {};
}

std::function<void()> FakeDevice::arrive_hook() const {
  std::lock_guard lock(mutex_);
  return arrive_hook_;
}

FakeDevice::FakeDevice() : before_(staging::device_support()) {
  EXPECT_EQ(current, nullptr) << "one at a time";
  current = this;
  // Chunks that another device has pinned must not be unpinned by this one.
  engine::Context::process().chunks.trim(0);
  static constexpr staging::DeviceSupport kSupport{
      [](const std::vector<staging::ReadyEvent>& ready, staging::Warn warn) {
        std::lock_guard lock(current->mutex_);
        ++current->copiers_;
        current->ready_ = ready;
        if (!current->warning_.empty()) warn("fake device", current->warning_);
        return std::unique_ptr<staging::DeviceCopier>(std::make_unique<Copier>(ready));
      },
      &FakeDevice::pin, &FakeDevice::unpin,
      // The core does not call these.
      nullptr, nullptr, nullptr};
  staging::register_device_support(&kSupport);
}

FakeDevice::~FakeDevice() {
  engine::Context::process().executor.join();
  engine::Context::process().chunks.trim(0);
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

void FakeDevice::on_write(WriteHook hook) {
  std::lock_guard lock(mutex_);
  write_hook_ = std::move(hook);
}

void FakeDevice::on_arrival(std::function<void()> hook) {
  std::lock_guard lock(mutex_);
  arrive_hook_ = std::move(hook);
}

void FakeDevice::on_unpin(std::function<void()> hook) {
  std::lock_guard lock(mutex_);
  unpin_hook_ = std::move(hook);
}

void FakeDevice::warn(std::string text) {
  std::lock_guard lock(mutex_);
  warning_ = std::move(text);
}

void FakeDevice::fail_pins(Error error) {
  std::lock_guard lock(mutex_);
  pin_result_ = std::move(error);
}

void FakeDevice::fail_waits(Error error) {
  std::lock_guard lock(mutex_);
  wait_result_ = std::move(error);
}

void FakeDevice::wait_for_arrivals(std::size_t count) const {
  for (std::size_t now = arrivals_; now < count; now = arrivals_) arrivals_.wait(now);
}

std::vector<staging::ReadyEvent> FakeDevice::ready() const {
  std::lock_guard lock(mutex_);
  return ready_;
}

std::size_t FakeDevice::copiers() const {
  std::lock_guard lock(mutex_);
  return copiers_;
}

std::size_t FakeDevice::submissions() const {
  std::lock_guard lock(mutex_);
  return submissions_;
}

std::vector<std::pair<int, void*>> FakeDevice::waiting_streams() const {
  std::lock_guard lock(mutex_);
  return waiting_streams_;
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
  for (const Pinned& pinned : current->pinned_) {
    EXPECT_NE(pinned.memory.data(), memory.data()) << "twice";
  }
  current->pinned_.push_back({memory, device});
  ++current->pins_;
  return {};
}

void FakeDevice::unpin(std::span<std::byte> memory, int device) {
  std::unique_lock lock(current->mutex_);
  const auto erased = std::erase_if(current->pinned_, [&](const Pinned& pinned) {
    return pinned.memory.data() == memory.data() && pinned.device == device;
  });
  EXPECT_EQ(erased, 1) << "was not pinned, or by another device";
  const auto hook = current->unpin_hook_;
  lock.unlock();
  if (hook) hook();
}

}  // namespace torch_ckpt::test
