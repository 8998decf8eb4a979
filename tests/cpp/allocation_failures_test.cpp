// Fails each allocation of a save, a load and a verification: first only the allocation itself,
// then the allocation and all later ones.

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <limits>
#include <new>
#include <optional>
#include <ostream>
#include <string>

#include "engine/context.h"
#include "engine/load_session.h"
#include "engine/process_channel.h"
#include "engine/save_session.h"
#include "engine/verify_session.h"
#include "failing_allocations.h"
#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using namespace test;

constexpr std::size_t kChunkBytes = 4096;
constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();

struct Failures {
  std::string name;
  std::size_t at_once;
  bool has_threads;  // stale chunks of the pool
};

void PrintTo(const Failures& failures, std::ostream* stream) { *stream << failures.name; }

class AllocationFailures : public ::testing::TestWithParam<Failures> {
 protected:
  AllocationFailures() : record_(record_of(header_, random_.bytes(header_.storage_bytes))) {
    test::write_file(directory_.file("a"), record_ + record_);
  }

  /// Runs the session that `start` starts repeatedly, until each allocation has failed once.
  /// `expected` is an errno that the session may also fail with.
  template <class Start>
  void sweep(const Start& start, int expected = 0) {
    bool has_come = true;
    for (std::size_t first = 1; has_come; ++first) {
      SCOPED_TRACE("allocation " + std::to_string(first));
      if (!GetParam().has_threads) context().executor.join();
      os::Directory opened = test::open_directory(directory_);
      decltype(start(std::move(opened), std::size_t{})) started = Error();
      {
        const FailingAllocations failing(first, GetParam().at_once);
        try {
          started = start(std::move(opened), record_.size());
          if (started) {
            ASSERT_TRUE((*started)->wait_for(std::chrono::minutes(2)));
          }
        } catch (const std::bad_alloc&) {
          started = system_error(ENOMEM, "", "");
        }
        has_come = FailingAllocations::has_come();
      }
      if (const std::optional<Error> failure = failure_of(started)) {
        ASSERT_EQ(failure->code, Errc::system) << failure->message();
        if (expected != 0 && failure->sys_errno == expected) continue;
        ASSERT_TRUE(has_come);
        ASSERT_EQ(failure->sys_errno, ENOMEM) << failure->message();
      } else {
        expect_success(**started);
      }
    }
  }

  /// Returns the number of chunks that the pool still counts as in use after the sessions.
  static std::size_t chunks_in_use() {
    context().executor.join();
    staging::ChunkPool& pool = context().chunks;
    pool.trim(0);
    pool.set_reserve(0, kChunkBytes);
    return pool.reserved_bytes() / kChunkBytes;
  }

  /// A save of two files, whose names differ between saves.
  Result<std::shared_ptr<SaveSession>> start_save(os::Directory directory, SaveOptions options) {
    const std::string number = std::to_string(saves_++);
    std::vector<FileJob> files(2);
    for (FileJob& file : files) {
      file.name = (&file == &files[0] ? "first" : "second") + number;
      staging::Source source;
      source.address = reinterpret_cast<const std::byte*>(payload_.data());
      source.bytes = payload_.size();
      for (int i = 0; i < 5; ++i) file.image.add_tensor(header_, source);
    }
    options.chunk_bytes = kChunkBytes;
    return SaveSession::start(context(), std::move(directory), std::move(files), options);
  }

  static std::optional<Error> failure_of(const Result<std::shared_ptr<LoadSession>>& started) {
    return started ? (*started)->failure() : started.error();
  }
  static std::optional<Error> failure_of(const Result<std::shared_ptr<VerifySession>>& started) {
    return started ? (*started)->failure() : started.error();
  }
  static std::optional<Error> failure_of(const Result<std::shared_ptr<SaveSession>>& started) {
    const Result<> outcome = started ? (*started)->outcome() : started.error();
    return outcome ? std::nullopt : std::optional(outcome.error());
  }

  static void expect_success(const LoadSession& session) {
    for (const ReadOutcome& outcome : session.outcomes())
      ASSERT_EQ(outcome.status, ReadStatus::done);
  }
  static void expect_success(const VerifySession& session) {
    ASSERT_TRUE(session.findings().empty());
  }
  void expect_success(const SaveSession& session) const {
    const auto results = session.results();
    ASSERT_EQ(results->size(), 2);
    for (const auto& file : *results) {
      ASSERT_TRUE(std::filesystem::remove(directory_.file(file.name)));
    }
  }

  const format::TensorHeader header_ = row_major("float32", {1000});

  Random random_{1};
  TempDir directory_;

 private:
  const std::string payload_ = random_.bytes(header_.storage_bytes);
  std::size_t saves_ = 0;
  std::string record_;
};

TEST_P(AllocationFailures, ALoadEndsAndReportsThem) {
  std::string target(2 * header_.storage_bytes, '?');
  std::vector<planning::StoredRecord> records(2);
  sweep([&](os::Directory directory, std::size_t record_bytes) {
    std::vector<RegionRead> reads(2);
    for (std::size_t i = 0; i < 2; ++i) {
      records[i].offset = i * record_bytes;
      records[i].length = record_bytes;
      records[i].dtype = header_.dtype;
      records[i].sizes = header_.sizes;
      reads[i].record = &records[i];
      reads[i].region = planning::Region::of_bytes(0, header_.storage_bytes);
      reads[i].target.address =
          reinterpret_cast<std::byte*>(target.data() + i * header_.storage_bytes);
    }
    return LoadSession::start(context(), std::move(directory), {{"a", {}}}, std::move(reads), {});
  });
}

TEST_P(AllocationFailures, AVerificationEndsAndReportsThem) {
  sweep([&](os::Directory directory, std::size_t record_bytes) {
    std::vector<planning::StoredRecord> records(2);
    for (std::size_t i = 0; i < 2; ++i) {
      records[i].offset = i * record_bytes;
      records[i].length = record_bytes;
    }
    return VerifySession::start(context(), std::move(directory), {{"a", {}}}, std::move(records),
                                {});
  });
}

TEST_P(AllocationFailures, ASaveEndsAndReportsThem) {
  sweep([&](os::Directory directory, std::size_t) { return start_save(std::move(directory), {}); });
  // Once there is memory again, no file of a failed save is left.
  if (GetParam().at_once == 1) {
    EXPECT_EQ(directory_.names(), std::vector<std::string>{"a"});
  }
  EXPECT_EQ(chunks_in_use(), 0);
}

TEST_P(AllocationFailures, ASaveToAFullDiskEndsAndReportsAnError) {
  SaveOptions options;
  options.children = std::make_shared<ProcessChannel>(ProcessChannel::create().value());
  const os::ScopedFaultHook hook([](std::string_view operation, std::string_view) {
    return operation == "pwrite" ? ENOSPC : 0;
  });
  sweep([&](os::Directory directory,
            std::size_t) { return start_save(std::move(directory), options); },
        ENOSPC);
}

INSTANTIATE_TEST_SUITE_P(Memory, AllocationFailures,
                         ::testing::Values(Failures{"OneWithThreads", 1, true},
                                           Failures{"AllWithThreads", kAll, true},
                                           Failures{"OneWithoutThreads", 1, false},
                                           Failures{"AllWithoutThreads", kAll, false}),
                         [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace torch_ckpt::engine
