#include "save_files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "format/checksum_table.h"
#include "format/crc32.h"
#include "os/fault.h"

namespace torch_ckpt::test {

void Files::begin_file() {
  jobs_.push_back({"f" + std::to_string(jobs_.size()), {}});
  expected_.emplace_back();
  checksums_.emplace_back();
}

void Files::add_bytes(std::string payload) {
  payloads_.push_back(std::move(payload));
  jobs_.back().image.add_bytes(host_source(payloads_.back()));
  expected_.back() += payloads_.back();
  checksums_.back().push_back(format::crc32(0, bytes_of(payloads_.back())));
}

void Files::add_tensor(std::string payload) {
  payloads_.push_back(std::move(payload));
  add_tensor_at(host_source(payloads_.back()), payloads_.back());
}

void Files::add_tensor_at(const staging::Source& source, std::string_view payload) {
  jobs_.back().image.add_tensor(row_major("uint8", {payload.size()}), source);
  expected_.back() += byte_record(payload);
  checksums_.back().push_back(format::crc32(0, bytes_of(payload)));
}

void Files::add_transposed(std::string storage, std::size_t rows, std::size_t columns) {
  payloads_.push_back(std::move(storage));
  staging::Source source = host_source(payloads_.back());
  source.dims = {{rows, 1}, {columns, static_cast<std::int64_t>(rows)}};
  std::string gathered;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t column = 0; column < columns; ++column) {
      gathered += payloads_.back()[column * rows + row];
    }
  }
  add_tensor_at(source, gathered);
}

void Files::add_file(std::string contents) {
  begin_file();
  add_bytes(std::move(contents));
}

std::uint64_t Files::bytes() const {
  std::uint64_t sum = 0;
  for (const std::string& contents : expected_) sum += contents.size();
  return sum;
}

std::size_t Files::chunks(std::size_t chunk_bytes) const {
  std::size_t sum = 0;
  for (const std::string& contents : expected_) {
    sum += (contents.size() + chunk_bytes - 1) / chunk_bytes;
  }
  return sum;
}

format::FileResult Files::result(std::size_t file) const {
  format::FileResult result;
  result.name = "f" + std::to_string(file);
  std::vector<format::ItemLocation> locations;
  std::vector<format::RecordSums> records;
  for (const engine::ImageItem& item : jobs_[file].image.items()) {
    locations.push_back({locations.size(), item.offset, item.bytes});
    if (item.bytes == 0) continue;
    records.push_back(
        sums_of(item, std::string_view(expected_[file]).substr(item.offset, item.bytes)));
  }
  result.locations = format::ItemLocations(locations);
  result.crcs = checksums_[file];
  result.checksum_table = format::encode_checksum_table(records);
  return result;
}

void Files::expect_result(const engine::SaveSession& session, std::size_t file) const {
  const auto results = session.results();
  ASSERT_TRUE(ok(results));
  const format::FileResult expected = result(file);
  EXPECT_EQ(std::count(results->begin(), results->end(), expected), 1) << expected.name;
}

void Files::destroy_sources() {
  for (std::string& payload : payloads_) std::fill(payload.begin(), payload.end(), '#');
  payloads_.clear();
}

void Files::expect_in(const TempDir& directory) const {
  EXPECT_EQ(directory.names().size(), jobs_.size());
  for (std::size_t i = 0; i < jobs_.size(); ++i) {
    const std::string path = directory.file(jobs_[i].name);
    EXPECT_TRUE(read_file(path) == expected_[i]) << path;
  }
}

std::shared_ptr<engine::SaveSession> start(const TempDir& directory, const Files& files,
                                           const engine::SaveOptions& options) {
  return engine::SaveSession::start(context(), open_directory(directory), files.jobs(), options)
      .value();
}

void add_assorted_files(Files& files, Random& random, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    files.begin_file();
    for (std::uint64_t items = random.between(0, 6); items > 0; --items) {
      const std::size_t bytes =
          random.coin() ? random.between(0, 20'000) : kPage * random.between(0, 4);
      random.coin() ? files.add_tensor(random.bytes(bytes)) : files.add_bytes(random.bytes(bytes));
    }
  }
}

void SaveFaults::add_files(Files& files) {
  files.begin_file();
  files.add_bytes(std::string(3 * kPage + 5, 'a'));
  files.add_tensor(std::string(kPage, 'b'));
  files.add_file(std::string(100, 'c'));
  files.add_file(std::string(2 * kPage, 'd'));
}

void SaveFaults::fail_each_call(
    const std::function<Result<>(const TempDir& directory, const Files& files)>& save) {
  const auto& [operation, sys_errno] = GetParam();
  for (std::size_t n = 1;; ++n) {
    const TempDir directory;
    Files files(directory);
    add_files(files);
    context().chunks.trim(0);
    const NthCallFails fault(operation, n, sys_errno);
    Result<> outcome;
    {
      const os::ScopedFaultHook hook(fault);
      outcome = save(directory, files);
    }
    if (!fault.hit()) {
      ASSERT_TRUE(ok(outcome)) << "no fault in a save with fewer than " << n << " calls";
      files.expect_on_disk();
      EXPECT_GT(n, 1) << "never called";
      break;
    }
    ASSERT_FALSE(outcome.has_value()) << "call " << n;
    ASSERT_TRUE(is_system_error(outcome.error(), sys_errno, operation, fault.path()))
        << "call " << n;
    ASSERT_EQ(directory.names(), std::vector<std::string>{}) << "call " << n;
  }
}

}  // namespace torch_ckpt::test
