#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <map>

#include "directory/model_save.h"
#include "engine/delta.h"
#include "engine/safetensors_headers.h"
#include "format/crc32.h"
#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

namespace fs = std::filesystem;
using directory::ModelSave;
using namespace test;

/// Values of uint8 tensors, by name.
using Model = std::map<std::string, std::string>;

std::span<std::byte> writable(std::string& text) { return std::as_writable_bytes(std::span(text)); }

// A directory in which models are saved.
class DeltaTest : public DirectoryTest {
 protected:
  /// Saves a model with checksums, as ranks and coordinator do.
  void save(const std::string& name, const Model& model, std::uint64_t max_shard_bytes = 0) {
    std::vector<format::SafeTensor> tensors;
    for (const auto& [tensor, value] : model) {
      tensors.push_back({tensor, format::find_dtype("uint8"), {value.size()}, 0, 0});
    }
    const auto layout =
        planning::SafetensorsLayout::of(tensors, {.max_shard_bytes = max_shard_bytes}).value();
    auto begun = ModelSave::begin(parent_, name, true, {}, warnings_).value();
    std::vector<std::string> contents;
    for (const auto& file : layout.files()) {
      contents.emplace_back(file.bytes, '\0').replace(0, file.header.size(), file.header);
    }
    std::vector<std::map<std::uint64_t, format::RecordSums>> sums(contents.size());
    std::size_t i = 0;
    for (const auto& [tensor, value] : model) {
      const auto [file, begin] = layout.places()[i++];
      contents[file].replace(begin, value.size(), value);
      if (value.empty()) continue;
      format::RecordSums& of_tensor = sums[file][begin];
      of_tensor = {begin, 0, format::block_bytes_for(value.size()), {}, true};
      for (std::size_t at = 0; at < value.size(); at += of_tensor.block_bytes) {
        of_tensor.block_crcs.push_back(
            format::crc32(0, bytes_of(value.substr(at, of_tensor.block_bytes))));
      }
    }
    std::vector<std::string> tables;
    for (std::size_t n = 0; n < contents.size(); ++n) {
      auto opened = begun.directory().create(layout.files()[n].name, os::IoMode::buffered).value();
      ASSERT_TRUE(ok(opened.write_at(bytes_of(contents[n]), 0)));
      std::vector<format::RecordSums> records;
      for (const auto& [begin, of_tensor] : sums[n]) records.push_back(of_tensor);
      tables.push_back(format::encode_checksum_table(records));
    }
    const std::vector<ModelSave::Extra> extras = {{"config.json", "{}"}};
    ASSERT_TRUE(ok(begun.complete(layout, extras, tables, true)));
    ASSERT_EQ(begun.publish(true, warnings_).state, directory::PublishState::published);
  }

  Result<> make_delta() {
    const auto base = parent_.open_directory("base").value();
    const auto version = parent_.open_directory("version").value();
    return write_delta(context(), base, "0000000011", version, true);
  }

  Result<Delta> read_delta() {
    const auto version = parent_.open_directory("version").value();
    return Delta::read(context(), *version.open_for_read("torch_ckpt.delta"));
  }

  /// Applies the delta to a model in memory.
  static Result<> apply(Delta& delta, Model& model) {
    std::vector<std::span<std::byte>> targets;
    for (const auto& tensor : delta.tensors()) {
      targets.push_back(writable(model[tensor.tensor->name]));
    }
    return delta.apply(context(), targets);
  }

  std::string contents(const std::string& file) const { return read_file(directory_.file(file)); }

  Random random_{1};
  Model base_ = {{"a", random_.bytes(100'000)}, {"b", random_.bytes(33'000)}, {"empty", ""}};
  os::Directory parent_ = open_directory(directory_);
  directory::Warnings warnings_;
};

/// Changes every 50th byte of a tensor.
Model changed(Model model, const std::string& name) {
  for (std::size_t i = 0; i < model[name].size(); i += 50) model[name][i] ^= '\x3c';
  return model;
}

TEST_F(DeltaTest, ChangesTensorsInPlace) {
  const Model version = changed(base_, "a");
  save("base", base_);
  save("version", version);
  ASSERT_TRUE(ok(make_delta()));
  auto delta = read_delta();
  ASSERT_TRUE(ok(delta));
  EXPECT_EQ(delta->base(), "0000000011");
  ASSERT_TRUE(ok(apply(*delta, base_)));
  EXPECT_TRUE(base_ == version);
  EXPECT_LT(contents("version/torch_ckpt.delta").size(), 10'000);
}

TEST_F(DeltaTest, RefusesAnyOtherBaseAndChangesNothing) {
  save("base", base_);
  save("version", changed(base_, "a"));
  ASSERT_TRUE(ok(make_delta()));
  auto delta = read_delta().value();
  for (const auto& [name, value] : base_) {
    if (value.empty()) continue;
    Model other = base_;
    other[name].back() ^= '\x01';
    const Model before = other;
    const auto refused = apply(delta, other);
    EXPECT_TRUE(fails(refused, Errc::wrong_base));
    EXPECT_TRUE(refused.error().subject == name);
    EXPECT_TRUE(other == before);
  }
}

TEST_F(DeltaTest, RefusesADamagedDeltaAndChangesNothing) {
  save("base", base_);
  save("version", changed(base_, "a"));
  ASSERT_TRUE(ok(make_delta()));
  std::string bytes = contents("version/torch_ckpt.delta");
  for (const std::size_t at : {std::size_t{5}, std::size_t{2000}, bytes.size() - 100}) {
    std::string damaged = bytes;
    damaged[at] ^= '\x01';
    write_file(directory_.file("version/torch_ckpt.delta"), damaged);
    auto read = read_delta();
    const Model before = base_;
    const auto refused = read ? apply(*read, base_) : read.error();
    EXPECT_TRUE(fails(refused, Errc::checksum_mismatch)) << at;
    EXPECT_TRUE(base_ == before) << at;
  }
}

TEST_F(DeltaTest, ContainsTensorsThatTheBaseLacks) {
  Model version = base_;
  version.erase("b");
  version["a"] = random_.bytes(50'000);  // another shape
  version["c"] = random_.bytes(20'000);
  save("base", base_);
  save("version", version);
  ASSERT_TRUE(ok(make_delta()));
  auto delta = read_delta().value();
  Model target = {{"a", std::string(50'000, 0)}, {"c", std::string(20'000, 0)}, {"empty", ""}};
  ASSERT_TRUE(ok(apply(delta, target)));
  EXPECT_TRUE(target == version);
}

TEST_F(DeltaTest, RefusesATensorOfAnotherSize) {
  save("base", base_);
  save("version", changed(base_, "a"));
  ASSERT_TRUE(ok(make_delta()));
  auto delta = read_delta().value();
  Model shorter = base_;
  shorter["a"].pop_back();
  EXPECT_TRUE(fails(apply(delta, shorter), Errc::invalid_argument));
}

TEST_F(DeltaTest, RefusesSharedMemoryOnlyForDifferentValues) {
  const std::string value = random_.bytes(1000);
  const Model tied = {{"a", value}, {"b", value}};
  save("base", tied);
  for (const bool is_same : {true, false}) {
    Model version = changed(tied, "a");
    if (is_same) version["b"] = version["a"];
    fs::remove_all(directory_.file("version"));
    save("version", version);
    ASSERT_TRUE(ok(make_delta()));
    std::string memory = value;
    const std::vector<std::span<std::byte>> targets(2, writable(memory));
    const auto applied = read_delta().value().apply(context(), targets);
    EXPECT_EQ(applied.has_value(), is_same);
    EXPECT_TRUE(memory == (is_same ? version["a"] : value));
  }
}

TEST_F(DeltaTest, WritesTheFilesOfTheVersion) {
  const Model version = changed(changed(base_, "a"), "b");
  save("base", base_);
  save("version", version, 60'000);  // distributed over other files
  ASSERT_TRUE(ok(make_delta()));
  auto delta = read_delta().value();
  ASSERT_TRUE(ok(parent_.make_directory("made")));
  const auto made = parent_.open_directory("made").value();
  ASSERT_TRUE(ok(delta.write_files(context(), parent_.open_directory("base").value(), made)));
  std::size_t files = 0;
  for (const auto& entry : fs::directory_iterator(directory_.file("version"))) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string name = entry.path().filename();
    EXPECT_TRUE(contents("made/" + name) == contents("version/" + name)) << name;
    ++files;
  }
  EXPECT_EQ(files, 2);
}

TEST_F(DeltaTest, WritesNoFilesFromAnotherBase) {
  save("base", base_);
  save("version", changed(base_, "a"));
  ASSERT_TRUE(ok(make_delta()));
  auto delta = read_delta().value();
  Model other = base_;
  other["b"][5] ^= '\x01';
  save("other", other);
  other.erase("b");
  save("lacks b", other);
  for (const char* name : {"other", "lacks b"}) {
    ASSERT_TRUE(ok(parent_.make_directory("to")));
    const auto written = delta.write_files(context(), parent_.open_directory(name).value(),
                                           parent_.open_directory("to").value());
    EXPECT_TRUE(fails(written, Errc::wrong_base)) << name;
    EXPECT_TRUE(written.error().subject == "b") << name;
    ASSERT_TRUE(ok(parent_.remove_tree("to")));
  }
}

TEST_F(DeltaTest, IsNotMadeFromDamagedFiles) {
  save("base", base_);
  save("version", changed(base_, "a"));
  for (const std::string name : {"base", "version"}) {
    const std::string file = directory_.file(name + "/model.safetensors");
    const std::string sound = read_file(file);
    std::string damaged = sound;
    damaged.back() ^= '\x01';
    write_file(file, damaged);
    EXPECT_TRUE(fails(make_delta(), Errc::checksum_mismatch)) << name;
    write_file(file, sound);
    fs::remove(directory_.file("version/torch_ckpt.delta"));
  }
}

TEST_F(DeltaTest, IsNotMadeFromABaseWithoutChecksums) {
  save("base", base_);
  save("version", base_);
  fs::remove(directory_.file("base/torch_ckpt.checksums"));
  EXPECT_TRUE(fails(make_delta(), Errc::invalid_argument));
}

TEST_F(DeltaTest, ReportsAnyFailedCall) {
  save("base", base_);
  save("version", changed(base_, "a"));
  const auto base = parent_.open_directory("base").value();
  const auto version = parent_.open_directory("version").value();
  for (const char* call : {"open", "pread", "pwrite", "fsync", "close"}) {
    std::size_t n = 1;
    for (;; ++n) {
      const NthCallFails fault(call, n, EIO);
      const auto made = [&] {
        const os::ScopedFaultHook hook(fault);
        return write_delta(context(), base, "0000000011", version, true);
      }();
      fs::remove(directory_.file("version/torch_ckpt.delta"));
      if (!fault.hit()) break;
      EXPECT_FALSE(made) << call << " " << n;
    }
    EXPECT_GT(n, 1) << call;
  }
}

}  // namespace
}  // namespace torch_ckpt::engine
