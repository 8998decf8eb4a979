#include "engine/load_session.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <cstring>
#include <exception>
#include <utility>

#include "checked_math.h"
#include "engine/executor.h"
#include "format/crc32.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {
namespace {

namespace asio = boost::asio;

// Read and then checksummed while it is still in the second-level cache.
constexpr std::size_t kFusedBytes = std::size_t{512} << 10;

std::string hex(std::uint32_t value) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += kDigits[(value >> shift) & 15];
  return text;
}

Error checksum_error(std::uint32_t stored, std::uint32_t found) {
  return format_error(Errc::checksum_mismatch, "the bytes are damaged: CRC-32 " + hex(found) +
                                                   ", the archive says " + hex(stored));
}

// A zero checksum of a non-empty payload means that the writer did not compute one
// (torch.serialization.set_crc32_options(False)).
bool is_known(std::uint32_t crc, std::uint64_t bytes) { return crc != 0 || bytes == 0; }

// Objects: only a record that was read whole can be checked.
Result<> check_raw(const ReadRequest& request, std::span<const std::byte> bytes) {
  if (bytes.size() != request.length) return {};
  RecordInMemory record(bytes);
  return format::check_archive(record);
}

// What the archive says against what is asked; `done` where the payload can be used as it lies.
Result<ReadStatus> judge(const ReadRequest& request, const format::RecordIndex& index) {
  // A planner may store another dtype than the metadata says (a cast in its transform_object), and
  // stock torch converts it on the way in.
  if (index.header.dtype != request.dtype) return ReadStatus::unknown_record;
  if (index.header.sizes != request.sizes) {
    return format_error(Errc::tensor_mismatch,
                        "the record holds a tensor of another shape than the metadata says");
  }
  if (request.kind == ReadKind::tensor && !index.header.is_plain_row_major()) {
    return ReadStatus::other_layout;
  }
  if (!inside(request.begin, request.bytes, index.payload_bytes)) {
    return format_error(Errc::tensor_mismatch, "the record is shorter than the wanted region");
  }
  return ReadStatus::done;
}

}  // namespace

Result<std::shared_ptr<LoadSession>> LoadSession::start(std::vector<std::string> files,
                                                        std::vector<ReadRequest> requests,
                                                        const LoadOptions& given) {
  LoadOptions options = given;
  options.chunk_bytes =
      align_down(std::min(options.chunk_bytes, options.max_scratch_bytes), os::kDirectAlignment);
  if (options.chunk_bytes == 0 || options.threads == 0) {
    return format_error(Errc::invalid_argument,
                        "a load needs at least one thread and 4096 bytes of scratch memory");
  }
  options.threads = std::min(options.threads, options.max_scratch_bytes / options.chunk_bytes);
  std::shared_ptr<LoadSession> session(
      new LoadSession(std::move(files), std::move(requests), options));
  const std::size_t tasks = std::min(options.threads, session->units_.size());
  session->results_.emplace(tasks);
  for (std::size_t slot = 0; slot < tasks; ++slot) {
    asio::post(executor(), [session] { session->run_task(); });
  }
  return session;
}

LoadSession::LoadSession(std::vector<std::string> files, std::vector<ReadRequest> requests,
                         const LoadOptions& options)
    : paths_(std::move(files)),
      requests_(std::move(requests)),
      options_(options),
      outcomes_(requests_.size()),
      files_(paths_.size()),
      large_(requests_.size()) {
  std::vector<planning::WantedRecord> wanted;
  wanted.reserve(requests_.size());
  for (const ReadRequest& request : requests_) {
    wanted.push_back({request.file, request.offset, request.length, request.bytes});
    bytes_planned_ += request.bytes;
  }
  planning::ReadPlanLimits limits;
  limits.batch_bytes = options_.chunk_bytes;
  units_ = planning::plan_reads(wanted, limits);
  for (const planning::ReadUnit& unit : units_) {
    ++files_[unit.file].units_left;
    if (unit.is_batch || unit.piece != 0) continue;
    auto large = std::make_unique<LargeRecord>();
    large->piece_crcs.resize(unit.pieces);
    large->pieces_left = unit.pieces;
    large_[unit.records.front()] = std::move(large);
  }
}

void LoadSession::run_task() {
  Result<> status;
  auto chunk = staging::ChunkPool::instance().take(options_.chunk_bytes);
  if (chunk) {
    run_units((*chunk)->bytes());
    staging::ChunkPool::instance().give_back(std::move(*chunk));
    staging::ChunkPool::instance().trim(options_.chunk_bytes * options_.threads);
  } else {
    status = chunk.error();
    fail(chunk.error(), LoadFailure::kNoRequest);
  }
  results_->send(status);
}

void LoadSession::run_units(std::span<std::byte> scratch) {
  while (!cancelled_) {
    const std::size_t number = next_unit_++;
    if (number >= units_.size()) return;
    const planning::ReadUnit& unit = units_[number];
    std::size_t culprit = unit.records.front();
    try {
      if (auto done = run_unit(unit, scratch, culprit); !done) fail(done.error(), culprit);
    } catch (const std::exception& caught) {
      Error error;
      error.operation = "load";
      error.detail = caught.what();
      fail(std::move(error), culprit);
    }
  }
}

Result<> LoadSession::run_unit(const planning::ReadUnit& unit, std::span<std::byte> scratch,
                               std::size_t& culprit) {
  auto file = acquire_file(unit.file);
  if (!file) return file.error();
  for (const std::size_t index : unit.records) {
    const ReadRequest& request = requests_[index];
    if (inside(request.offset, request.length, (*file)->bytes())) continue;
    culprit = index;
    return format_error(Errc::range_past_end,
                        "the metadata gives a record of " + std::to_string(request.length) +
                            " bytes, but the file has " + std::to_string((*file)->bytes()));
  }
  auto done =
      unit.is_batch ? run_batch(unit, **file, scratch, culprit) : run_piece(unit, **file, scratch);
  file->reset();
  release_file(unit.file);
  return done;
}

Result<> LoadSession::run_batch(const planning::ReadUnit& unit, const DataFile& file,
                                std::span<std::byte> scratch, std::size_t& culprit) {
  const auto bytes = scratch.first(unit.length);
  // Into the scratch chunk itself, so direct reads would need a second one.
  if (auto read = file.read(bytes, unit.begin, {}); !read) return read;
  for (const std::size_t index : unit.records) {
    culprit = index;
    const ReadRequest& request = requests_[index];
    const auto record = bytes.subspan(request.offset - unit.begin, request.length);
    if (auto taken = take_from_memory(index, record); !taken) return taken;
  }
  return {};
}

Result<> LoadSession::take_from_memory(std::size_t index, std::span<const std::byte> record) {
  const ReadRequest& request = requests_[index];
  ReadOutcome& outcome = outcomes_[index];
  std::span<const std::byte> payload = record;
  if (request.kind != ReadKind::raw) {
    RecordInMemory in_memory(record);
    auto archive = format::index_record(in_memory);
    if (!archive) {
      if (archive.error().code != Errc::pickle_unknown) return archive.error();
      outcome.status = ReadStatus::unknown_record;
      return {};
    }
    auto status = judge(request, *archive);
    if (!status) return status.error();
    if (*status != ReadStatus::done) {
      outcome.header = std::move(archive->header);
      outcome.status = *status;
      return {};
    }
    payload = record.subspan(archive->payload_offset, archive->payload_bytes);
    if (options_.verify && is_known(archive->payload_crc, payload.size())) {
      const std::uint32_t found = format::crc32(0, payload);
      if (found != archive->payload_crc) return checksum_error(archive->payload_crc, found);
    }
  } else if (!inside(request.begin, request.bytes, payload.size())) {
    return format_error(Errc::range_past_end, "the record is shorter than the wanted range");
  } else if (options_.verify) {
    const auto wanted = payload.subspan(request.begin, request.bytes);
    if (auto intact = check_raw(request, wanted); !intact) return intact;
  }
  if (request.bytes > 0) {
    std::memcpy(request.destination, payload.data() + request.begin, request.bytes);
  }
  bytes_done_ += request.bytes;
  outcome.status = ReadStatus::done;
  return {};
}

void LoadSession::open_large(std::size_t index, const DataFile& file, LargeRecord& large) {
  const ReadRequest& request = requests_[index];
  if (request.kind == ReadKind::raw) {
    large.payload_bytes = request.length;
    if (!inside(request.begin, request.bytes, request.length)) {
      large.error =
          format_error(Errc::range_past_end, "the record is shorter than the wanted range");
    }
    return;
  }
  RecordInFile in_file(file, request.offset, request.length);
  auto archive = format::index_record(in_file);
  if (!archive) {
    if (archive.error().code == Errc::pickle_unknown) {
      large.status = ReadStatus::unknown_record;
    } else {
      large.error = archive.error();
    }
    return;
  }
  auto status = judge(request, *archive);
  if (!status) {
    large.error = status.error();
    return;
  }
  large.status = *status;
  large.payload_offset = archive->payload_offset;
  large.payload_bytes = archive->payload_bytes;
  large.payload_crc = archive->payload_crc;
  if (*status != ReadStatus::done) outcomes_[index].header = std::move(archive->header);
}

Result<> LoadSession::run_piece(const planning::ReadUnit& unit, const DataFile& file,
                                std::span<std::byte> scratch) {
  const std::size_t index = unit.records.front();
  const ReadRequest& request = requests_[index];
  LargeRecord& large = *large_[index];
  std::call_once(large.once, [&] { open_large(index, file, large); });
  if (large.error) return *large.error;

  const bool whole = request.kind != ReadKind::raw && request.bytes == large.payload_bytes;
  const bool verify = options_.verify && whole && is_known(large.payload_crc, large.payload_bytes);
  if (large.status == ReadStatus::done) {
    std::span<std::byte> out(request.destination + unit.begin, unit.length);
    std::uint64_t offset = request.offset + large.payload_offset + request.begin + unit.begin;
    std::uint32_t crc = 0;
    while (!out.empty() && !cancelled_) {
      // Direct reads move a scratch chunk at a time; checksumming follows in cache-sized steps.
      const auto step = out.first(std::min(out.size(), scratch.size()));
      if (auto read = file.read(step, offset, scratch); !read) return read;
      if (verify) {
        for (std::size_t at = 0; at < step.size(); at += kFusedBytes) {
          crc = format::crc32(crc, step.subspan(at, std::min(kFusedBytes, step.size() - at)));
        }
      }
      offset += step.size();
      out = out.subspan(step.size());
      bytes_done_ += step.size();
    }
    large.piece_crcs[unit.piece] = crc;
  }
  if (--large.pieces_left > 0 || cancelled_) return {};

  if (verify && large.status == ReadStatus::done) {
    planning::ReadPlanLimits limits;
    std::uint32_t found = 0;
    std::uint64_t left = large.payload_bytes;
    for (const std::uint32_t crc : large.piece_crcs) {
      const std::uint64_t bytes = std::min(limits.piece_bytes, left);
      found = format::crc32_join(found, crc, bytes);
      left -= bytes;
    }
    if (found != large.payload_crc) return checksum_error(large.payload_crc, found);
  }
  if (options_.verify && request.kind == ReadKind::raw) {
    const std::span<const std::byte> bytes(request.destination, request.bytes);
    if (auto intact = check_raw(request, bytes); !intact) return intact;
  }
  outcomes_[index].status = large.status;
  return {};
}

Result<std::shared_ptr<DataFile>> LoadSession::acquire_file(std::size_t number) {
  FileState& state = files_[number];
  std::lock_guard lock(state.mutex);
  if (state.file == nullptr) {
    auto opened = DataFile::open(paths_[number], options_.direct_io);
    if (!opened) return opened.error();
    state.file = std::make_shared<DataFile>(std::move(*opened));
  }
  return state.file;
}

void LoadSession::release_file(std::size_t number) {
  FileState& state = files_[number];
  if (--state.units_left > 0) return;
  std::lock_guard lock(state.mutex);
  state.file.reset();
}

void LoadSession::fail(Error error, std::size_t request) {
  {
    std::lock_guard lock(mutex_);
    if (error.path.empty() && request != LoadFailure::kNoRequest) {
      error.path = paths_[requests_[request].file];
      // The decoder counts from the record's begin.
      if (error.offset == Error::kNoOffset) error.offset = 0;
      error.offset += requests_[request].offset;
    }
    if (!failure_) failure_ = LoadFailure{std::move(error), request};
  }
  cancelled_ = true;
}

bool LoadSession::wait_for(std::chrono::milliseconds timeout) {
  return results_->wait_for(timeout);
}

void LoadSession::cancel() {
  if (results_->inherited()) return;
  fail(format_error(Errc::cancelled, "the load was cancelled"), LoadFailure::kNoRequest);
}

std::optional<LoadFailure> LoadSession::failure() const {
  if (results_->inherited()) {
    return LoadFailure{
        format_error(Errc::cancelled, "the load is that of the process that forked this one")};
  }
  std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace torch_ckpt::engine
