#include "engine/verify_session.h"

#include <algorithm>
#include <exception>
#include <string>
#include <tuple>
#include <utility>

#include "checked_math.h"
#include "engine/executor.h"
#include "format/crc32.h"
#include "format/record_index.h"

namespace torch_ckpt::engine {
namespace {

using planning::ByteRange;

// Read and then checksummed while it is still in the second-level cache.
constexpr std::uint64_t kFusedBytes = std::uint64_t{256} << 10;

constexpr std::string_view kPayloadEntry = "data/0";

std::string text_of(const std::vector<std::uint64_t>& sizes) {
  std::string text = "[";
  for (const std::uint64_t size : sizes) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

std::vector<std::string> names_of(const std::vector<LoadFile>& files) {
  std::vector<std::string> names;
  names.reserve(files.size());
  for (const LoadFile& file : files) names.push_back(file.name);
  return names;
}

bool continues(const Finding& before, const Finding& next) {
  return before.record == next.record && before.file == next.file && before.bytes > 0 &&
         next.bytes > 0 && before.error.offset + before.bytes == next.error.offset &&
         before.error.code == next.error.code;
}

}  // namespace

Result<std::shared_ptr<VerifySession>> VerifySession::start(os::Directory directory,
                                                            std::vector<LoadFile> files,
                                                            std::vector<NamedRecord> records,
                                                            const VerifyOptions& given) {
  VerifyOptions options = given;
  const ScratchLayout layout = lay_out_scratch(
      {}, {}, scratch_chunk_bytes(options.chunk_bytes, options.max_scratch_bytes, options.threads),
      options.max_scratch_bytes);
  if (layout.chunk_bytes == 0 || options.threads == 0) {
    return format_error(Errc::invalid_argument,
                        "verifying needs at least one thread and 4096 bytes of scratch memory");
  }
  options.threads = std::min(options.threads, options.max_scratch_bytes / layout.bytes());
  std::shared_ptr<VerifySession> session(
      new VerifySession(std::move(directory), std::move(files), std::move(records), options));
  session->scratch_layout_ = layout;
  session->scratch_layout_.most_kept = layout.bytes() * options.threads;
  session->plan();
  const std::size_t tasks = std::min(options.threads, session->units_.size());
  session->results_.emplace(tasks);
  const auto begun = post_long_tasks(
      tasks, "verify",
      [session](std::shared_ptr<const void> threads) { session->run_task(std::move(threads)); },
      [session](Error error) { session->fail_task(std::move(error)); });
  if (!begun) return begun.error();
  return session;
}

VerifySession::VerifySession(os::Directory directory, std::vector<LoadFile> files,
                             std::vector<NamedRecord> records, const VerifyOptions& options)
    : files_given_(std::move(files)),
      records_(std::move(records)),
      options_(options),
      files_(std::move(directory), names_of(files_given_), options.direct_io),
      sums_(records_.size()),
      large_(records_.size()) {}

// --- the plan ------------------------------------------------------------------------------------

void VerifySession::plan() {
  std::vector<std::optional<format::ChecksumTable>> tables(files_given_.size());
  for (std::size_t file = 0; file < files_given_.size(); ++file) {
    const std::string& encoded = files_given_[file].checksum_table;
    if (encoded.empty()) continue;
    auto table = format::ChecksumTable::decode(std::as_bytes(std::span(encoded)));
    if (table) {
      tables[file] = std::move(*table);
      continue;
    }
    Error error = table.error();
    error.offset = Error::kNoOffset;
    error.detail = "its checksums in the metadata are damaged: " + error.detail;
    findings_.push_back({file, Finding::kWholeFile, 0, std::move(error)});
  }

  planning::ReadPlanLimits limits;
  // With room for the ends of the blocks that a direct read takes.
  limits.batch_bytes = scratch_layout_.step_bytes();
  std::vector<planning::WantedRecord> wanted;
  std::vector<std::size_t> planned;  // numbers of those that are wanted
  for (std::size_t i = 0; i < records_.size(); ++i) {
    const NamedRecord& record = records_[i];
    if (!checked_add(record.offset, record.length)) {
      add_finding(i, format_error(Errc::range_past_end, "no file has so many bytes"));
      continue;
    }
    // At the place of an item without bytes begins the next one, whose checksums these would be.
    if (const auto& table = tables[record.file]; table && record.length > 0) {
      sums_[i] = table->find(record.offset);
    }
    // A block is checked within one piece.
    if (sums_[i]) limits.cut_bytes = std::max(limits.cut_bytes, sums_[i]->block_bytes);
    bytes_planned_ += record.length;
    planned.push_back(i);
    // Where in the record the payload begins is not known yet; pieces count from there.
    wanted.push_back({record.file, record.offset, record.length, {{0, record.length}}});
  }
  limits.piece_bytes =
      std::max(planning::piece_bytes_for(bytes_planned_, options_.threads), limits.cut_bytes);
  units_ = planning::plan_reads(wanted, limits);
  for (planning::ReadUnit& unit : units_) {
    files_.expect_unit(unit.file);
    for (std::size_t& index : unit.records) index = planned[index];
    if (unit.is_batch || unit.piece != 0) continue;
    auto large = std::make_unique<LargeRecord>();
    large->pieces.resize(unit.pieces);
    large->pieces_left = unit.pieces;
    large_[unit.records.front()] = std::move(large);
  }
}

// --- a task --------------------------------------------------------------------------------------

void VerifySession::run_task(std::shared_ptr<const void> threads) {
  Result<> status;
  try {
    auto scratch = Scratch::make(scratch_layout_, no_devices_);
    if (scratch) {
      run_units(**scratch);
    } else {
      status = scratch.error();
    }
  } catch (...) {
    status = exception_error(std::current_exception(), "verify");
  }
  threads.reset();
  if (!status) return fail_task(std::move(status).error());
  results_->send({});
}

void VerifySession::fail_task(Error error) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(error);
    cancelled_ = true;
  }
  results_->send({});
}

void VerifySession::run_units(Scratch& scratch) {
  while (!cancelled_) {
    const std::size_t number = next_unit_++;
    if (number >= units_.size()) return;
    run_unit(units_[number], scratch);
  }
}

void VerifySession::run_unit(const planning::ReadUnit& unit, Scratch& scratch) {
  auto file = files_.acquire(unit.file);
  Result<> done;
  if (!file) {
    done = file.error();
  } else {
    done = unit.is_batch ? run_batch(unit, **file, scratch) : run_piece(unit, **file, scratch);
    file->reset();
  }
  files_.release(unit.file);
  if (!done) {
    for (const std::size_t record : unit.records) {
      // Of several pieces of a record that fail so, one tells.
      const bool told = !unit.is_batch && large_[record]->unread.exchange(true);
      if (!told) add_finding(record, done.error());
    }
  }
  for (const std::size_t record : unit.records) {
    if (unit.is_batch) bytes_done_ += records_[record].length;
  }
  for (const ByteRange& range : unit.ranges) bytes_done_ += range.bytes();
}

bool VerifySession::lies_in_file(std::size_t record, const DataFile& file) {
  const NamedRecord& named = records_[record];
  if (inside(named.offset, named.length, file.bytes())) return true;
  add_finding(record,
              format_error(Errc::range_past_end,
                           "the metadata gives a record of " + std::to_string(named.length) +
                               " bytes, but the file has " + std::to_string(file.bytes())));
  return false;
}

Result<> VerifySession::run_batch(const planning::ReadUnit& unit, const DataFile& file,
                                  Scratch& scratch) {
  auto room = scratch.next_buffer();
  if (!room) return room.error();
  auto all = file.fetch(*room, unit.begin, unit.length, file.goes_direct(unit.begin, unit.length));
  for (const std::size_t record : unit.records) {
    const NamedRecord& named = records_[record];
    if (all) {
      check_in_memory(record, all->subspan(named.offset - unit.begin, named.length));
      continue;
    }
    // The others are read also where one cannot be read, or lies behind the end of the file.
    if (!lies_in_file(record, file)) continue;
    auto bytes = file.fetch(*room, named.offset, named.length, false);
    if (bytes) {
      check_in_memory(record, *bytes);
    } else {
      add_finding(record, bytes.error());
    }
  }
  return {};
}

void VerifySession::check_in_memory(std::size_t record, std::span<const std::byte> bytes) {
  RecordInMemory in_memory(bytes);
  const Payload payload = open(record, in_memory);
  const auto of_payload = bytes.subspan(payload.offset, payload.bytes);
  if (payload.check == Payload::Check::blocks) {
    PayloadCheck check = PayloadCheck::by_blocks(*sums_[record], payload.bytes);
    check_bytes(record, payload, 0, of_payload, check);
  } else if (payload.check == Payload::Check::sum) {
    check_sum(record, payload, format::crc32(0, of_payload));
  }
}

Result<> VerifySession::run_piece(const planning::ReadUnit& unit, const DataFile& file,
                                  Scratch& scratch) {
  const std::size_t record = unit.records.front();
  const NamedRecord& named = records_[record];
  LargeRecord& large = *large_[record];
  std::call_once(large.once, [&] {
    if (!lies_in_file(record, file)) return;
    RecordInFile in_file(file, named.offset, named.length);
    large.payload = open(record, in_file);
  });
  const Payload& payload = large.payload;
  if (payload.check == Payload::Check::none) return {};
  PayloadCheck check = payload.check == Payload::Check::blocks
                           ? PayloadCheck::by_blocks(*sums_[record], payload.bytes)
                           : PayloadCheck::whole_payload();
  for (ByteRange range : unit.ranges) {
    range.end = std::min(range.end, payload.bytes);
    if (range.begin >= range.end) continue;
    if (auto read = check_range(record, payload, range, file, scratch, check); !read) return read;
  }
  large.pieces[unit.piece] = check.sum();
  if (--large.pieces_left > 0 || payload.check != Payload::Check::sum || large.unread ||
      cancelled_) {
    return {};
  }
  std::uint32_t found = 0;
  for (const auto& [crc, bytes] : large.pieces) found = format::crc32_join(found, crc, bytes);
  check_sum(record, payload, found);
  return {};
}

Result<> VerifySession::check_range(std::size_t record, const Payload& payload, ByteRange range,
                                    const DataFile& file, Scratch& scratch, PayloadCheck& check) {
  const std::uint64_t begin_in_file = records_[record].offset + payload.offset;
  auto room = scratch.next_buffer();
  if (!room) return room.error();
  std::uint64_t buffered_until = range.begin;
  while (range.begin < range.end && !cancelled_) {
    std::uint64_t bytes = std::min<std::uint64_t>(range.bytes(), scratch.step_bytes());
    bool direct = false;
    if (range.begin >= buffered_until) {
      direct = file.goes_direct(begin_in_file + range.begin, bytes);
      if (!direct) buffered_until = range.begin + bytes;
    }
    if (!direct) bytes = std::min(kFusedBytes, range.bytes());
    auto fetched = file.fetch(*room, begin_in_file + range.begin, bytes, direct);
    if (!fetched && direct) {
      // Smaller reads tell better which bytes are lost.
      buffered_until = range.begin + bytes;
      continue;
    }
    if (!fetched) {
      large_[record]->unread = true;
      if (payload.check == Payload::Check::blocks) {
        // With the rest of the block, of which no more can be said.
        const std::uint64_t next = align_up(range.begin + bytes, sums_[record]->block_bytes);
        bytes = std::min(next, range.end) - range.begin;
      }
      add_finding(record, fetched.error(), bytes);
      range.begin += bytes;
      continue;
    }
    for (std::span<const std::byte> left = *fetched; !left.empty();) {
      const auto part = left.first(std::min<std::uint64_t>(left.size(), kFusedBytes));
      check_bytes(record, payload, range.begin, part, check);
      range.begin += part.size();
      left = left.subspan(part.size());
    }
  }
  return {};
}

// --- what there is to check ----------------------------------------------------------------------

// Checks a record's archive, but for the payload, and says how that is checked.
VerifySession::Payload VerifySession::open(std::size_t record, format::RecordBytes& bytes) {
  const NamedRecord& named = records_[record];
  const std::optional<format::RecordSums>& sums = sums_[record];
  const bool raw = sums && sums->raw;
  Payload payload;
  if (!named.tensor && !sums) {
    check_entries(record, bytes, {});
    return payload;
  }
  if (raw) {
    payload.bytes = named.length;
  } else {
    auto archive = format::index_record(bytes);
    if (!archive) {
      if (archive.error().code == Errc::pickle_unknown && !sums) {
        // A quantized tensor, a subclass and the like, which only torch.load knows.
        check_entries(record, bytes, {});
      } else {
        add_finding(record, archive.error());
      }
      return payload;
    }
    payload.offset = archive->payload_offset;
    payload.bytes = archive->payload_bytes;
    payload.crc = archive->payload_crc;
    if (sums) {
      auto intact = check_envelope(*sums, bytes, payload.offset, payload.bytes);
      if (!intact) add_finding(record, intact.error());
    } else {
      check_entries(record, bytes, kPayloadEntry);
    }
    if (named.tensor && archive->header.sizes != named.sizes) {
      add_finding(record,
                  format_error(Errc::tensor_mismatch,
                               "the record holds a tensor of " + text_of(archive->header.sizes) +
                                   ", the metadata says " + text_of(named.sizes)));
    }
    if (named.tensor && !sums && named.dtype != nullptr && archive->header.dtype != named.dtype) {
      add_finding(
          record,
          format_error(Errc::tensor_mismatch,
                       "the record holds a tensor of " + std::string(archive->header.dtype->name) +
                           ", the metadata says " + std::string(named.dtype->name)));
    }
  }
  if (const format::RecordSums* blocks = blocks_of(sums, raw)) {
    const std::uint64_t count =
        payload.bytes / blocks->block_bytes + (payload.bytes % blocks->block_bytes != 0 ? 1 : 0);
    if (count == blocks->block_crcs.size()) {
      payload.check = Payload::Check::blocks;
      return payload;
    }
    add_finding(record, format_error(Errc::checksum_mismatch,
                                     "the metadata has the checksums of a record of another size"));
    return payload;
  }
  if (raw) {
    // No blocks are those of no bytes.
    if (payload.bytes > 0) add_unverifiable(record);
  } else if (sums || is_known(payload.crc, payload.bytes)) {
    payload.check = Payload::Check::sum;
  } else {
    add_unverifiable(record);
  }
  return payload;
}

void VerifySession::check_entries(std::size_t record, format::RecordBytes& bytes,
                                  std::string_view skip) {
  auto found = format::check_entries(bytes, skip);
  if (!found) {
    add_finding(record, found.error());
  } else if (found->unknown > 0 || (!found->archive && bytes.size() > 0)) {
    add_unverifiable(record);
  }
}

void VerifySession::check_bytes(std::size_t record, const Payload& payload, std::uint64_t position,
                                std::span<const std::byte> bytes, PayloadCheck& check) {
  if (payload.check == Payload::Check::sum) {
    static_cast<void>(check.take(position, bytes));
    return;
  }
  // Block by block, since a check ends at the first that is damaged.
  const std::uint64_t block_bytes = sums_[record]->block_bytes;
  while (!bytes.empty()) {
    const std::uint64_t begin = align_down(position, block_bytes);
    const std::uint64_t end = begin + std::min(block_bytes, payload.bytes - begin);
    const auto part = bytes.first(std::min<std::uint64_t>(bytes.size(), end - position));
    if (auto intact = check.take(position, part); !intact) {
      Error error = intact.error();
      error.offset += payload.offset;
      add_finding(record, std::move(error), end - begin);
    }
    position += part.size();
    bytes = bytes.subspan(part.size());
  }
}

void VerifySession::check_sum(std::size_t record, const Payload& payload, std::uint32_t found) {
  if (found == payload.crc) return;
  add_finding(record, checksum_error(payload.crc, found, "the archive", payload.offset),
              payload.bytes);
}

// --- findings, the caller ------------------------------------------------------------------------

void VerifySession::add_finding(std::size_t record, Error error, std::uint64_t bytes) {
  const NamedRecord& named = records_[record];
  // Errors of the system have a path and count from the file's begin, the decoder's count from the
  // record's.
  if (error.path.empty()) {
    const std::uint64_t in_record = error.offset == Error::kNoOffset ? 0 : error.offset;
    error.offset = checked_add(named.offset, in_record).value_or(named.offset);
  } else if (error.offset == Error::kNoOffset) {
    error.offset = named.offset;
  }
  std::lock_guard lock(mutex_);
  findings_.push_back({named.file, record, bytes, std::move(error)});
}

void VerifySession::add_unverifiable(std::size_t record) {
  std::lock_guard lock(mutex_);
  unverifiable_.push_back(record);
}

bool VerifySession::wait_for(std::chrono::milliseconds timeout) {
  if (!results_->wait_for(timeout)) return false;
  files_.close_directory();
  return true;
}

void VerifySession::cancel() {
  if (results_->inherited()) return;
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = format_error(Errc::cancelled, "verifying was cancelled");
  cancelled_ = true;
}

std::optional<Error> VerifySession::failure() const {
  if (results_->inherited()) {
    return format_error(Errc::cancelled, "it is the process that forked this one that verifies");
  }
  std::lock_guard lock(mutex_);
  return failure_;
}

std::vector<Finding> VerifySession::findings() const {
  std::vector<Finding> sorted;
  {
    std::lock_guard lock(mutex_);
    sorted = findings_;
  }
  std::stable_sort(sorted.begin(), sorted.end(), [](const Finding& a, const Finding& b) {
    return std::tie(a.file, a.error.offset, a.record) < std::tie(b.file, b.error.offset, b.record);
  });
  std::vector<Finding> merged;
  for (Finding& finding : sorted) {
    if (merged.empty() || !continues(merged.back(), finding)) {
      merged.push_back(std::move(finding));
      continue;
    }
    merged.back().bytes += finding.bytes;
    if (merged.back().error.code != Errc::checksum_mismatch) continue;
    merged.back().error.detail =
        "the bytes are damaged: their blocks' CRC-32s are not those in the checkpoint's metadata";
  }
  return merged;
}

std::vector<std::size_t> VerifySession::unverifiable() const {
  std::lock_guard lock(mutex_);
  std::vector<std::size_t> sorted = unverifiable_;
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  return sorted;
}

}  // namespace torch_ckpt::engine
