#include "engine/read_pipeline.h"

#include <algorithm>
#include <exception>

#include "checked_math.h"
#include "engine/record_reader.h"
#include "format/crc32.h"

namespace torch_ckpt::engine {
namespace {

using planning::ByteRange;

// Bytes to consume at once, few enough to stay in the second-level cache.
constexpr std::uint64_t kCachedBytes = std::uint64_t{256} << 10;

std::vector<std::string> names_of(const std::vector<LoadFile>& files) {
  std::vector<std::string> names;
  names.reserve(files.size());
  for (const LoadFile& file : files) names.push_back(file.name);
  return names;
}

PayloadCheck check_of(const Payload& payload) {
  if (payload.blocks != nullptr) return PayloadCheck::by_blocks(*payload.blocks, payload.bytes);
  return payload.crc ? PayloadCheck::one_sum() : PayloadCheck();
}

}  // namespace

Result<std::optional<format::ChecksumTable>> checksum_table_of(const LoadFile& file) {
  if (file.checksum_table.empty()) return std::optional<format::ChecksumTable>();
  auto table = format::ChecksumTable::decode(std::as_bytes(std::span(file.checksum_table)));
  if (table) return std::optional(std::move(*table));
  Error error = table.error();
  error.offset = Error::kNoOffset;
  error.detail = "the metadata's checksums for this file are damaged: " + error.detail;
  return error;
}

Error past_end_error(const planning::StoredRecord& record, std::uint64_t bytes) {
  return format_error(Errc::range_past_end,
                      "the metadata lists a record of " + std::to_string(record.length) +
                          " bytes at this offset, but the file ends at byte " +
                          std::to_string(bytes));
}

Result<ScratchLayout> choose_scratch(ReadOptions& options,
                                     std::span<const planning::Region* const> regions,
                                     std::span<const Target* const> targets,
                                     std::string_view user) {
  ScratchLayout layout = lay_out_scratch(
      regions, targets,
      scratch_chunk_bytes(options.chunk_bytes, options.max_scratch_bytes, options.threads),
      options.max_scratch_bytes);
  if (layout.chunk_bytes == 0 || options.threads == 0) {
    return format_error(Errc::invalid_argument,
                        std::string(user) +
                            " needs at least 1 thread and 4096 bytes of scratch memory, got " +
                            std::to_string(options.threads) + " threads and " +
                            std::to_string(options.max_scratch_bytes) + " bytes");
  }
  options.threads = std::min(options.threads, options.max_scratch_bytes / layout.bytes());
  layout.max_idle_bytes = layout.bytes() * options.threads;
  return layout;
}

ReadPipeline::ReadPipeline(Context& context, Folder folder, const std::vector<LoadFile>& files,
                           const ReadOptions& options, const ScratchLayout& scratch_layout,
                           const std::vector<staging::ReadyEvent>& ready, ReadSink& sink,
                           bool continue_after_errors)
    : context_(context),
      files_(std::move(folder), names_of(files), options.direct_io),
      threads_(options.threads),
      scratch_layout_(scratch_layout),
      ready_(ready),
      sink_(sink),
      continue_after_errors_(continue_after_errors) {
  // Only a copy to a device needs page-locked memory of its own.
  if (files_.are_in_store() && scratch_layout_.device == staging::Source::kHost) {
    scratch_layout_.chunks = 0;
  }
}

void ReadPipeline::plan(std::vector<planning::WantedRecord> wanted, std::uint64_t bytes,
                        std::uint64_t block_bytes) {
  records_ = std::move(wanted);
  large_.resize(records_.size());
  planning::ReadPlanLimits limits;
  limits.batch_bytes = scratch_layout_.step_bytes();
  // Pieces must not split a block, because each block is checked within one piece.
  limits.cut_bytes = std::max(limits.cut_bytes, block_bytes);
  limits.piece_bytes = std::max(planning::piece_bytes_for(bytes, threads_), limits.cut_bytes);
  if (files_.are_in_store()) {
    // One request for each piece, so that the requests of one record are made at once.
    limits.piece_bytes = std::max<std::uint64_t>(limits.batch_bytes, limits.cut_bytes);
  }
  units_ = planning::plan_reads(records_, limits);
  for (const planning::ReadUnit& unit : units_) {
    files_.expect_unit(file_of(unit));
    if (unit.is_batch || unit.piece != 0) continue;
    auto large = std::make_unique<LargeRecord>();
    const std::size_t record = unit.records.front();
    const std::vector<ByteRange>& ranges = records_[record].ranges;
    if (ranges.size() == 1 && ranges[0].begin == 0) large->bytes_from_begin = ranges[0].end;
    large->pieces.resize(unit.pieces);
    large->pieces_left = unit.pieces;
    large_[record] = std::move(large);
  }
  if (!files_.are_in_store()) return;
  units_ = planning::with_ends_ahead(std::move(units_), records_);
  for (const planning::ReadUnit& unit : units_) {
    if (unit.is_of_ends) files_.expect_unit(file_of(unit));
  }
}

// --- tasks ---------------------------------------------------------------------------------------

Result<> ReadPipeline::start(std::shared_ptr<const void> owner, std::string_view operation) {
  const std::size_t tasks = std::min(threads_, units_.size());
  results_.emplace(tasks);
  return context_.executor.post_long_tasks(
      tasks, operation,
      [this, owner, operation](std::shared_ptr<const void> threads) {
        run_task(std::move(threads), operation);
      },
      [this, owner](Error error) { end_task(std::move(error)); });
}

void ReadPipeline::run_task(std::shared_ptr<const void> threads,
                            std::string_view operation) noexcept {
  Result<> status;
  try {
    auto scratch = Scratch::make(context_, scratch_layout_, ready_);
    if (scratch) {
      while (!failure_.is_set()) {
        const std::size_t next = next_unit_++;
        if (next >= units_.size()) break;
        run_unit(units_[next], **scratch);
      }
      status = (*scratch)->wait_all();
    } else {
      status = scratch.error();
    }
  } catch (...) {
    status = exception_error(std::current_exception(), operation);
  }
  threads.reset();
  end_task(std::move(status));
}

void ReadPipeline::end_task(Result<> status) noexcept {
  if (!status) fail(std::move(status).error());
  results_->send({});
}

void ReadPipeline::run_unit(const planning::ReadUnit& unit, Scratch& scratch) {
  auto file = files_.acquire(file_of(unit));
  Result<> done;
  if (file) {
    if (unit.is_of_ends) {
      for (const std::size_t record : unit.records) {
        if (!failure_.is_set()) open_large(record, **file);
      }
    } else {
      done = unit.is_batch ? run_batch(unit, **file, scratch) : run_piece(unit, **file, scratch);
    }
    file->reset();
  } else {
    done = file.error();
  }
  files_.release(file_of(unit));
  for (const std::size_t record : unit.records) {
    if (unit.is_batch) bytes_read_ += records_[record].record->length;
    // If several pieces of a record fail, report only the first.
    const bool is_reported = !unit.is_batch && !done && large_[record]->has_unread.exchange(true);
    if (!done && !is_reported) sink_.fail(record, done.error());
  }
  for (const ByteRange& range : unit.ranges) bytes_read_ += range.bytes();
}

bool ReadPipeline::lies_in_file(std::size_t record, const DataFile& file) {
  const planning::StoredRecord& wanted = *records_[record].record;
  if (inside(wanted.offset, wanted.length, file.bytes())) return true;
  sink_.fail(record, past_end_error(wanted, file.bytes()));
  return false;
}

// --- small records -------------------------------------------------------------------------------

Result<> ReadPipeline::run_batch(const planning::ReadUnit& unit, const DataFile& file,
                                 Scratch& scratch) {
  auto room = scratch.next_buffer();
  if (!room) return room.error();
  bool is_in_file = true;
  for (const std::size_t record : unit.records) is_in_file &= lies_in_file(record, file);
  if (failure_.is_set()) return {};
  Result<ReadBytes> all = Error();
  if (is_in_file) {
    all = file.fetch(*room, unit.begin, unit.length,
                     file.prefers_direct_read(unit.begin, unit.length));
    if (!all && !continue_after_errors_) return all.error();
  }
  for (const std::size_t record : unit.records) {
    const planning::StoredRecord& wanted = *records_[record].record;
    if (!inside(wanted.offset, wanted.length, file.bytes())) continue;
    // A record that cannot be read, or lies beyond the end of the file, must not fail the other
    // records of the batch. Read them one by one.
    const Result<ReadBytes> read =
        all ? ReadBytes{all->bytes.subspan(wanted.offset - unit.begin, wanted.length)}
            : file.fetch(*room, wanted.offset, wanted.length, false);
    const Result<> consumed = read ? consume_record(record, read->bytes, scratch) : read.error();
    if (!consumed) sink_.fail(record, consumed.error());
    if (failure_.is_set()) return {};
  }
  return scratch.submit();
}

Result<> ReadPipeline::consume_record(std::size_t record, std::span<const std::byte> bytes,
                                      Scratch& scratch) {
  RecordInMemory archive(bytes);
  auto payload = sink_.open(record, archive);
  if (!payload) return payload.error();
  if (!payload->is_read) return {};
  const auto contents = bytes.subspan(payload->offset, payload->bytes);
  PayloadCheck check = check_of(*payload);
  auto consumed = sink_.consume(record, *payload, 0, contents, check, scratch);
  if (!consumed) return consumed;
  std::optional<std::uint32_t> crc;
  if (payload->crc) crc = check.sum().first;
  return sink_.finish(record, *payload, crc, contents);
}

// --- large records -------------------------------------------------------------------------------

void ReadPipeline::open_large(std::size_t record, const DataFile& file) {
  LargeRecord& large = *large_[record];
  std::call_once(large.opened, [&] {
    if (!lies_in_file(record, file)) return;
    const planning::StoredRecord& wanted = *records_[record].record;
    RecordInFile archive(file, wanted.offset, wanted.length);
    auto opened = sink_.open(record, archive);
    if (!opened) return sink_.fail(record, opened.error());
    large.payload = *opened;
    if (large.bytes_from_begin < large.payload.bytes) large.payload.crc.reset();
  });
}

Result<> ReadPipeline::run_piece(const planning::ReadUnit& unit, const DataFile& file,
                                 Scratch& scratch) {
  const std::size_t record = unit.records.front();
  LargeRecord& large = *large_[record];
  const Payload& payload = large.payload;
  open_large(record, file);
  if (!payload.is_read) return {};
  PayloadCheck check = check_of(payload);
  for (ByteRange range : unit.ranges) {
    range.end = std::min(range.end, payload.bytes);
    if (range.begin >= range.end) continue;
    TC_TRY(read_range(record, range, file, scratch, check));
  }
  large.pieces[unit.piece] = check.sum();
  if (--large.pieces_left > 0 || failure_.is_set()) return {};
  std::optional<std::uint32_t> crc;
  if (payload.crc && !large.has_unread) {
    crc = 0;
    for (const auto& [sum, bytes] : large.pieces) crc = format::crc32_join(*crc, sum, bytes);
  }
  return sink_.finish(record, payload, crc, {});
}

Result<> ReadPipeline::read_range(std::size_t record, ByteRange range, const DataFile& file,
                                  Scratch& scratch, PayloadCheck& check) {
  while (range.begin < range.end && !failure_.is_set()) {
    auto end = read_step(record, range, file, scratch, check);
    if (!end) return end.error();
    range.begin = *end;
    TC_TRY(scratch.submit());
  }
  return {};
}

/// Reads and consumes the first bytes of the range, as many as fit into a buffer. Returns the
/// position at which the next step begins.
Result<std::uint64_t> ReadPipeline::read_step(std::size_t record, ByteRange range,
                                              const DataFile& file, Scratch& scratch,
                                              PayloadCheck& check) {
  const Payload& payload = large_[record]->payload;
  const std::uint64_t begin_in_file = records_[record].record->offset + payload.offset;
  std::uint64_t at = range.begin;
  const std::uint64_t end = at + std::min<std::uint64_t>(range.bytes(), scratch.step_bytes());
  bool direct = file.prefers_direct_read(begin_in_file + at, end - at);
  auto room = scratch.next_buffer();
  if (!room) return room.error();
  std::span<std::byte> free = *room;
  while (at < end && !failure_.is_set()) {
    const std::uint64_t bytes = direct ? end - at : std::min(kCachedBytes, end - at);
    auto fetched = file.fetch(free, begin_in_file + at, bytes, direct);
    if (!fetched && !continue_after_errors_) return fetched.error();
    if (!fetched && direct) {
      // Retry with smaller, buffered reads, to find out which bytes are unreadable.
      direct = false;
      continue;
    }
    if (!fetched) {
      large_[record]->has_unread = true;
      const std::uint64_t skipped = sink_.skip(record, payload, {at, at + bytes}, fetched.error());
      at += std::min(skipped, range.end - at);
      continue;
    }
    for (std::span<const std::byte> left = fetched->bytes; !left.empty();) {
      const auto part = left.first(std::min<std::uint64_t>(left.size(), kCachedBytes));
      auto consumed = sink_.consume(record, payload, at, part, check, scratch);
      if (!consumed) return consumed.error();
      at += part.size();
      left = left.subspan(part.size());
    }
    if (scratch.has_queued_copies()) free = free.subspan(bytes);
  }
  return at;
}

bool ReadPipeline::wait_for(std::chrono::milliseconds timeout) {
  if (!results_->wait_for(timeout)) return false;
  files_.close_folder();
  return true;
}

}  // namespace torch_ckpt::engine
