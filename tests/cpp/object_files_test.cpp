#include "planning/object_files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "support.h"

namespace torch_ckpt::planning {
namespace {

using namespace test;

using Sizes = std::vector<std::uint64_t>;

// Tensors whose parts are distributed over ranks: by rows, by columns, or on one rank.
struct Model {
  SafetensorsLayout layout;
  std::vector<std::vector<OwnedPart>> parts;  // by rank
};

OwnedPart part(std::size_t tensor, Sizes offsets, Sizes sizes) {
  return {tensor, std::move(offsets), std::move(sizes)};
}

/// Returns a model of several files for `ranks` ranks.
Model random_model(Random& random, std::size_t ranks) {
  std::vector<format::SafeTensor> tensors;
  Model model;
  model.parts.resize(ranks);
  const char* const dtypes[] = {"uint8", "bfloat16", "float64"};
  for (std::size_t i = 0; i < 12; ++i) {
    const Sizes sizes = {random.between(1, 9), random.between(1, 9)};
    tensors.push_back(
        {"t" + std::to_string(i), format::find_dtype(dtypes[random.between(0, 2)]), sizes, 0, 0});
    const std::uint64_t kind = random.between(0, 2);
    if (kind == 2) {
      model.parts[random.between(0, ranks - 1)].push_back(part(i, {0, 0}, sizes));
      continue;
    }
    std::uint64_t begin = 0;  // in the dimension `kind`
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const std::uint64_t end =
          rank + 1 == ranks ? sizes[kind] : random.between(begin, sizes[kind]);
      Sizes offsets = {0, 0};
      Sizes lengths = sizes;
      offsets[kind] = begin;
      lengths[kind] = end - begin;
      begin = end;
      model.parts[rank].push_back(part(i, offsets, lengths));
    }
  }
  model.layout =
      SafetensorsLayout::of(tensors, {.max_shard_bytes = random.between(100, 2000)}).value();
  return model;
}

/// Returns the bytes of a file whose bytes behind the header are random.
std::string contents_of(Random& random, const SafetensorsLayout::File& file) {
  std::string contents = file.header;
  while (contents.size() < file.bytes) contents += static_cast<char>(random.between(0, 255));
  return contents;
}

/// Returns the stream in which a rank sends its parts of a file, as the engine packs them.
std::string stream_of(const Model& model, std::size_t rank, std::size_t file,
                      const std::string& contents) {
  std::map<std::uint64_t, std::string> packed;  // by the first byte
  for (const OwnedPart& part : model.parts[rank]) {
    const auto [of_file, begin] = model.layout.places()[part.tensor];
    if (of_file != file) continue;
    const format::SafeTensor& tensor = model.layout.tensors()[part.tensor];
    const auto runs =
        BoxRuns::of(tensor.sizes, part.offsets, part.sizes, tensor.dtype->item_bytes).value();
    runs.for_each(0, runs.bytes(), [&](std::uint64_t position, std::uint64_t, std::uint64_t bytes) {
      packed[begin + runs.begin()] += contents.substr(begin + position, bytes);
    });
  }
  std::string stream;
  for (const auto& [offset, bytes] : packed) stream += bytes;
  return stream;
}

/// Assembles a file in windows of random sizes.
std::string assembled(Random& random, const FileAssembly& file,
                      const std::vector<std::string>& streams) {
  std::string contents;
  while (contents.size() < file.bytes()) {
    const std::uint64_t begin = contents.size();
    const std::uint64_t end = std::min(file.bytes(), begin + random.between(1, 300));
    std::string window(end - begin, '\0');
    file.copy_head(begin, std::as_writable_bytes(std::span(window)));
    for (const FileAssembly::Range& range : file.ranges(begin, end)) {
      const std::string data =
          streams.at(file.rank_of(range.stream)).substr(range.offset, range.bytes);
      EXPECT_TRUE(file.copy(range, std::as_bytes(std::span(data)), begin,
                            std::as_writable_bytes(std::span(window))));
    }
    contents += window;
  }
  return contents;
}

TEST(ObjectFiles, AreAssembledFromTheStreamsOfAllRanks) {
  Random random(1);
  for (int round = 0; round < 200; ++round) {
    const std::size_t ranks = random.between(1, 4);
    const Model model = random_model(random, ranks);
    const auto made = ObjectFiles::of(model.layout, model.parts, random.coin()).value();
    std::map<std::string, std::string> files;
    std::map<std::string, std::vector<std::string>> streams;  // by file and rank
    std::size_t written = 0;                                  // by one rank
    for (std::size_t i = 0; i < model.layout.files().size(); ++i) {
      const SafetensorsLayout::File& file = model.layout.files()[i];
      files[file.name] = contents_of(random, file);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        if (!made.places[rank].files[i].head.empty()) ++written;
        streams[file.name].push_back(stream_of(model, rank, i, files[file.name]));
      }
    }
    for (const auto& of_rank : made.assemblies) {
      for (const FileAssembly& given : of_rank) {
        ++written;
        const FileAssembly file = FileAssembly::decode(given.encode()).value();
        ASSERT_EQ(assembled(random, file, streams[file.name()]), files[file.name()]);
      }
    }
    ASSERT_EQ(written, files.size());
  }
}

TEST(ObjectFiles, RanksSendStreamsInTheOrderInWhichTheFilesAreAssembled) {
  Random random(2);
  for (int round = 0; round < 200; ++round) {
    const std::size_t ranks = random.between(2, 4);
    const Model model = random_model(random, ranks);
    const auto made = ObjectFiles::of(model.layout, model.parts, random.coin()).value();
    using Streams = std::vector<std::string>;                               // names of the files
    std::map<std::pair<std::size_t, std::size_t>, Streams> sent, expected;  // by sender, receiver
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      for (const auto& [to, file, bytes] : made.sent[rank]) sent[{rank, to}].push_back(file);
      for (const FileAssembly& file : made.assemblies[rank]) {
        for (std::size_t i = 0; i < file.streams(); ++i) {
          expected[{file.rank_of(i), rank}].push_back(file.name());
        }
      }
    }
    ASSERT_EQ(sent, expected);
  }
}

TEST(ObjectFiles, AreAssembledByRanksThatHavePartsOfThem) {
  Random random(3);
  for (int round = 0; round < 200; ++round) {
    const std::size_t ranks = random.between(2, 4);
    const Model model = random_model(random, ranks);
    const auto made = ObjectFiles::of(model.layout, model.parts, true).value();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      for (const FileAssembly& file : made.assemblies[rank]) {
        std::vector<std::size_t> owners;
        for (std::size_t i = 0; i < file.streams(); ++i) owners.push_back(file.rank_of(i));
        ASSERT_NE(std::ranges::find(owners, rank), owners.end());
      }
    }
  }
}

TEST(ObjectFiles, AreDistributedOverTheRanks) {
  const Sizes sizes = {4, 8};
  std::vector<format::SafeTensor> tensors;
  Model model;
  model.parts.resize(2);
  for (std::size_t i = 0; i < 4; ++i) {
    tensors.push_back({"t" + std::to_string(i), format::find_dtype("float64"), sizes, 0, 0});
    for (std::size_t rank = 0; rank < 2; ++rank) {
      model.parts[rank].push_back(part(i, {2 * rank, 0}, {2, 8}));
    }
  }
  model.layout = SafetensorsLayout::of(tensors, {.max_shard_bytes = 4 * 8 * 8}).value();
  const auto made = ObjectFiles::of(model.layout, model.parts, true).value();
  EXPECT_EQ(made.assemblies[0].size(), 2U);
  EXPECT_EQ(made.assemblies[1].size(), 2U);
}

FileAssembly some_assembly() {
  FileAssembly file("model.safetensors", std::string(64, 'h'), 64 + 4 * 6);
  const FileAssembly::Part left = {64, {4, 6}, {0, 0}, {4, 2}, 1};
  const FileAssembly::Part right = {64, {4, 6}, {0, 2}, {4, 4}, 1};
  EXPECT_TRUE(file.add_stream(3, std::span(&left, 1)));
  EXPECT_TRUE(file.add_stream(5, std::span(&right, 1)));
  return file;
}

TEST(FileAssembly, NeedsOneRangeOfEachStream) {
  using Range = FileAssembly::Range;
  const FileAssembly file = some_assembly();
  EXPECT_EQ(file.ranges(0, 64), std::vector<Range>());
  EXPECT_EQ(file.ranges(0, 88), (std::vector<Range>{{0, 0, 8}, {1, 0, 16}}));
  EXPECT_EQ(file.ranges(71, 77), (std::vector<Range>{{0, 3, 2}, {1, 4, 4}}));
}

TEST(FileAssembly, RefusesBytesWithoutAPlace) {
  const FileAssembly file = some_assembly();
  const std::string data(8, 'x');
  std::string window(4, '\0');
  EXPECT_TRUE(fails(file.copy({0, 0, 8}, std::as_bytes(std::span(data)), 64,
                              std::as_writable_bytes(std::span(window))),
                    Errc::internal));
  EXPECT_TRUE(fails(file.copy({0, 4, 8}, std::as_bytes(std::span(data)), 64,
                              std::as_writable_bytes(std::span(window))),
                    Errc::internal));
}

TEST(FileAssembly, ThatIsDamagedIsRefused) {
  const std::string encoded = some_assembly().encode();
  for (std::size_t bytes = 0; bytes < encoded.size(); ++bytes) {
    EXPECT_TRUE(fails(FileAssembly::decode(encoded.substr(0, bytes)), Errc::frame_damaged));
  }
  EXPECT_TRUE(fails(FileAssembly::decode(encoded + "x"), Errc::frame_damaged));
}

TEST(FileAssembly, RefusesPartsOutsideOfTheFile) {
  FileAssembly file("model.safetensors", "", 100);
  const FileAssembly::Part outside = {90, {20}, {0}, {20}, 1};
  EXPECT_TRUE(fails(file.add_stream(0, std::span(&outside, 1)), Errc::frame_damaged));
}

}  // namespace
}  // namespace torch_ckpt::planning
