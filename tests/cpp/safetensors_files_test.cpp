// Reads safetensors files in a directory, and the tensors in them.

#include "engine/safetensors_files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "engine/checkpoint_verification.h"
#include "format/crc32.h"
#include "format/safe_checksums.h"
#include "reads.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

using planning::Region;
using namespace test;

constexpr std::size_t kKibi = std::size_t{1} << 10;
constexpr std::size_t kMebi = std::size_t{1} << 20;
constexpr const char* kIndexName = "model.safetensors.index.json";

/// Tensors of bytes, by name and contents.
using Tensors = std::vector<std::pair<std::string, std::string>>;

/// A safetensors file, and its checksums.
struct File {
  std::string header;
  std::string data;
  format::SafeChecksums checksums;

  std::string contents() const { return header + data; }
};

File file_of(std::string name, const Tensors& tensors, std::size_t block_bytes = 16 * kKibi) {
  File file;
  std::vector<format::SafeTensor> described;
  for (const auto& [tensor_name, data] : tensors) {
    format::SafeTensor& tensor = described.emplace_back();
    tensor.name = tensor_name;
    tensor.dtype = format::find_dtype("uint8");
    tensor.sizes = {data.size()};
    file.data += data;
  }
  file.header = format::encode_safetensors_header(described, {{"from", name}}, 8).value();
  std::vector<format::RecordSums> sums;
  for (std::size_t i = 0; i < described.size(); ++i) {
    if (described[i].bytes == 0) continue;
    sums.push_back(store_raw(tensors[i].second, described[i].begin, block_bytes).sums);
  }
  file.checksums = {std::move(name), file.contents().size(),
                    format::crc32(0, bytes_of(file.header)), format::encode_checksum_table(sums)};
  return file;
}

class SafetensorsFilesTest : public DirectoryTest {
 protected:
  void write(const std::string& name, const std::string& contents) {
    write_file(directory_.file(name), contents);
  }
  void write(const File& file) { write(file.checksums.name, file.contents()); }
  void write_checksums(const std::vector<File>& files) {
    std::vector<format::SafeChecksums> checksums;
    for (const File& file : files) checksums.push_back(file.checksums);
    write(std::string(format::kSafeChecksumsName), format::encode_safe_checksums(checksums));
  }
  Result<SafetensorsFiles> read(const std::string& name = "a.safetensors") {
    return read_safetensors(open_directory(directory_), name);
  }

  const File a_ = file_of("a.safetensors", {{"x", "12345"}, {"empty", ""}, {"y", "678"}});
  const File b_ = file_of("b.safetensors", {{"z", "9"}});
};

TEST_F(SafetensorsFilesTest, TheIndexLocatesTheTensorsOfAFile) {
  write(a_);
  const auto read_files = read();
  ASSERT_TRUE(ok(read_files));
  const auto& index = read_files->index;
  EXPECT_TRUE(index.is_bare());
  ASSERT_EQ(index.entries().size(), 3);
  EXPECT_EQ(index.find("y"), 2u);
  EXPECT_EQ(index.dtypes(), std::vector<std::string>{"uint8"});
  EXPECT_EQ(index.text(index.tables()[0]), "");
  const auto& shard = index.shards(index.entries()[2]).front();
  EXPECT_EQ(shard.offset, a_.header.size() + 5);
  EXPECT_EQ(shard.length, 3);
  EXPECT_EQ(read_files->metadata, (format::SafeMetadata{{"from", "a.safetensors"}}));
}

TEST_F(SafetensorsFilesTest, SeveralFilesAreReadWithTheirIndexAndChecksums) {
  write(a_);
  write(b_);
  write_checksums({a_, b_});
  write(kIndexName, R"({"weight_map":{"z":"b.safetensors","x":"a.safetensors","y":"a.safetensors",)"
                    R"("empty":"a.safetensors"}})");
  const auto read_files = read(kIndexName);
  ASSERT_TRUE(ok(read_files));
  const auto& index = read_files->index;
  ASSERT_EQ(index.files().size(), 2);
  EXPECT_EQ(index.text(index.files()[1]), "b.safetensors");
  EXPECT_EQ(index.text(index.tables()[0]), a_.checksums.table);
  EXPECT_EQ(index.text(index.tables()[1]), b_.checksums.table);
  EXPECT_EQ(index.shards(index.entries()[*index.find("z")]).front().file, 1u);
}

TEST_F(SafetensorsFilesTest, ChecksumsOfAChangedFileAreNotUsed) {
  File changed = a_;
  changed.header[changed.header.find("empty")] = 'E';
  File longer = file_of("a.safetensors", {{"x", "12345"}, {"empty", ""}, {"y", "6789"}});
  for (const File& file : {changed, longer}) {
    write(file);
    write_checksums({b_, a_});
    const auto read_files = read();
    ASSERT_TRUE(ok(read_files));
    EXPECT_TRUE(read_files->files[0].has_stale_checksums);
    EXPECT_EQ(read_files->index.text(read_files->index.tables()[0]), "");
  }
  write(a_);
  EXPECT_FALSE(read()->files[0].has_stale_checksums);
}

TEST_F(SafetensorsFilesTest, DamagedChecksumsAreRefused) {
  write(a_);
  write("torch_ckpt.checksums", "TCF1");
  EXPECT_TRUE(fails(read(), Errc::checksum_mismatch));
  EXPECT_EQ(read().error().path, directory_.file("torch_ckpt.checksums"));
}

TEST_F(SafetensorsFilesTest, FilesThatDoNotMatchTheIndexAreRefused) {
  write(a_);
  write(b_);
  write("c.safetensors", file_of("c", {{"z", ""}}).contents());
  const std::string of_a = R"("x":"a.safetensors","y":"a.safetensors","empty":"a.safetensors")";
  const std::vector<std::pair<std::string, Errc>> maps{
      {R"("x":"a.safetensors")", Errc::metadata_inconsistent},
      {of_a + R"(,"z":"a.safetensors")", Errc::metadata_inconsistent},
      {of_a + R"(,"x":"a.safetensors")", Errc::metadata_inconsistent},
      {R"("z":"b.safetensors","y":"c.safetensors")", Errc::metadata_inconsistent},
      {R"("z":"d.safetensors")", Errc::metadata_inconsistent},
      {R"("z":"../b.safetensors")", Errc::outside_directory},
      {R"("z":"/b.safetensors")", Errc::outside_directory},
      {R"("z":"")", Errc::outside_directory},
  };
  for (const auto& [map, code] : maps) {
    write(kIndexName, "{\"weight_map\":{" + map + "}}");
    EXPECT_TRUE(fails(read(kIndexName), code)) << map;
  }
  write(kIndexName, "{\"weight_map\":{" + of_a + "}}");
  EXPECT_TRUE(ok(read(kIndexName)));
}

TEST_F(SafetensorsFilesTest, LinksAreRefused) {
  write("elsewhere", a_.contents());
  std::filesystem::create_symlink(directory_.file("elsewhere"), directory_.file("a.safetensors"));
  EXPECT_TRUE(fails(read(), Errc::outside_directory));
}

TEST_F(SafetensorsFilesTest, ADamagedFileIsRefusedWithItsPath) {
  write("a.safetensors", a_.contents().substr(0, a_.contents().size() - 1));
  ASSERT_TRUE(fails(read(), Errc::metadata_inconsistent));
  EXPECT_EQ(read().error().path, directory_.file("a.safetensors"));
}

TEST_F(SafetensorsFilesTest, TensorsThatAnIndexCannotHoldAreRefused) {
  write(file_of("a.safetensors", {{std::string(100'000, 'n'), ""}}));
  EXPECT_TRUE(fails(read(), Errc::metadata_inconsistent));
  std::string json = R"({"a":{"dtype":"U8","shape":[9223372036854775808,0],"data_offsets":[0,0]}})";
  json.insert(0, std::string("\0\0\0\0\0\0\0\0", 8));
  json[0] = static_cast<char>(json.size() - 8);
  write("a.safetensors", json);
  EXPECT_TRUE(fails(read(), Errc::metadata_inconsistent));
}

TEST_F(SafetensorsFilesTest, AVerificationChecksBlocksAndListsTensorsWithoutChecksums) {
  File file = file_of("a.safetensors", {{"x", Random(1).bytes(100 * kKibi)}, {"y", "678"}});
  write_checksums({file});
  file.data[50 * kKibi] = static_cast<char>(file.data[50 * kKibi] ^ 1);
  write(file);
  const auto verify = [&](const index::CheckpointIndex& index) {
    CheckpointVerification verification(open_directory(directory_));
    EXPECT_TRUE(ok(verification.add(index, test::never_interrupted)));
    const auto session = verification.start(context(), {}).value();
    EXPECT_TRUE(session->wait_for(std::chrono::minutes(2)));
    EXPECT_TRUE(ok(verification.finish(*session)));
    return verification;
  };
  const auto with_checksums = verify(read()->index);
  ASSERT_EQ(with_checksums.faults().size(), 1);
  EXPECT_EQ(with_checksums.faults()[0].name, "x");
  EXPECT_EQ(with_checksums.faults()[0].offset, file.header.size() + 48 * kKibi);
  EXPECT_TRUE(with_checksums.unverifiable().empty());
  std::filesystem::remove(directory_.file("torch_ckpt.checksums"));
  const auto without = verify(read()->index);
  EXPECT_TRUE(without.faults().empty());
  EXPECT_EQ(without.unverifiable(), (std::vector<std::string>{"x", "y"}));
}

// --- bare records
// ---------------------------------------------------------------------------------

class BareRecord : public ReadsTestWith<std::size_t> {
 protected:
  /// Adds a request for a part of the tensor, and its file.
  void add(const Stored& stored, std::uint64_t begin, std::uint64_t bytes) {
    reads_.add_raw_file("ten bytes." + stored.record);
    reads_.set_table(0, format::encode_checksum_table(std::vector{stored.sums}));
    OwnedRead request = stored.request(ReadKind::bare);
    request.region = Region::of_bytes(begin, bytes);
    reads_.add_to_host(request, bytes);
  }
  const std::string bytes_ = Random(GetParam()).bytes(GetParam());
  Stored stored_ = store_raw(bytes_, 10, 4 * kKibi);
};

TEST_P(BareRecord, IsReadEntirely) {
  add(stored_, 0, bytes_.size());
  reads_.run_all();
  EXPECT_TRUE(reads_.result(0) == bytes_);
}

TEST_P(BareRecord, IsReadInPart) {
  add(stored_, bytes_.size() / 3, bytes_.size() / 2);
  reads_.run_all();
  EXPECT_TRUE(reads_.result(0) ==
              std::string_view(bytes_).substr(bytes_.size() / 3, bytes_.size() / 2));
}

TEST_P(BareRecord, ADamagedBlockIsFoundByAPartialRead) {
  stored_.record[bytes_.size() / 2] = static_cast<char>(stored_.record[bytes_.size() / 2] ^ 1);
  add(stored_, bytes_.size() / 2 + 1, 1);
  const auto session = reads_.run();
  ASSERT_TRUE(failed(*session, Errc::checksum_mismatch, 0));
  EXPECT_TRUE(session->failure()->message().ends_with("delete torch_ckpt.checksums."));
}

TEST_P(BareRecord, ChecksumsOfAnotherSizeAreRefused) {
  stored_.sums.block_crcs.push_back(0);
  add(stored_, 0, 1);
  EXPECT_TRUE(failed(*reads_.run(), Errc::checksum_mismatch, 0));
}

TEST_P(BareRecord, ARegionBeyondTheRecordIsRefused) {
  add(stored_, bytes_.size(), 1);
  EXPECT_TRUE(failed(*reads_.run(), Errc::range_past_end, 0));
}

TEST_P(BareRecord, ARecordBeyondTheFileIsRefused) {
  stored_.record.pop_back();
  reads_.add_raw_file("ten bytes." + stored_.record);
  OwnedRead request = stored_.request(ReadKind::bare);
  request.stored.length += 1;
  request.region = Region::of_bytes(0, 1);
  reads_.add_to_host(request, 1);
  EXPECT_TRUE(failed(*reads_.run(), Errc::range_past_end, 0));
}

TEST_P(BareRecord, BytesThatLookLikeADamagedArchiveAreRead) {
  std::string archive = byte_record(bytes_);
  archive[archive.size() / 2] = static_cast<char>(archive[archive.size() / 2] ^ 1);
  reads_.add_raw_file(archive);
  OwnedRead request = store_raw(archive).request(ReadKind::bare);
  request.region = Region::of_bytes(0, archive.size());
  reads_.add_to_host(request, archive.size());
  reads_.run_all();
  EXPECT_TRUE(reads_.result(0) == archive);
}

INSTANTIATE_TEST_SUITE_P(Sizes, BareRecord, ::testing::Values(10 * kKibi, 3 * kMebi + 5));

}  // namespace
}  // namespace torch_ckpt::engine
