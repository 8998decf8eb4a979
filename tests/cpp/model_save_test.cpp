#include "directory/model_save.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <functional>
#include <set>

#include "format/crc32.h"
#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::directory {
namespace {

namespace fs = std::filesystem;
using namespace test;
using Names = std::vector<std::string>;

planning::SafetensorsLayout layout_of(std::uint64_t max_shard_bytes = 0) {
  std::vector<format::SafeTensor> tensors;
  for (const char* name : {"a", "b"}) {
    tensors.push_back({name, format::find_dtype("uint8"), {4}, 0, 0});
  }
  return planning::SafetensorsLayout::of(tensors, {.max_shard_bytes = max_shard_bytes}).value();
}

// A parent directory, in which "model" is saved.
class ModelSaveTest : public DirectoryTest {
 protected:
  Result<ModelSave> begin(bool may_replace = true) {
    return ModelSave::begin(parent_, "model", may_replace, extras_, warnings_);
  }

  /// Writes the data of both tensors, as the ranks do: eight times `letter`.
  Result<> write_data(const ModelSave& save, const planning::SafetensorsLayout& layout,
                      char letter) {
    for (const auto& file : layout.files()) {
      auto opened = save.directory().open_or_create(file.name, os::IoMode::buffered);
      if (!opened) return opened.error();
      const std::string data(file.bytes - file.header.size(), letter);
      if (auto done = opened->write_at(bytes_of(data), file.header.size()); !done) return done;
    }
    return {};
  }

  /// Saves the model, with a config.json. Returns the outcome of the first step that failed.
  PublishOutcome save(char letter, std::uint64_t max_shard_bytes = 0) {
    auto begun = begin();
    if (!begun) return {PublishState::not_published, begun.error()};
    const auto layout = layout_of(max_shard_bytes);
    const std::vector<ModelSave::Extra> extras = {{"config.json", "{}"}, {"vocab.txt", "x"}};
    auto done = write_data(*begun, layout, letter);
    if (done) done = begun->complete(layout, extras, {}, true);
    if (!done) {
      begun->discard(warnings_);
      return {PublishState::not_published, done.error()};
    }
    return begun->publish(true, warnings_);
  }

  void save_well(char letter, std::uint64_t max_shard_bytes = 0) {
    const auto outcome = save(letter, max_shard_bytes);
    ASSERT_EQ(outcome.state, PublishState::published) << outcome.error.message();
  }

  std::string path(const std::string& name) const { return directory_.file("model/" + name); }

  /// Returns the letter of a complete model; '-' if there is none.
  char letter() const {
    if (!fs::exists(directory_.file("model"))) return '-';
    const auto contents = read_file(path("model.safetensors"));
    const auto layout = layout_of();
    EXPECT_EQ(contents.size(), layout.files()[0].bytes);
    EXPECT_TRUE(contents.starts_with(layout.files()[0].header));
    const std::string data = contents.substr(layout.files()[0].header.size());
    EXPECT_EQ(data, std::string(8, data.front()));
    EXPECT_EQ(read_file(path("config.json")), "{}");
    EXPECT_TRUE(fs::exists(path("torch_ckpt.checksums")));
    return data.front();
  }

  /// Returns the names in the parent directory.
  Names siblings() const {
    Names names;
    for (const auto& entry : fs::directory_iterator(directory_.path())) {
      names.push_back(entry.path().filename());
    }
    std::ranges::sort(names);
    return names;
  }

  os::Directory parent_ = open_directory(directory_);
  std::set<std::string> extras_;
  Warnings warnings_;
};

TEST_F(ModelSaveTest, PublishesADirectoryWithAllItsFiles) {
  save_well('x');
  EXPECT_EQ(letter(), 'x');
  EXPECT_EQ(siblings(), Names{"model"});
  EXPECT_EQ(directory_.names(), (Names{"model", "model/config.json", "model/model.safetensors",
                                       "model/torch_ckpt.checksums", "model/vocab.txt"}));
  EXPECT_EQ(warnings_, Warnings());
}

TEST_F(ModelSaveTest, WritesAnIndexForSeveralFiles) {
  save_well('x', 4);
  EXPECT_EQ(read_file(path("model.safetensors.index.json")), layout_of(4).index());
  EXPECT_TRUE(fs::exists(path("model-00002-of-00002.safetensors")));
}

TEST_F(ModelSaveTest, WritesTheChecksumsOfAllFiles) {
  save_well('x', 4);
  const auto sums =
      format::decode_safe_checksums(bytes_of(read_file(path("torch_ckpt.checksums")))).value();
  ASSERT_EQ(sums.size(), 5);
  for (const auto& file : sums) {
    std::string contents = read_file(path(file.name));
    EXPECT_EQ(file.bytes, contents.size());
    if (file.name.ends_with(".safetensors")) contents.resize(contents.size() - 4);
    EXPECT_EQ(file.header_crc, format::crc32(0, bytes_of(contents))) << file.name;
  }
}

TEST_F(ModelSaveTest, ReplacesADirectoryCompletely) {
  save_well('x', 4);
  save_well('y');
  EXPECT_EQ(letter(), 'y');
  EXPECT_FALSE(fs::exists(path("model.safetensors.index.json")));
  EXPECT_EQ(siblings(), Names{"model"});
}

TEST_F(ModelSaveTest, RefusesToReplaceADirectoryUnlessItMay) {
  save_well('x');
  const auto refused = begin(false);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().sys_errno, EEXIST);
  EXPECT_EQ(siblings(), Names{"model"});
}

TEST_F(ModelSaveTest, RefusesToReplaceADirectoryWithAFileOfAnother) {
  save_well('x');
  write_file(path("notes.txt"), "precious");
  const auto refused = begin();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().sys_errno, EEXIST);
  EXPECT_NE(refused.error().detail.str().find("notes.txt"), std::string::npos);
  EXPECT_EQ(siblings(), Names{"model"});
}

TEST_F(ModelSaveTest, RefusesToReplaceADirectoryWithAnotherModelOrADirectoryInside) {
  for (const char* name : {"model_ema.safetensors", "model.fp16.safetensors",
                           "model-00001-of-2.safetensors", "model.safetensors.bak"}) {
    save_well('x');
    write_file(path(name), "precious");
    EXPECT_FALSE(begin()) << name;
    fs::remove(path(name));
  }
  fs::remove(path("config.json"));
  fs::create_directory(path("config.json"));
  EXPECT_FALSE(begin());
}

TEST_F(ModelSaveTest, ReplacesFilesThatItWritesItself) {
  save_well('x');
  write_file(path("tokenizer.json"), "{}");
  EXPECT_FALSE(begin());
  extras_ = {"tokenizer.json"};
  save_well('y');
  EXPECT_EQ(letter(), 'y');
}

TEST_F(ModelSaveTest, KeepsThePermissionsOfTheReplacedDirectory) {
  save_well('x');
  fs::permissions(directory_.file("model"), fs::perms::owner_all);
  save_well('y');
  EXPECT_EQ(fs::status(directory_.file("model")).permissions(), fs::perms::owner_all);
}

TEST_F(ModelSaveTest, KeepsTheOldModelAfterACrashBetweenTwoRenames) {
  save_well('x');
  // As a file system that cannot exchange names, and a crash before the second rename leave it.
  fs::rename(directory_.file("model"), directory_.file(".model.former-" + std::string(32, 'a')));
  {
    const os::ScopedFaultHook hook(NthCallFails("pwrite", 1, ENOSPC));
    EXPECT_EQ(save('y').state, PublishState::not_published);
  }
  ASSERT_EQ(siblings().size(), 1);
  EXPECT_TRUE(fs::exists(directory_.file(siblings()[0] + "/model.safetensors")));
}

TEST_F(ModelSaveTest, RefusesToReplaceAFile) {
  write_file(directory_.file("model"), "precious");
  const auto refused = begin();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().sys_errno, EEXIST);
  EXPECT_EQ(read_file(directory_.file("model")), "precious");
}

TEST_F(ModelSaveTest, RefusesToReplaceADirectoryToWhichAFileWasAddedDuringTheSave) {
  save_well('x');
  auto begun = begin().value();
  write_file(path("notes.txt"), "precious");
  EXPECT_EQ(begun.publish(true, warnings_).state, PublishState::not_published);
  EXPECT_EQ(letter(), 'x');
  EXPECT_EQ(siblings(), Names{"model"});
}

TEST_F(ModelSaveTest, KeepsAReplacedDirectoryToWhichAFileIsAddedAtTheLastMoment) {
  save_well('x');
  {
    const os::ScopedFaultHook hook([&](std::string_view operation, std::string_view at) {
      if (operation == "rename" && at == directory_.file("model")) {
        write_file(path("notes.txt"), "precious");
      }
      return 0;
    });
    save_well('y');
  }
  EXPECT_EQ(letter(), 'y');
  ASSERT_EQ(siblings().size(), 2);
  EXPECT_TRUE(siblings()[0].starts_with(".model.former-"));
  EXPECT_EQ(read_file(directory_.file(siblings()[0] + "/notes.txt")), "precious");
  EXPECT_EQ(warnings_.size(), 1);
  save_well('z');
  EXPECT_EQ(siblings().size(), 2);
}

TEST_F(ModelSaveTest, RefusesToReplaceADirectoryThatAnotherProcessCreatesDuringTheSave) {
  auto begun = begin(false).value();
  fs::create_directory(directory_.file("model"));
  write_file(path("theirs"), "precious");
  EXPECT_EQ(begun.publish(true, warnings_).state, PublishState::not_published);
  EXPECT_EQ(read_file(path("theirs")), "precious");
  EXPECT_EQ(siblings(), Names{"model"});
}

TEST_F(ModelSaveTest, ReplacesAnEmptyDirectoryEvenIfItMayReplaceNothing) {
  fs::create_directory(directory_.file("model"));
  fs::permissions(directory_.file("model"), fs::perms::owner_all);
  const auto layout = layout_of();
  auto begun = begin(false).value();
  ASSERT_TRUE(write_data(begun, layout, 'x'));
  ASSERT_TRUE(begun.complete(layout, {}, {}, true));
  EXPECT_EQ(begun.publish(true, warnings_).state, PublishState::published);
  EXPECT_TRUE(fs::exists(path("model.safetensors")));
  EXPECT_EQ(fs::status(directory_.file("model")).permissions(), fs::perms::owner_all);
  EXPECT_EQ(siblings(), Names{"model"});
}

TEST_F(ModelSaveTest, KeepsAnEmptyDirectoryToWhichAnotherProcessAddsAFileAtTheLastMoment) {
  fs::create_directory(directory_.file("model"));
  auto begun = begin(false).value();
  PublishOutcome outcome;
  {
    const os::ScopedFaultHook hook([&](std::string_view operation, std::string_view at) {
      if (operation == "rmdir" && at == directory_.file("model")) {
        write_file(path("theirs"), "precious");
      }
      return 0;
    });
    outcome = begun.publish(true, warnings_);
  }
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_EQ(outcome.error.sys_errno, EEXIST);
  EXPECT_EQ(read_file(path("theirs")), "precious");
  EXPECT_EQ(siblings(), Names{"model"});
}

TEST_F(ModelSaveTest, RefusesToReplaceAnEmptyDirectoryInWhichASaveHasBegun) {
  fs::create_directory(directory_.file("model"));
  auto other = parent_.open_directory("model").value();
  ASSERT_TRUE(other.try_share().value());
  const auto refused = begin(false);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().sys_errno, EEXIST);
}

TEST_F(ModelSaveTest, ReportsThatAnEmptyDirectoryCannotBeRemoved) {
  fs::create_directory(directory_.file("model"));
  auto begun = begin(false).value();
  const os::ScopedFaultHook hook(NthCallFails("rmdir", 1, EROFS));
  const auto outcome = begun.publish(true, warnings_);
  EXPECT_EQ(outcome.state, PublishState::not_published);
  EXPECT_EQ(outcome.error.sys_errno, EROFS);
  EXPECT_EQ(siblings(), Names{"model"});
}

TEST_F(ModelSaveTest, RefusesToReplaceALinkToAnEmptyDirectory) {
  fs::create_directory(directory_.file("elsewhere"));
  fs::create_directory_symlink("elsewhere", directory_.file("model"));
  EXPECT_FALSE(begin(false));
}

TEST_F(ModelSaveTest, LeavesADirectoryThatIsBeingLoadedToTheNextSave) {
  save_well('x');
  {
    auto reader = os::Directory::open(directory_.file("model")).value();
    ASSERT_TRUE(*reader.try_share());
    save_well('y');
    EXPECT_EQ(siblings().size(), 2);
    EXPECT_TRUE(ok(reader.open_for_read("model.safetensors")));
  }
  save_well('z');
  EXPECT_EQ(siblings(), Names{"model"});
}

TEST_F(ModelSaveTest, RemovesTheLeftoversOfInterruptedSavesOnly) {
  const std::string digits(32, '0');
  for (const std::string& name : {".model.tmp-" + digits, ".other.tmp-" + digits,
                                  ".model.tmp-" + digits + "0", std::string(".model.tmp-readme")}) {
    fs::create_directory(directory_.file(name));
  }
  save_well('x');
  EXPECT_EQ(siblings(), (Names{".model.tmp-" + digits + "0", ".model.tmp-readme",
                               ".other.tmp-" + digits, "model"}));
}

TEST_F(ModelSaveTest, SparesASaveThatIsRunning) {
  auto running = begin().value();
  save_well('x');
  EXPECT_TRUE(fs::exists(directory_.file(running.temporary())));
  running.discard(warnings_);
  EXPECT_EQ(siblings(), Names{"model"});
}

TEST_F(ModelSaveTest, SparesADirectoryThatGetsTheNameOfALeftover) {
  const std::string leftover = directory_.file(".model.tmp-" + std::string(32, '0'));
  fs::create_directory(leftover);
  {
    os::ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
      if (operation == "flock" && path == leftover) {
        fs::rename(leftover, directory_.file("published"));
        fs::create_directory(leftover);
      }
      return 0;
    });
    save_well('x');
  }
  EXPECT_EQ(siblings(), (Names{fs::path(leftover).filename(), "model", "published"}));
}

TEST_F(ModelSaveTest, SparesALaterSaveThatHasReplacedItRightAfterTheRename) {
  bool is_renamed = false;
  {
    os::ScopedFaultHook hook([&](std::string_view operation, std::string_view path) {
      const bool is_above = path == directory_.path() || path == directory_.file("model");
      is_renamed |= operation == "rename" && path == directory_.file("model");
      if (is_renamed && is_above && operation != "rename" && fs::exists(directory_.file("model")) &&
          !fs::exists(directory_.file("model/later"))) {
        fs::remove_all(directory_.file("model"));
        fs::create_directory(directory_.file("model"));
        write_file(directory_.file("model/later"), "");
      }
      return 0;
    });
    save_well('x');
  }
  EXPECT_TRUE(fs::exists(directory_.file("model/later")));
}

TEST_F(ModelSaveTest, RemovesTheFilesOfAFailedSave) {
  auto begun = begin().value();
  ASSERT_TRUE(ok(write_data(begun, layout_of(), 'x')));
  begun.discard(warnings_);
  EXPECT_EQ(siblings(), Names());
}

TEST_F(ModelSaveTest, RefusesAFileOfAnotherSize) {
  auto begun = begin().value();
  const auto layout = layout_of();
  EXPECT_TRUE(fails(begun.complete(layout, {}, {}, true), Errc::range_past_end));
}

TEST_F(ModelSaveTest, LeavesTheOldOrTheNewModelWhicheverCallFails) {
  save_well('x');
  for (const char* operation :
       {"open", "mkdir", "pwrite", "fsync", "fsync_directory", "rename", "open_directory"}) {
    for (std::size_t n = 1;; ++n) {
      const NthCallFails fault(operation, n, EIO);
      PublishOutcome outcome;
      {
        const os::ScopedFaultHook hook(fault);
        outcome = save('y');
      }
      if (!fault.hit()) {
        EXPECT_GT(n, 1) << operation << " was never called";
        save_well('x');
        break;
      }
      SCOPED_TRACE(std::string(operation) + " " + std::to_string(n));
      if (outcome.state == PublishState::not_published) {
        ASSERT_EQ(letter(), 'x');
        ASSERT_EQ(siblings(), Names{"model"});
      } else {
        ASSERT_TRUE(letter() == 'x' || letter() == 'y');
      }
      save_well('x');
      ASSERT_EQ(siblings(), Names{"model"});
    }
  }
}

TEST_F(ModelSaveTest, NeverShowsAnIncompleteDirectory) {
  for (const char old : {'-', 'x'}) {
    fs::remove_all(directory_.file("model"));
    if (old == 'x') save_well('x');
    const os::ScopedFaultHook hook([&](std::string_view, std::string_view) {
      const char now = letter();
      EXPECT_TRUE(now == old || now == 'y') << now;
      return 0;
    });
    save_well('y');
  }
}

TEST_F(ModelSaveTest, ReplacesADirectoryOnAFileSystemThatCannotExchangeNames) {
  save_well('x');
  const NthCallFails fault("rename", 1, EINVAL);
  {
    const os::ScopedFaultHook hook(fault);
    save_well('y');
  }
  EXPECT_TRUE(fault.hit());
  EXPECT_EQ(letter(), 'y');
  EXPECT_EQ(siblings(), Names{"model"});
}

}  // namespace
}  // namespace torch_ckpt::directory
