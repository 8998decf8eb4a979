#include "engine/load_session.h"

#include <map>
#include <string>
#include <utility>

#include "checked_math.h"
#include "engine/record_reader.h"

namespace torch_ckpt::engine {
namespace {

Error about(const std::string& name, Error error) {
  error.subject = name;
  return error;
}

}  // namespace

// --- the memory limit ----------------------------------------------------------------------------

Result<> LoadOptions::check() const {
  if (max_scratch_bytes >= kMinScratchBytes) return {};
  return format_error(Errc::invalid_argument, "max_inflight_bytes must be at least " +
                                                  std::to_string(kMinScratchBytes) + ", got " +
                                                  std::to_string(max_scratch_bytes));
}

Result<> LoadOptions::check_target_bytes(const std::string& name, std::uint64_t bytes) const {
  const std::uint64_t available = max_scratch_bytes - kMinScratchBytes;
  if (bytes <= available) return {};
  return about(name, format_error(Errc::invalid_argument,
                                  "reading it needs " + std::to_string(bytes) +
                                      " bytes of memory at once, but max_inflight_bytes=" +
                                      std::to_string(max_scratch_bytes) + " leaves only " +
                                      std::to_string(available) + ". Raise max_inflight_bytes."));
}

Result<> check_records_fit(const Folder& folder, const std::vector<LoadFile>& files,
                           std::span<const planning::StoredRecord> records,
                           const LoadOptions& options) {
  std::map<std::size_t, std::pair<std::string, std::uint64_t>> opened;  // path and length
  std::uint64_t total = 0;
  for (const planning::StoredRecord& record : records) {
    const auto [entry, is_new] = opened.try_emplace(record.file);
    auto& [path, bytes] = entry->second;
    if (is_new) {
      const auto file = DataFile::open(folder, files[record.file].name, DirectIo::off);
      if (!file) return about(record.name, file.error());
      path = file->path();
      bytes = file->bytes();
    }
    if (!inside(record.offset, record.length, bytes)) {
      Error error = past_end_error(record, bytes);
      error.offset = record.offset;
      error.path = path;
      return about(record.name, std::move(error));
    }
    TC_TRY(options.check_target_bytes(record.name, record.length));
    total += record.length;
    TC_TRY(options.check_target_bytes(record.name, total));
  }
  return {};
}

// --- LoadSession ---------------------------------------------------------------------------------

Result<std::shared_ptr<LoadSession>> LoadSession::start(Context& context, Folder folder,
                                                        std::vector<LoadFile> files,
                                                        std::vector<RegionRead> reads,
                                                        const LoadOptions& given) {
  LoadOptions options = given;
  options.max_scratch_bytes -= options.target_bytes;
  if (folder.store() != nullptr) options.chunk_bytes = kStoreChunkBytes;
  std::vector<const planning::Region*> regions;
  std::vector<const Target*> targets;
  regions.reserve(reads.size());
  targets.reserve(reads.size());
  for (const RegionRead& read : reads) {
    regions.push_back(&read.region);
    targets.push_back(&read.target);
  }
  auto scratch = choose_scratch(options, regions, targets, "a load");
  if (!scratch) return scratch.error();
  std::shared_ptr<LoadSession> session(
      new LoadSession(context, std::move(folder), files, std::move(reads), options, *scratch));
  TC_TRY(session->plan(files));
  TC_TRY(session->pipeline_.start(session, "load"));
  return session;
}

Result<> LoadSession::plan(const std::vector<LoadFile>& files) {
  for (const RegionRead& read : delivery_.reads()) bytes_planned_ += read.region.bytes();
  if (options_.verify) {
    std::vector<std::optional<format::ChecksumTable>> tables(files.size());
    for (std::size_t file = 0; file < files.size(); ++file) {
      auto table = checksum_table_of(files[file]);
      if (!table) {
        Error error = table.error();
        error.path = pipeline_.path(file);
        return error;
      }
      tables[file] = std::move(*table);
    }
    delivery_.set_checksums(tables);
  }
  pipeline_.plan(delivery_.wanted(), bytes_planned_, delivery_.block_bytes());
  return {};
}

bool LoadSession::wait_for(std::chrono::milliseconds timeout) {
  return pipeline_.wait_for(timeout);
}

void LoadSession::cancel() {
  if (pipeline_.inherited()) return;
  pipeline_.fail(format_error(Errc::cancelled, "the load was cancelled"));
}

std::optional<Error> LoadSession::failure() const {
  if (!pipeline_.inherited()) return pipeline_.failure();
  return format_error(
      Errc::cancelled,
      "the load belongs to the process that forked this one; wait for it in that process");
}

}  // namespace torch_ckpt::engine
