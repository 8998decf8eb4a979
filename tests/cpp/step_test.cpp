#include "directory/step.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>

#include "directory/root_lock.h"
#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::directory {
namespace {

namespace fs = std::filesystem;
using os::ScopedFaultHook;
using namespace test;

using Names = std::vector<std::string>;

constexpr std::string_view kAttempt = "0a1b2c3d";
const std::string kStep = "0000000002";
const std::string kUnfinished = "0000000002.tmp-0a1b2c3d";
const std::string kDeleted = "0000000002.deleted-5f0c19ab";

Result<> keep_waiting() { return {}; }

TEST(StepName, OnlyStepsAndLeftoversHaveOne) {
  const auto kind_of = [](std::string_view name) {
    const auto parsed = parse_step_name(name);
    return parsed ? std::optional(parsed->kind) : std::nullopt;
  };
  EXPECT_EQ(kind_of(kStep), StepKind::step);
  EXPECT_EQ(kind_of(kUnfinished), StepKind::unfinished);
  EXPECT_EQ(kind_of(kDeleted), StepKind::deleted);
  for (const char* name :
       {"", "100", "00000000100", "000000100a", "0000000100 ", "0000000100.tmp",
        "0000000100.tmp-xyz", "0000000100.tmp-0A1B2C3D", "0000000100.tmp-0a1b2c3d4",
        "0000000100.tmp-0a1b2c3d.bak", "0000000100.deleted", "x0000000100.deleted-0a1b2c3d"}) {
    EXPECT_EQ(kind_of(name), std::nullopt) << name;
  }
}

TEST(StepName, NewNamesAreParsed) {
  EXPECT_EQ(unfinished_name(kStep, kAttempt), kUnfinished);
  const std::string deleted = deleted_name(kStep);
  const auto parsed = parse_step_name(deleted);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->kind, StepKind::deleted);
  EXPECT_EQ(parsed->digits, kStep);
  EXPECT_NE(deleted, deleted_name(kStep));
}

class StepTest : public ::testing::Test {
 protected:
  /// Creates a directory beneath the root with a file of these contents, and maybe the marker.
  void has(const std::string& name, std::string_view contents, bool is_complete) {
    fs::create_directory(root_.file(name));
    write_file(root_.file(name + "/data"), contents);
    if (is_complete) write_file(root_.file(name + "/write_completed"), "{}");
  }
  os::Directory open(const std::string& name) {
    auto opened = os::Directory::open(root_.file(name));
    EXPECT_TRUE(ok(opened));
    return std::move(*opened);
  }
  StepSave begin() {
    auto save = StepSave::begin(steps_, open(kUnfinished), kStep);
    EXPECT_TRUE(ok(save));
    return std::move(*save);
  }
  /// Returns the contents of a step, or "none" if it is not complete.
  std::string step() const {
    if (!fs::exists(root_.file(kStep + "/write_completed"))) return "none";
    return read_file(root_.file(kStep + "/data"));
  }
  Names sweep() {
    auto swept = steps_.sweep(false, "");
    EXPECT_TRUE(ok(swept));
    EXPECT_TRUE(swept->failures.empty());
    return swept->removed;
  }
  /// Returns the names directly beneath the root.
  Names names() const {
    Names names;
    for (const auto& entry : fs::directory_iterator(root_.path())) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  /// Deletes the step while a save replaces it, at the first operation for which `is_moment` is
  /// true. The new step must stay.
  void expect_that_a_deletion_spares_a_step_that_appears_at(
      const std::function<bool(std::string_view operation, std::string_view path)>& is_moment) {
    has(kStep, "old", true);
    bool has_come = false;
    const ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
      if (!has_come && is_moment(operation, path)) {
        has_come = true;
        fs::rename(root_.file(kStep), root_.file(kDeleted));
        has(kStep, "new", true);
      }
      return 0;
    });
    EXPECT_FALSE(*steps_.remove(kStep));
    EXPECT_TRUE(has_come);
    EXPECT_EQ(step(), "new");
  }

  TempDir root_;
  StepRoot steps_{root_.path()};
};

TEST_F(StepTest, ASavedStepHasItsNameAndTheMarker) {
  has(kUnfinished, "new", false);
  StepSave save = begin();
  EXPECT_EQ(*save.bytes(), 3u);
  const auto outcome = save.publish("marker", false, true);
  EXPECT_EQ(outcome.state, PublishState::published) << outcome.error.message();
  EXPECT_TRUE(save.is_published());
  EXPECT_EQ(save.replaced(), "");
  EXPECT_EQ(names(), Names{kStep});
  EXPECT_EQ(step(), "new");
  EXPECT_EQ(read_file(root_.file(kStep + "/write_completed")), "marker");
}

TEST_F(StepTest, TheMarkerIsDurableBeforeTheNameAndTheNameAtTheEnd) {
  has(kUnfinished, "new", false);
  StepSave save = begin();
  CallCounter counter;
  {
    const ScopedFaultHook hook(counter);
    EXPECT_EQ(save.publish("marker", false, true).state, PublishState::published);
  }
  Names calls;
  for (const std::string& call : counter.log()) {
    if (call.starts_with("fsync") || call.starts_with("rename")) {
      calls.push_back(call.substr(0, call.find(".tmp-", root_.path().size() + 30)));
    }
  }
  ASSERT_EQ(calls.size(), 5u);
  EXPECT_TRUE(calls[0].starts_with("fsync " + root_.file(kUnfinished) + "/write_completed"));
  EXPECT_EQ(calls[1], "rename " + root_.file(kUnfinished) + "/write_completed");
  EXPECT_EQ(calls[2], "fsync_directory " + root_.file(kUnfinished));
  EXPECT_EQ(calls[3], "rename " + root_.file(kStep));
  EXPECT_EQ(calls[4], "fsync_directory " + root_.path());
}

TEST_F(StepTest, AnyFailingCallLeavesTheOldStepOrTheNewOne) {
  const std::vector<std::string> operations = {
      "open",  "pwrite",          "fsync", "close",         "rename",
      "statx", "fsync_directory", "flock", "open_directory"};
  int failures = 0;
  for (const std::string& operation : operations) {
    for (std::size_t n = 1;; ++n) {
      for (const std::string& name : names()) fs::remove_all(root_.file(name));
      has(kStep, "old", true);
      write_file(root_.file(kStep + "/pinned"), "");
      has(kUnfinished, "new", false);
      StepSave save = begin();
      const NthCallFails fails_once(operation, n, EIO);
      PublishOutcome outcome;
      {
        const ScopedFaultHook hook(fails_once);
        outcome = save.publish("{}", true, true);
      }
      SCOPED_TRACE(operation + " " + std::to_string(n));
      if (!fails_once.hit()) {
        EXPECT_EQ(outcome.state, PublishState::published);
        break;
      }
      ++failures;
      // A sweep may have to finish the work.
      sweep();
      const std::string expected = outcome.state == PublishState::not_published ? "old" : "new";
      EXPECT_EQ(step(), expected) << outcome.error.message();
      EXPECT_EQ(names(), Names{kStep});
      EXPECT_TRUE(fs::exists(root_.file(kStep + "/pinned")));
    }
  }
  EXPECT_GT(failures, 15);
}

TEST_F(StepTest, AReplacedStepIsRenamedAndItsPinIsKept) {
  has(kStep, "old", true);
  write_file(root_.file(kStep + "/pinned"), "");
  has(kUnfinished, "new", false);
  StepSave save = begin();
  ASSERT_EQ(save.publish("{}", true, true).state, PublishState::published);
  EXPECT_EQ(step(), "new");
  EXPECT_TRUE(fs::exists(root_.file(kStep + "/pinned")));
  EXPECT_EQ(names(), (Names{kStep, save.replaced()}));
  EXPECT_TRUE(*steps_.remove(save.replaced()));
  EXPECT_EQ(names(), Names{kStep});
}

TEST_F(StepTest, ACompleteStepIsReplacedOnlyOnRequest) {
  has(kStep, "old", true);
  has(kUnfinished, "new", false);
  StepSave save = begin();
  const auto outcome = save.publish("{}", false, true);
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_EQ(outcome.error.sys_errno, EEXIST);
  EXPECT_EQ(step(), "old");
  EXPECT_EQ(names(), Names{kStep});
}

TEST_F(StepTest, ADirectoryWithoutTheMarkerIsReplaced) {
  has(kStep, "old", false);
  has(kUnfinished, "new", false);
  EXPECT_EQ(begin().publish("{}", false, true).state, PublishState::published);
  EXPECT_EQ(step(), "new");
}

TEST_F(StepTest, AFileWithTheNameOfTheStepIsNotReplaced) {
  write_file(root_.file(kStep), "the user's");
  has(kUnfinished, "new", false);
  EXPECT_EQ(begin().publish("{}", true, true).state, PublishState::not_published);
  EXPECT_EQ(read_file(root_.file(kStep)), "the user's");
}

TEST_F(StepTest, IfTheOldStepCannotBeRenamedBackTheNextSweepCompletesTheNewOne) {
  has(kStep, "old", true);
  has(kUnfinished, "new", false);
  StepSave save = begin();
  PublishOutcome outcome;
  {
    // The first two renames concern the marker and the old step.
    int renames = 0;
    const ScopedFaultHook hook([&](std::string_view operation, std::string_view) {
      return operation == "rename" && ++renames > 2 ? EACCES : 0;
    });
    outcome = save.publish("{}", true, true);
  }
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_NE(outcome.error.message().find("the next sweep will rename it"), std::string::npos);
  EXPECT_EQ(step(), "none");
  EXPECT_EQ(sweep(), Names{save.replaced()});
  EXPECT_EQ(step(), "new");
}

TEST_F(StepTest, AFailedSaveLeavesNothingEvenIfItsDirectoryWasMoved) {
  has(kUnfinished, "new", true);
  StepSave save = begin();
  fs::rename(root_.file(kUnfinished), root_.file("elsewhere"));
  save.discard();
  EXPECT_EQ(names(), Names{"elsewhere"});
  EXPECT_TRUE(fs::is_empty(root_.file("elsewhere")));
}

TEST_F(StepTest, FilesThatAppearWhileTheSaveWaitsAreNotMissing) {
  has(kUnfinished, "new", false);
  const StepSave save = begin();
  EXPECT_EQ(*save.find_missing({"data", "more", "other"}, 0.0, keep_waiting),
            (Names{"more", "other"}));
  const auto create = [&]() -> Result<> {
    write_file(root_.file(kUnfinished + "/more"), "");
    return {};
  };
  EXPECT_EQ(*save.find_missing({"data", "more"}, 60.0, create), Names{});
}

// --- removal -------------------------------------------------------------------------------------

TEST_F(StepTest, ADeletionRemovesTheStepWithItsSubdirectories) {
  has(kStep, "old", true);
  fs::create_directories(root_.file(kStep + "/a/b"));
  write_file(root_.file(kStep + "/a/b/c"), "");
  EXPECT_TRUE(*steps_.remove(kStep));
  EXPECT_EQ(names(), Names{});
}

TEST_F(StepTest, ADeletionRenamesTheStepDurablyBeforeItRemovesAFile) {
  has(kStep, "old", true);
  CallCounter counter;
  {
    const ScopedFaultHook hook(counter);
    EXPECT_TRUE(*steps_.remove(kStep));
  }
  Names calls;
  for (const std::string& call : counter.log()) {
    const std::string operation = call.substr(0, call.find(' '));
    if (operation == "rename" || operation == "fsync_directory" || operation == "unlink") {
      calls.push_back(operation);
    }
  }
  EXPECT_EQ(calls, (Names{"rename", "fsync_directory", "unlink", "unlink"}));
}

TEST_F(StepTest, ADeletionThatFailsAnywhereLeavesTheStepOrWhatTheSweepRemoves) {
  for (const std::string operation : {"rename", "fsync_directory", "unlink", "rmdir", "flock",
                                      "open_directory", "readdir", "statx", "rmtree"}) {
    for (std::size_t n = 1;; ++n) {
      fs::remove_all(root_.file(kStep));
      has(kStep, "old", true);
      const NthCallFails fails_once(operation, n, EIO);
      bool is_removed = false;
      {
        const ScopedFaultHook hook(fails_once);
        const auto removed = steps_.remove(kStep);
        is_removed = removed && *removed;
      }
      if (!fails_once.hit()) break;
      SCOPED_TRACE(operation + " " + std::to_string(n));
      EXPECT_FALSE(is_removed);
      const bool is_complete = step() == "old";
      sweep();
      EXPECT_EQ(names(), is_complete ? Names{kStep} : Names{});
    }
  }
}

TEST_F(StepTest, AStepThatIsBeingLoadedIsNotRemoved) {
  has(kStep, "old", true);
  auto reader = open(kStep);
  ASSERT_TRUE(*reader.try_share());
  EXPECT_FALSE(*steps_.remove(kStep));
  EXPECT_EQ(step(), "old");
  reader.close();
  EXPECT_TRUE(*steps_.remove(kStep));
}

TEST_F(StepTest, ALinkedStepIsRemovedWithoutTheTargetOfTheLink) {
  has("elsewhere", "old", true);
  fs::create_directory_symlink(root_.file("elsewhere"), root_.file(kStep));
  EXPECT_TRUE(*steps_.remove(kStep));
  EXPECT_EQ(names(), Names{"elsewhere"});
  EXPECT_EQ(read_file(root_.file("elsewhere/data")), "old");
}

TEST_F(StepTest, ADeletionNeverRemovesAStepThatHasReplacedItsOwn) {
  // The deletion has opened the old step.
  expect_that_a_deletion_spares_a_step_that_appears_at(
      [&](auto operation, auto path) { return operation == "flock" && path == root_.path(); });
}

TEST_F(StepTest, ARenameOfAStepThatHasReplacedItsOwnIsUndone) {
  // The save of the new step has waited too long for the lock on the root.
  expect_that_a_deletion_spares_a_step_that_appears_at([](auto operation, auto path) {
    return operation == "rename" && path.find(".deleted-") != std::string_view::npos;
  });
}

TEST_F(StepTest, NothingIsRemovedFromAnotherRootThanTheOneOfTheLastSave) {
  has(kUnfinished, "new", false);
  ASSERT_EQ(begin().publish("{}", false, true).state, PublishState::published);
  TempDir other;
  StepRoot moved{other.path()};
  steps_.remember(*open_directory(other).identity());
  const auto removed = steps_.remove(kStep);
  ASSERT_FALSE(removed);
  EXPECT_EQ(removed.error().sys_errno, ESTALE);
  EXPECT_EQ(step(), "new");
}

// --- lease ---------------------------------------------------------------------------------------

TEST_F(StepTest, ARunThatHasLostTheLeaseNeitherCompletesNorDeletesSteps) {
  has(kStep, "old", true);
  has(kUnfinished, "new", false);
  write_file(root_.file(".lease"), "another run's");
  {
    StepSave save = begin();
    const auto outcome = save.publish("marker", true, true, "mine");
    EXPECT_EQ(outcome.state, PublishState::not_published);
    EXPECT_EQ(outcome.error.code, Errc::root_in_use);
  }
  EXPECT_TRUE(fails(steps_.remove(kStep, "mine"), Errc::root_in_use));
  has("0000000003.tmp-0a1b2c3d", "new", true);
  has("0000000004.deleted-0a1b2c3d", "old", true);
  EXPECT_TRUE(fails(steps_.sweep(false, "", "mine"), Errc::root_in_use));
  EXPECT_TRUE(fails(steps_.remove("0000000004.deleted-0a1b2c3d", "mine"), Errc::root_in_use));
  EXPECT_EQ(step(), "old");
  EXPECT_EQ(names(),
            (Names{".lease", kStep, "0000000003.tmp-0a1b2c3d", "0000000004.deleted-0a1b2c3d"}));
}

TEST_F(StepTest, ALeaseLostWhileTheMarkerIsWrittenPreventsTheRename) {
  has(kUnfinished, "new", false);
  write_file(root_.file(".lease"), "mine");
  StepSave save = begin();
  const ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    // The last operation before the lock on the root.
    if (operation == "flock" && path == root_.path()) write_file(root_.file(".lease"), "other");
    return 0;
  });
  EXPECT_EQ(save.publish("marker", false, true, "mine").error.code, Errc::root_in_use);
  EXPECT_EQ(names(), Names{".lease"});
}

TEST_F(StepTest, ARunThatHoldsTheLeaseCompletesAndDeletesSteps) {
  write_file(root_.file(".lease"), "mine");
  has(kUnfinished, "new", false);
  EXPECT_EQ(begin().publish("marker", false, true, "mine").state, PublishState::published);
  EXPECT_EQ(step(), "new");
  EXPECT_TRUE(*steps_.remove(kStep, "mine"));
  EXPECT_EQ(names(), Names{".lease"});
}

TEST_F(StepTest, TheSweepDeletesTheUnfinishedStepOfASupersededRun) {
  has(kUnfinished, "new", true);
  const auto swept = steps_.sweep(false, "", std::nullopt, {kUnfinished});
  ASSERT_TRUE(ok(swept));
  EXPECT_EQ(swept->removed, Names{kUnfinished});
  EXPECT_EQ(names(), Names{});
}

// --- sweep ---------------------------------------------------------------------------------------

TEST_F(StepTest, TheSweepOfAMissingRootFindsNothing) {
  fs::remove(root_.path());
  EXPECT_EQ(sweep(), Names{});
  fs::create_directory(root_.path());
}

TEST_F(StepTest, TheSweepRemovesLeftoversAndKeepsEverythingElse) {
  has(kUnfinished, "x", false);
  has(kDeleted, "x", true);
  has("0000000003", "x", true);
  has("0000000004", "x", false);
  has("elsewhere", "x", false);
  write_file(root_.file("0000000005.tmp-0a1b2c3d"), "the user's");
  EXPECT_EQ(sweep(), (Names{kDeleted, kUnfinished}));
  EXPECT_EQ(names(), (Names{"0000000003", "0000000004", "0000000005.tmp-0a1b2c3d", "elsewhere"}));
}

TEST_F(StepTest, TheSweepRenamesAStepThatLacksOnlyItsName) {
  has(kUnfinished, "new", true);
  EXPECT_EQ(sweep(), Names{});
  EXPECT_EQ(names(), Names{kStep});
  EXPECT_EQ(step(), "new");
}

TEST_F(StepTest, TheRootIsNotLockedWhileTheSweepSyncsIt) {
  has(kUnfinished, "new", true);
  bool is_synced = false;
  const ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    if (operation == "fsync_directory" && path == root_.path()) {
      is_synced = true;
      const auto lock = RootLock::take(test::open_directory(root_), std::chrono::milliseconds(0));
      EXPECT_TRUE(lock && lock->is_held());
    }
    return 0;
  });
  EXPECT_EQ(sweep(), Names{});
  EXPECT_TRUE(is_synced);
}

TEST_F(StepTest, TheSweepKeepsAStepAndRemovesItsUnfinishedReplacement) {
  has(kStep, "old", true);
  has(kUnfinished, "new", true);
  EXPECT_EQ(sweep(), Names{kUnfinished});
  EXPECT_EQ(step(), "old");
}

TEST_F(StepTest, TheSweepSparesDirectoriesInUseAndThoseOfItsAttempt) {
  has(kUnfinished, "new", false);
  auto writer = open(kUnfinished);
  ASSERT_TRUE(*writer.try_share());
  EXPECT_EQ(sweep(), Names{});
  writer.close();
  EXPECT_EQ(steps_.sweep(false, std::string(kAttempt))->removed, Names{});
  EXPECT_EQ(steps_.sweep(true, "")->removed, Names{});
  EXPECT_EQ(sweep(), Names{kUnfinished});
}

TEST_F(StepTest, WithoutLocksTheSweepSparesUnfinishedDirectories) {
  has(kUnfinished, "new", false);
  flock_errors = {ENOSYS};
  EXPECT_EQ(sweep(), Names{});
  flock_errors = {};
}

TEST_F(StepTest, ALeftoverThatCannotBeRemovedDoesNotEndTheSweep) {
  has(kUnfinished, "x", false);
  has(kDeleted, "x", false);
  const ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
    return operation == "rmtree" && path == root_.file(kDeleted) ? EIO : 0;
  });
  auto swept = steps_.sweep(false, "");
  ASSERT_TRUE(ok(swept));
  EXPECT_EQ(swept->removed, Names{kUnfinished});
  ASSERT_EQ(swept->failures.size(), 1u);
  EXPECT_EQ(swept->failures[0].sys_errno, EIO);
}

}  // namespace
}  // namespace torch_ckpt::directory
