#include "engine/load_session.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <tuple>
#include <utility>

#include "checked_math.h"
#include "engine/executor.h"
#include "format/crc32.h"

namespace torch_ckpt::engine {
namespace {

using planning::ByteRange;

// Read and then checksummed while it is still in the second-level cache.
constexpr std::uint64_t kFusedBytes = std::uint64_t{256} << 10;

// Ranges of one record: above this, more is read than is wanted.
constexpr std::size_t kMostRanges = std::size_t{1} << 20;

// Objects: only a record that was read whole can be checked.
Result<> check_raw(const ReadRequest& request, std::span<const std::byte> bytes) {
  if (bytes.size() != request.length) return {};
  RecordInMemory record(bytes);
  return format::check_archive(record);
}

// What the archive says against what is asked; `done` where the payload can be used as it lies.
Result<ReadStatus> check_header(const ReadRequest& request, const format::RecordIndex& index) {
  // A planner may store another dtype than the metadata says (a cast in its transform_object), and
  // stock torch converts it on the way in.
  if (index.header.dtype != request.dtype) return ReadStatus::unknown_record;
  if (index.header.sizes != request.sizes) {
    return format_error(Errc::tensor_mismatch,
                        "the record holds a tensor of another shape than the metadata says");
  }
  if (request.kind == ReadKind::tensor) {
    const bool as_asked = request.layout == nullptr ? index.header.is_plain_row_major()
                                                    : index.header == *request.layout;
    if (!as_asked) return ReadStatus::other_layout;
  }
  if (request.region.covering().end > index.payload_bytes) {
    return format_error(Errc::tensor_mismatch, "the record is shorter than the wanted region");
  }
  return ReadStatus::done;
}

bool of_one_record(const ReadRequest& a, const ReadRequest& b) {
  return a.kind == b.kind && a.file == b.file && a.offset == b.offset && a.length == b.length &&
         a.dtype == b.dtype && a.sizes == b.sizes && a.layout == b.layout;
}

// How many bytes the payload of what is asked has.
std::uint64_t payload_bytes_of(const ReadRequest& request) {
  if (request.kind == ReadKind::raw) return request.length;
  if (request.kind == ReadKind::storage) return request.region.covering().end;
  if (request.layout != nullptr) return request.layout->storage_bytes;
  std::uint64_t bytes = request.dtype->item_bytes;
  for (const std::uint64_t size : request.sizes) bytes *= size;
  return bytes;
}

// Whether the region is read straight into the target's memory.
bool is_straight(const ReadRequest& request) {
  return request.target.device == staging::Source::kHost && !request.target.convert &&
         request.region.is_one_run();
}

std::vector<std::string> names_of(const std::vector<LoadFile>& files) {
  std::vector<std::string> names;
  names.reserve(files.size());
  for (const LoadFile& file : files) names.push_back(file.name);
  return names;
}

// Of a check that counts from the payload's begin.
Error from_record_begin(Error error, std::uint64_t payload_begin) {
  if (error.offset != Error::kNoOffset) error.offset += payload_begin;
  return error;
}

}  // namespace

Result<std::shared_ptr<LoadSession>> LoadSession::start(os::Directory directory,
                                                        std::vector<LoadFile> files,
                                                        std::vector<ReadRequest> requests,
                                                        const LoadOptions& given) {
  LoadOptions options = given;
  std::vector<const planning::Region*> regions;
  std::vector<const Target*> targets;
  regions.reserve(requests.size());
  targets.reserve(requests.size());
  for (const ReadRequest& request : requests) {
    regions.push_back(&request.region);
    targets.push_back(&request.target);
  }
  const ScratchLayout layout = lay_out_scratch(
      regions, targets,
      scratch_chunk_bytes(options.chunk_bytes, options.max_scratch_bytes, options.threads),
      options.max_scratch_bytes);
  if (layout.chunk_bytes == 0 || options.threads == 0) {
    return format_error(Errc::invalid_argument,
                        "a load needs at least one thread and 4096 bytes of scratch memory");
  }
  options.threads = std::min(options.threads, options.max_scratch_bytes / layout.bytes());
  std::shared_ptr<LoadSession> session(
      new LoadSession(std::move(directory), std::move(files), std::move(requests), options));
  session->scratch_layout_ = layout;
  session->scratch_layout_.most_kept = layout.bytes() * options.threads;
  if (auto planned = session->plan(); !planned) return planned.error();
  const std::size_t tasks = std::min(options.threads, session->units_.size());
  session->results_.emplace(tasks);
  const auto begun = post_long_tasks(
      tasks, "load",
      [session](std::shared_ptr<const void> threads) { session->run_task(std::move(threads)); },
      [session](Error error) { session->fail_task(std::move(error)); });
  if (!begun) return begun.error();
  return session;
}

LoadSession::LoadSession(os::Directory directory, std::vector<LoadFile> files,
                         std::vector<ReadRequest> requests, const LoadOptions& options)
    : files_given_(std::move(files)),
      files_(std::move(directory), names_of(files_given_), options.direct_io),
      requests_(std::move(requests)),
      options_(options),
      outcomes_(requests_.size()) {}

// --- the plan ------------------------------------------------------------------------------------

void LoadSession::group_requests() {
  std::vector<std::size_t> order(requests_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tie(requests_[a].file, requests_[a].offset, requests_[a].kind) <
           std::tie(requests_[b].file, requests_[b].offset, requests_[b].kind);
  });
  records_.reserve(requests_.size());
  for (const std::size_t index : order) {
    if (records_.empty() || !of_one_record(first(records_.back()), requests_[index])) {
      records_.emplace_back();
    }
    records_.back().requests.push_back(index);
  }
}

Result<> LoadSession::plan() {
  for (const ReadRequest& request : requests_) bytes_planned_ += request.region.bytes();
  group_requests();
  if (options_.verify) {
    std::vector<std::optional<format::ChecksumTable>> tables(files_given_.size());
    for (std::size_t file = 0; file < files_given_.size(); ++file) {
      const std::string& encoded = files_given_[file].checksum_table;
      if (encoded.empty()) continue;
      auto table = format::ChecksumTable::decode(std::as_bytes(std::span(encoded)));
      if (!table) {
        Error error = table.error();
        error.path = files_.path(file);
        error.offset = Error::kNoOffset;
        error.detail = "its checksums in the metadata are damaged: " + error.detail;
        return error;
      }
      tables[file] = std::move(*table);
    }
    for (Record& record : records_) {
      // At the place of an item without bytes begins the next one, whose checksums these would be.
      if (const auto& table = tables[first(record).file]; table && first(record).length > 0) {
        record.sums = table->find(first(record).offset);
      }
    }
  }
  std::vector<planning::WantedRecord> wanted;
  wanted.reserve(records_.size());
  for (const Record& record : records_) wanted.push_back(wanted_of(record));
  planning::ReadPlanLimits limits;
  // With room for the ends of the blocks that a direct read takes.
  limits.batch_bytes = scratch_layout_.step_bytes();
  for (const Record& record : records_) {
    // A block is checked within one piece.
    const format::RecordSums* sums = blocks_of(record.sums, first(record).kind == ReadKind::raw);
    if (sums != nullptr) limits.cut_bytes = std::max(limits.cut_bytes, sums->block_bytes);
  }
  limits.piece_bytes =
      std::max(planning::piece_bytes_for(bytes_planned_, options_.threads), limits.cut_bytes);
  units_ = planning::plan_reads(wanted, limits);
  for (const planning::ReadUnit& unit : units_) {
    files_.expect_unit(unit.file);
    if (unit.is_batch || unit.piece != 0) continue;
    auto large = std::make_unique<LargeRecord>();
    const std::size_t index = unit.records.front();
    const std::vector<ByteRange>& ranges = wanted[index].ranges;
    if (ranges.size() == 1 && ranges[0].begin == 0) large->bytes_from_begin = ranges[0].end;
    large->pieces.resize(unit.pieces);
    large->pieces_left = unit.pieces;
    records_[index].large = std::move(large);
  }
  return {};
}

planning::WantedRecord LoadSession::wanted_of(const Record& record) const {
  const ReadRequest& of = first(record);
  const planning::ReadPlanLimits limits;
  planning::WantedRecord wanted{of.file, of.offset, of.length, {}};
  std::uint64_t end = 0;  // of the payload
  for (const std::size_t index : record.requests) {
    end = std::max(end, payload_bytes_of(requests_[index]));
  }
  for (const std::size_t index : record.requests) {
    const planning::Region& region = requests_[index].region;
    if (region.covering().end > end) continue;  // is refused once the record is opened
    if (requests_[index].whole) wanted.ranges.push_back({0, end});
    const auto ranges = region.ranges(limits.gap_bytes, kMostRanges);
    wanted.ranges.insert(wanted.ranges.end(), ranges.begin(), ranges.end());
  }
  if (const format::RecordSums* sums = blocks_of(record.sums, of.kind == ReadKind::raw)) {
    const std::uint64_t last_block = align_down(end, sums->block_bytes);
    for (ByteRange& range : wanted.ranges) {
      range.begin = align_down(range.begin, sums->block_bytes);
      range.end = range.end > last_block ? end : align_up(range.end, sums->block_bytes);
    }
  }
  if (wanted.ranges.size() > 1) {
    wanted.ranges = planning::coalesce(std::move(wanted.ranges), limits.gap_bytes);
  }
  return wanted;
}

// --- a task --------------------------------------------------------------------------------------

void LoadSession::run_task(std::shared_ptr<const void> threads) {
  Result<> status;
  try {
    auto scratch = Scratch::make(scratch_layout_, options_.ready);
    if (scratch) {
      run_units(**scratch);
      if (auto settled = (*scratch)->wait_all(); !settled) status = settled;
    } else {
      status = scratch.error();
    }
  } catch (...) {
    status = exception_error(std::current_exception(), "load");
  }
  threads.reset();
  if (!status) return fail_task(std::move(status).error());
  results_->send({});
}

void LoadSession::fail_task(Error error) noexcept {
  fail(std::move(error), LoadFailure::kNoRequest);
  results_->send({});
}

void LoadSession::run_units(Scratch& scratch) {
  while (!cancelled_) {
    const std::size_t number = next_unit_++;
    if (number >= units_.size()) return;
    const planning::ReadUnit& unit = units_[number];
    std::size_t culprit = records_[unit.records.front()].requests.front();
    try {
      auto done = run_unit(unit, scratch, culprit);
      if (!done) fail(std::move(done).error(), culprit);
    } catch (...) {
      fail(exception_error(std::current_exception(), "load"), culprit);
    }
  }
}

Result<> LoadSession::run_unit(const planning::ReadUnit& unit, Scratch& scratch,
                               std::size_t& culprit) {
  auto file = files_.acquire(unit.file);
  if (!file) return file.error();
  for (const std::size_t index : unit.records) {
    const ReadRequest& request = first(records_[index]);
    if (inside(request.offset, request.length, (*file)->bytes())) continue;
    culprit = records_[index].requests.front();
    return format_error(Errc::range_past_end,
                        "the metadata gives a record of " + std::to_string(request.length) +
                            " bytes, but the file has " + std::to_string((*file)->bytes()));
  }
  auto done =
      unit.is_batch ? run_batch(unit, **file, scratch, culprit) : run_piece(unit, **file, scratch);
  file->reset();
  files_.release(unit.file);
  return done;
}

Result<> LoadSession::deliver(const Record& record, std::uint64_t position,
                              std::span<const std::byte> bytes, Scratch& scratch) {
  for (const std::size_t index : record.requests) {
    const ReadRequest& request = requests_[index];
    auto delivered = scratch.deliver(request.region, request.target, position, bytes);
    if (!delivered) return delivered.error();
    bytes_done_ += *delivered;
  }
  return {};
}

void LoadSession::set_status(const Record& record, ReadStatus status) {
  for (const std::size_t index : record.requests) outcomes_[index].status = status;
}

// Decodes the archive around a payload and checks it.
Result<LoadSession::Payload> LoadSession::open_payload(const Record& record,
                                                       format::RecordBytes& bytes) {
  const ReadRequest& request = first(record);
  Payload payload;
  if (request.kind == ReadKind::raw) {
    payload.bytes = request.length;
    for (const std::size_t index : record.requests) {
      if (requests_[index].region.covering().end <= request.length) continue;
      return format_error(Errc::range_past_end, "the record is shorter than the wanted range");
    }
  } else {
    auto archive = format::index_record(bytes);
    if (!archive) {
      if (archive.error().code != Errc::pickle_unknown) return archive.error();
      if (record.sums && !record.sums->raw) {
        // Of a tensor that the engine wrote, which it would know.
        return format_error(Errc::checksum_mismatch,
                            "the archive is damaged: " + archive.error().detail);
      }
      payload.status = ReadStatus::unknown_record;
      return payload;
    }
    payload.offset = archive->payload_offset;
    payload.bytes = archive->payload_bytes;
    payload.crc = archive->payload_crc;
    if (record.sums && !record.sums->raw) {
      auto intact = check_envelope(*record.sums, bytes, payload.offset, payload.bytes);
      if (!intact) return intact.error();
    }
    for (const std::size_t index : record.requests) {
      auto status = check_header(requests_[index], *archive);
      if (!status) return status.error();
      payload.status = *status;
      if (*status == ReadStatus::other_layout) outcomes_[index].header = archive->header;
    }
  }
  if (const format::RecordSums* sums = blocks_of(record.sums, request.kind == ReadKind::raw);
      sums != nullptr && payload.status == ReadStatus::done &&
      sums->block_crcs.size() != (payload.bytes + sums->block_bytes - 1) / sums->block_bytes) {
    return format_error(Errc::checksum_mismatch,
                        "the metadata has the checksums of a record of another size");
  }
  return payload;
}

// --- small records -------------------------------------------------------------------------------

Result<> LoadSession::run_batch(const planning::ReadUnit& unit, const DataFile& file,
                                Scratch& scratch, std::size_t& culprit) {
  auto room = scratch.next_buffer();
  if (!room) return room.error();
  auto bytes =
      file.fetch(*room, unit.begin, unit.length, file.goes_direct(unit.begin, unit.length));
  if (!bytes) return bytes.error();
  for (const std::size_t index : unit.records) {
    const Record& record = records_[index];
    culprit = record.requests.front();
    const ReadRequest& request = first(record);
    const auto in_memory = bytes->subspan(request.offset - unit.begin, request.length);
    if (auto taken = take_from_memory(record, in_memory, scratch); !taken) return taken;
  }
  return scratch.submit();
}

Result<> LoadSession::take_from_memory(const Record& record, std::span<const std::byte> bytes,
                                       Scratch& scratch) {
  RecordInMemory in_memory(bytes);
  auto opened = open_payload(record, in_memory);
  if (!opened) return opened.error();
  if (opened->status == ReadStatus::done) {
    const auto payload = bytes.subspan(opened->offset, opened->bytes);
    if (const format::RecordSums* sums =
            blocks_of(record.sums, first(record).kind == ReadKind::raw)) {
      PayloadCheck check = PayloadCheck::by_blocks(*sums, payload.size());
      auto intact = check.take(0, payload);
      if (!intact) return from_record_begin(intact.error(), opened->offset);
    } else if (options_.verify && first(record).kind == ReadKind::raw) {
      if (auto intact = check_raw(first(record), payload); !intact) return intact;
    } else if (options_.verify && is_known(opened->crc, payload.size())) {
      const std::uint32_t found = format::crc32(0, payload);
      if (found != opened->crc) return checksum_error(opened->crc, found, "the archive");
    }
    if (auto delivered = deliver(record, 0, payload, scratch); !delivered) return delivered;
  }
  set_status(record, opened->status);
  return {};
}

// --- large records -------------------------------------------------------------------------------

Result<> LoadSession::run_piece(const planning::ReadUnit& unit, const DataFile& file,
                                Scratch& scratch) {
  const Record& record = records_[unit.records.front()];
  const ReadRequest& request = first(record);
  LargeRecord& large = *record.large;
  std::call_once(large.once, [&] {
    RecordInFile in_file(file, request.offset, request.length);
    auto opened = open_payload(record, in_file);
    if (opened) {
      large.payload = *opened;
    } else {
      large.error = opened.error();
    }
  });
  if (large.error) return *large.error;
  const Payload& payload = large.payload;
  const format::RecordSums* blocks = blocks_of(record.sums, request.kind == ReadKind::raw);
  const bool is_whole = options_.verify && blocks == nullptr &&
                        large.bytes_from_begin == payload.bytes && request.kind != ReadKind::raw &&
                        is_known(payload.crc, payload.bytes);

  if (payload.status == ReadStatus::done) {
    PayloadCheck check;
    if (blocks != nullptr) check = PayloadCheck::by_blocks(*blocks, payload.bytes);
    if (is_whole) check = PayloadCheck::whole_payload();
    for (const ByteRange& range : unit.ranges) {
      if (auto read = read_range(record, range, file, scratch, check); !read) return read;
    }
    large.pieces[unit.piece] = check.sum();
  }
  if (--large.pieces_left > 0 || cancelled_) return {};

  if (is_whole && payload.status == ReadStatus::done) {
    std::uint32_t found = 0;
    for (const auto& [crc, bytes] : large.pieces) found = format::crc32_join(found, crc, bytes);
    if (found != payload.crc) return checksum_error(payload.crc, found, "the archive");
  }
  if (options_.verify && blocks == nullptr && request.kind == ReadKind::raw) {
    for (const std::size_t index : record.requests) {
      const ReadRequest& whole = requests_[index];
      if (!is_straight(whole) || whole.region.bytes() != whole.length) continue;
      const std::span<const std::byte> bytes(whole.target.address, whole.length);
      if (auto intact = check_raw(whole, bytes); !intact) return intact;
      break;
    }
  }
  set_status(record, payload.status);
  return {};
}

Result<> LoadSession::read_range(const Record& record, ByteRange range, const DataFile& file,
                                 Scratch& scratch, PayloadCheck& check) {
  const ReadRequest& request = first(record);
  const std::uint64_t payload_begin = record.large->payload.offset;
  const std::uint64_t begin_in_file = request.offset + payload_begin;
  const bool straight = record.requests.size() == 1 && is_straight(request);
  const ByteRange run = straight ? request.region.covering() : ByteRange{};
  const auto checked = [&](std::uint64_t position, std::span<const std::byte> bytes) -> Result<> {
    auto intact = check.take(position, bytes);
    if (intact) return intact;
    return from_record_begin(intact.error(), payload_begin);
  };
  while (range.begin < range.end && !cancelled_) {
    // Of a direct read the first and last blocks may hold other bytes, too.
    std::uint64_t step_end = std::min(range.end, range.begin + scratch.step_bytes());
    const bool direct = file.goes_direct(begin_in_file + range.begin, step_end - range.begin);
    while (range.begin < step_end) {
      std::uint64_t end = direct ? step_end : std::min(step_end, range.begin + kFusedBytes);
      if (straight && range.begin < run.begin) end = std::min(end, run.begin);
      const bool in_run = straight && range.begin >= run.begin && range.begin < run.end;
      if (in_run) end = std::min(end, run.end);
      const std::uint64_t bytes = end - range.begin;
      if (in_run && !direct) {
        const std::span<std::byte> out(request.target.address + (range.begin - run.begin), bytes);
        if (auto read = file.read(out, begin_in_file + range.begin); !read) return read;
        if (auto intact = checked(range.begin, out); !intact) return intact;
        bytes_done_ += bytes;
        range.begin = end;
        continue;
      }
      auto room = scratch.next_buffer();
      if (!room) return room.error();
      auto fetched = file.fetch(*room, begin_in_file + range.begin, bytes, direct);
      if (!fetched) return fetched.error();
      for (std::span<const std::byte> left = *fetched; !left.empty();) {
        const auto part = left.first(std::min<std::uint64_t>(left.size(), kFusedBytes));
        if (auto intact = checked(range.begin, part); !intact) return intact;
        if (auto done = deliver(record, range.begin, part, scratch); !done) return done;
        range.begin += part.size();
        left = left.subspan(part.size());
      }
      if (auto submitted = scratch.submit(); !submitted) return submitted;
    }
  }
  return {};
}

// --- files, failures, the caller -----------------------------------------------------------------

void LoadSession::fail(Error error, std::size_t request) noexcept {
  if (error.path.empty() && request != LoadFailure::kNoRequest) {
    // The decoder counts from the record's begin.
    if (error.offset == Error::kNoOffset) error.offset = 0;
    error.offset += requests_[request].offset;
    try {
      error.path = path(requests_[request]);
    } catch (...) {
      error = exception_error(std::current_exception(), "load");
    }
  }
  {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = LoadFailure{std::move(error), request};
  }
  cancelled_ = true;
}

bool LoadSession::wait_for(std::chrono::milliseconds timeout) {
  if (!results_->wait_for(timeout)) return false;
  files_.close_directory();
  return true;
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
