// Tests csrc/staging/cuda_copy.cpp with a fake CUDA runtime.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fake_cuda.h"
#include "os/fork_guard.h"
#include "staging/device_copy.h"
#include "support.h"

namespace torch_ckpt::staging {
namespace {

using test::FakeCuda;
using test::ok;

constexpr cuda::Code kOfTheCaller = test::kInvalidConfiguration;

class CudaCopy : public ::testing::Test {
 protected:
  explicit CudaCopy(int cuda_major = cuda::kMajorWithBatches) : cuda_(cuda_major) {}

  std::shared_ptr<DeviceCopier> copier() {
    auto made = make_copier(ready_, [this](const std::string& topic, const std::string& text) {
      warnings_.emplace_back(topic, text);
    });
    EXPECT_TRUE(ok(made));
    return *made;
  }
  /// Copies `count` runs of the source to room_, in one submission.
  Result<> submit(DeviceCopier& copier, std::size_t count = 1, int device = 0) {
    source_.address = reinterpret_cast<const std::byte*>(text_.data());
    source_.bytes = text_.size();
    source_.device = device;
    room_.assign(text_.size(), '?');
    std::vector<DeviceRun> runs;
    for (std::size_t i = 0; i < count; ++i) {
      runs.push_back({&source_, i, std::as_writable_bytes(std::span(room_)).subspan(i, 1)});
    }
    return copier.submit(runs);
  }
  void* event(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

  FakeCuda cuda_;
  std::vector<ReadyEvent> ready_;
  std::vector<std::pair<std::string, std::string>> warnings_;
  const std::string text_ = "0123456789";
  std::string room_;
  Source source_;
};

// --- ready events ------------------------------------------------------------------------------

TEST_F(CudaCopy, ReplacesAStreamThatCouldNotWaitForAReadyEvent) {
  ready_ = {{0, event(1)}, {1, event(2)}, {0, event(3)}};
  const auto copier = this->copier();
  cuda_.fail("cudaStreamWaitEvent", test::kOutOfMemory, 2);
  ASSERT_FALSE(submit(*copier).has_value());
  EXPECT_EQ(cuda_.streams(), 0) << "a stream that skips an event is left";
  ASSERT_TRUE(ok(submit(*copier)));
  EXPECT_EQ(cuda_.waits(), (std::vector<std::vector<void*>>{{event(1), event(2), event(3)}}));
}

// --- errors ------------------------------------------------------------------------------------

TEST_F(CudaCopy, NeitherClearsNorReturnsAnEarlierErrorOfTheCaller) {
  std::string memory(16, '?');
  const auto bytes = std::as_writable_bytes(std::span(memory));
  cuda_.set_last_error(kOfTheCaller);
  auto copier = this->copier();
  EXPECT_TRUE(ok(submit(*copier)));
  EXPECT_TRUE(copier->oldest_has_arrived());
  EXPECT_TRUE(ok(copier->wait_oldest()));
  EXPECT_TRUE(ok(copier->make_stream_wait(0, event(7))));
  copier.reset();
  EXPECT_TRUE(ok(device_support()->pin(bytes, 0)));
  device_support()->unpin(bytes, 0);
  EXPECT_EQ(cuda_.last_error(), kOfTheCaller);
}

TEST_F(CudaCopy, ReturnsItsOwnErrorAndClearsItForTheCaller) {
  const auto copier = this->copier();
  cuda_.fail("cudaMemcpyAsync", test::kInvalidValue);
  const auto copied = submit(*copier);
  ASSERT_FALSE(copied.has_value());
  EXPECT_EQ(cuda_.last_error(), cuda::kSuccess);
}

TEST_F(CudaCopy, LeavesNoErrorToTheCallerWhileACopyIsInFlight) {
  const auto copier = this->copier();
  ASSERT_TRUE(ok(submit(*copier)));
  cuda_.fail("cudaEventQuery", cuda::kNotReady);
  EXPECT_FALSE(copier->oldest_has_arrived());
  EXPECT_EQ(cuda_.last_error(), cuda::kSuccess);
}

// --- events ------------------------------------------------------------------------------------

TEST_F(CudaCopy, HasAsManyEventsAsSubmissionsInFlight) {
  auto copier = this->copier();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(ok(submit(*copier)));
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(ok(copier->wait_oldest()));
    ASSERT_TRUE(ok(submit(*copier)));
  }
  EXPECT_EQ(cuda_.most_events(), 3);
  copier.reset();
  EXPECT_EQ(cuda_.events(), 0);
}

TEST_F(CudaCopy, MakesAStreamWaitForTheLastSubmissionEvenIfItHasArrived) {
  void* const stream = event(std::uintptr_t{1} << 40);  // the last device of the map
  for (int arrived = 0; arrived <= 5; ++arrived) {
    const auto copier = this->copier();
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(ok(submit(*copier)));
    ASSERT_TRUE(ok(copier->wait_oldest()));
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(ok(submit(*copier)));
    for (int i = 1; i < arrived; ++i) ASSERT_TRUE(ok(copier->wait_oldest()));
    ASSERT_TRUE(ok(copier->make_stream_wait(0, stream)));
    EXPECT_EQ(cuda_.recorded(cuda_.waits().back().back()), cuda_.records()) << arrived;
  }
}

TEST_F(CudaCopy, ReusesAnEventThatCouldNotBeRecorded) {
  const auto copier = this->copier();
  cuda_.fail("cudaEventRecord", test::kInvalidValue);
  ASSERT_FALSE(submit(*copier).has_value());
  ASSERT_TRUE(ok(submit(*copier)));
  EXPECT_EQ(cuda_.events(), 1);
}

// --- batches -----------------------------------------------------------------------------------

TEST_F(CudaCopy, CopiesARejectedBatchOneByOneAndWarnsWithTheError) {
  const auto copier = this->copier();
  cuda_.fail("cudaMemcpyBatchAsync", test::kNotSupported);
  ASSERT_TRUE(ok(submit(*copier, 4)));
  EXPECT_EQ(room_.substr(0, 4), "0123");
  ASSERT_EQ(warnings_.size(), 1);
  EXPECT_NE(warnings_[0].second.find("operation not supported"), std::string::npos);
  EXPECT_NE(warnings_[0].second.find("device 0"), std::string::npos);
}

TEST_F(CudaCopy, TriesBatchesAgainOnAnotherDeviceOrWithAnotherCopier) {
  const auto copier = this->copier();
  cuda_.fail("cudaMemcpyBatchAsync", test::kNotSupported);
  ASSERT_TRUE(ok(submit(*copier, 4, 0)));
  ASSERT_TRUE(ok(submit(*copier, 4, 0)));
  EXPECT_EQ(cuda_.calls("cudaMemcpyBatchAsync"), 1);
  ASSERT_TRUE(ok(submit(*copier, 4, 1)));
  EXPECT_EQ(cuda_.calls("cudaMemcpyBatchAsync"), 2) << "another device";
  ASSERT_TRUE(ok(submit(*this->copier(), 4, 0)));
  EXPECT_EQ(cuda_.calls("cudaMemcpyBatchAsync"), 3) << "another copier";
}

TEST_F(CudaCopy, SubmitsNoBatchesIfTheUserDisablesThem) {
  ::setenv("TORCH_CKPT_CUDA_BATCHES", "0", 1);
  EXPECT_TRUE(ok(submit(*copier(), 4)));
  ::unsetenv("TORCH_CKPT_CUDA_BATCHES");
  EXPECT_EQ(cuda_.calls("cudaMemcpyBatchAsync"), 0);
  EXPECT_EQ(room_.substr(0, 4), "0123");
  EXPECT_TRUE(warnings_.empty());
}

class CudaCopyWithCuda12 : public CudaCopy {
 protected:
  CudaCopyWithCuda12() : CudaCopy(12) {}
};

TEST_F(CudaCopyWithCuda12, SubmitsNoBatchesBecauseTheFunctionHasAnotherSignature) {
  EXPECT_TRUE(ok(submit(*copier(), 4)));
  EXPECT_EQ(cuda_.calls("cudaMemcpyBatchAsync"), 0);
  EXPECT_EQ(room_.substr(0, 4), "0123");
  EXPECT_TRUE(warnings_.empty());
}

// --- the runtime -------------------------------------------------------------------------------

TEST(CudaRuntime, IsNotUsedIfItLacksAFunction) {
  FakeCuda cuda;
  register_device_support(nullptr);
  const auto used =
      use_cuda_runtime(FakeCuda::lookup_without({"cudaEventQuery"}), cuda::kMajorWithBatches);
  ASSERT_FALSE(used);
  EXPECT_NE(used.error().message().find("cudaEventQuery"), std::string::npos);
  EXPECT_EQ(device_support(), nullptr);
  // Restores the functions for other tests.
  EXPECT_TRUE(ok(use_cuda_runtime(FakeCuda::lookup(), cuda::kMajorWithBatches)));
}

// --- the caller's device -------------------------------------------------------------------------

constexpr const char* kByVersion = "cudaGetDriverEntryPointByVersion";  // since CUDA 12.5
constexpr const char* kUnversioned = "cudaGetDriverEntryPoint";         // deprecated in CUDA 13

class CallersDevice : public CudaCopy, public ::testing::WithParamInterface<std::set<std::string>> {
 protected:
  CallersDevice() : CudaCopy(12) {
    EXPECT_TRUE(ok(use_cuda_runtime(FakeCuda::lookup_without(GetParam()), 12)));
  }
  ~CallersDevice() override {
    // Restores the functions for other tests.
    EXPECT_TRUE(ok(use_cuda_runtime(FakeCuda::lookup(), cuda::kMajorWithBatches)));
  }
};

TEST_P(CallersDevice, IsSelectedAgainAfterEachCallForAnotherDevice) {
  cuda_.set_device(0);
  auto copier = this->copier();
  EXPECT_TRUE(ok(submit(*copier, 1, 1)));
  EXPECT_EQ(cuda_.device(), 0);
  EXPECT_TRUE(ok(copier->make_stream_wait(1, event(7))));
  EXPECT_EQ(cuda_.device(), 0);
  EXPECT_TRUE(ok(copier->wait_oldest()));
  EXPECT_EQ(cuda_.device(), 0);
  copier.reset();
  EXPECT_EQ(cuda_.device(), 0);
}

TEST_P(CallersDevice, GetsNoContextIfItHasNone) {
  EXPECT_TRUE(ok(submit(*copier(), 1, 1)));
  EXPECT_TRUE(cuda_.has_context(1));
  EXPECT_FALSE(cuda_.has_context(0));
}

INSTANTIATE_TEST_SUITE_P(EntryPoints, CallersDevice,
                         ::testing::Values(std::set<std::string>(),
                                           std::set<std::string>{kByVersion},
                                           std::set<std::string>{kUnversioned}),
                         [](const auto& tested) {
                           if (tested.param.empty()) return "Both";
                           return tested.param.contains(kByVersion) ? "Unversioned" : "ByVersion";
                         });

// --- events of the caller ------------------------------------------------------------------------

TEST_F(CudaCopy, RecordsAnEventOfTheCallerUntilItIsDestroyed) {
  const auto recorded = device_support()->record_event(0, event(7));
  ASSERT_TRUE(ok(recorded));
  EXPECT_EQ(cuda_.recorded(*recorded), 1);
  device_support()->destroy_event(0, *recorded);
  EXPECT_EQ(cuda_.events(), 0);
}

TEST_F(CudaCopy, DestroysAnEventOfTheCallerThatCannotBeRecorded) {
  cuda_.fail("cudaEventRecord", test::kInvalidValue);
  EXPECT_FALSE(device_support()->record_event(0, event(7)));
  EXPECT_EQ(cuda_.events(), 0);
}

TEST_F(CudaCopy, DestroysRecordedEventsIfALaterOneCannotBeRecorded) {
  {
    RecordedEvents events;
    EXPECT_TRUE(ok(events.record(0, event(7))));
    EXPECT_TRUE(ok(events.record(1, event(8))));
    cuda_.fail("cudaEventRecord", test::kInvalidValue);
    EXPECT_FALSE(events.record(2, event(9)));
    EXPECT_EQ(events.events().size(), 2);
    EXPECT_EQ(events.events()[1].device, 1);
    EXPECT_EQ(cuda_.events(), 2);
  }
  EXPECT_EQ(cuda_.events(), 0);
}

TEST_F(CudaCopy, ReturnsTheErrorOfAStreamThatTheCallerWaitsFor) {
  EXPECT_TRUE(ok(device_support()->wait_for_stream(0, event(7))));
  cuda_.fail("cudaStreamSynchronize", test::kLaunchFailure);
  EXPECT_FALSE(device_support()->wait_for_stream(0, event(7)));
}

// --- forks -------------------------------------------------------------------------------------

TEST_F(CudaCopy, CallsNoCudaFunctionWhenAForkedChildDropsACopier) {
  auto copier = this->copier();
  ASSERT_TRUE(ok(submit(*copier)));
  const std::size_t before = cuda_.calls();
  const pid_t child = ::fork();
  if (child == 0) {
    copier.reset();
    ::_exit(cuda_.calls() == before ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace torch_ckpt::staging
