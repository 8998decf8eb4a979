#include "engine/save_session.h"

#include <algorithm>
#include <exception>
#include <span>
#include <utility>

#include "checked_math.h"
#include "engine/pool_refill.h"
#include "format/checksum_table.h"
#include "format/crc32.h"
#include "format/part_sums.h"
#include "os/cores.h"
#include "staging/chunk_pool.h"

namespace torch_ckpt::engine {
namespace {

std::size_t chunk_count(const FileImage& image, std::size_t chunk_bytes) {
  return (image.bytes() + chunk_bytes - 1) / chunk_bytes;
}

bool is_mostly_on_devices(const std::vector<FileJob>& files) {
  std::uint64_t bytes = 0;
  std::uint64_t device_bytes = 0;
  for (const FileJob& job : files) {
    bytes += job.image.bytes();
    device_bytes += job.image.device_bytes();
  }
  return device_bytes > bytes / 2;
}

// Chooses the chunk size: the size of a store's parts; otherwise large if most bytes come from
// devices and the budget has room for enough large chunks to keep the disk busy.
std::size_t chunk_bytes_for(const std::vector<FileJob>& files, const SaveOptions& options,
                            std::uint64_t largest_file, bool is_in_store) {
  if (options.chunk_bytes != 0) return options.chunk_bytes;
  if (is_in_store) return piece_bytes_in_store(largest_file);
  const std::size_t needed = kDeviceChunkBytes * (kWritesInFlight + 1) * options.parallel_files;
  const bool has_room = options.max_host_bytes == 0 || options.max_host_bytes >= needed;
  return is_mostly_on_devices(files) && has_room ? kDeviceChunkBytes : kHostChunkBytes;
}

// One stager for each file keeps the disk busy. A snapshot has more, because its caller waits for
// the copies, not for the disk; but not for devices, which perform the copies themselves.
std::size_t stagers_for(const std::vector<FileJob>& files, const SaveOptions& options) {
  constexpr std::size_t kMin = 2;
  constexpr std::size_t kMax = 8;
  if (options.parallel_stagers != 0) return options.parallel_stagers;
  if (!options.snapshot || is_mostly_on_devices(files)) return options.parallel_files;
  return std::max(options.parallel_files, std::clamp(os::usable_cores() / 2, kMin, kMax));
}

// The threads that the writers of a save can use: a file has two writes in flight, and the next
// chunk is allocated meanwhile. Beyond 16 files, one thread per file is enough, because few files
// write and allocate at the same time. Writes to a store wait for it, so each has a thread.
std::size_t writer_threads(const SaveOptions& options, bool is_in_store) {
  constexpr std::size_t kMaxFilesWithThree = 16;
  constexpr std::size_t kMore = 2;  // so that another save is not left without threads
  const std::size_t files = options.parallel_files;
  if (is_in_store) return files * (options.writes_in_flight + 1) + kMore;
  return files + 2 * std::min(files, kMaxFilesWithThree) + kMore;
}

int device_of(const std::vector<std::unique_ptr<FileSave>>& files) {
  for (const auto& file : files) {
    if (file->job.image.device() != staging::Source::kHost) return file->job.image.device();
  }
  return staging::Source::kHost;
}

}  // namespace

Result<std::shared_ptr<SaveSession>> SaveSession::start(Context& context, Folder folder,
                                                        std::vector<FileJob> files,
                                                        const SaveOptions& given) {
  SaveOptions options = given;
  if (options.chunk_bytes % os::kDirectAlignment != 0) {
    return format_error(Errc::invalid_argument, "chunk_bytes must be 0 or a multiple of " +
                                                    std::to_string(os::kDirectAlignment) +
                                                    ", got " + std::to_string(options.chunk_bytes));
  }
  const std::size_t count = std::max<std::size_t>(files.size(), 1);
  if (options.parallel_files == 0 || options.parallel_files > count) options.parallel_files = count;
  options.parallel_stagers = stagers_for(files, options);
  const bool is_in_store = folder.store() != nullptr;
  if (is_in_store) {
    options.writes_in_flight = std::max<std::size_t>(1, kPiecesInFlight / options.parallel_files);
  }
  std::uint64_t largest = 1;
  for (const FileJob& job : files) largest = std::max(largest, job.image.bytes());
  options.chunk_bytes = chunk_bytes_for(files, options, largest, is_in_store);
  options.chunk_bytes = static_cast<std::size_t>(
      std::min<std::uint64_t>(options.chunk_bytes, align_up(largest, os::kDirectAlignment)));
  // The largest number of chunks that the save can use. A save that is not a snapshot fills one
  // chunk per file while the file's other chunks are being written.
  std::size_t max_chunks = 0;
  for (const FileJob& job : files) max_chunks += chunk_count(job.image, options.chunk_bytes);
  if (!options.snapshot) {
    max_chunks = std::min(max_chunks, (options.writes_in_flight + 1) * options.parallel_files);
  }
  if (options.max_host_bytes == 0) {
    options.max_host_bytes = options.chunk_bytes * std::max<std::size_t>(max_chunks, 1);
  } else {
    // Idle chunks left by an earlier save with a larger budget count towards this budget.
    context.chunks.trim_to_budget(options.max_host_bytes);
  }
  if (is_in_store) {
    // Each of the files needs memory for one part.
    const std::size_t most_files = options.max_host_bytes / options.chunk_bytes;
    if (most_files == 0) {
      return format_error(
          Errc::invalid_argument,
          "max_host_bytes must be at least " + std::to_string(options.chunk_bytes) +
              ", the size of the parts in which the largest file is uploaded, got " +
              std::to_string(given.max_host_bytes));
    }
    options.parallel_files = std::min(options.parallel_files, most_files);
  }
  // If the budget is smaller than one chunk, use one smaller chunk.
  options.chunk_bytes =
      std::min(options.chunk_bytes,
               static_cast<std::size_t>(align_down(options.max_host_bytes, os::kDirectAlignment)));
  if (options.chunk_bytes == 0) {
    return format_error(Errc::invalid_argument,
                        "max_host_bytes must be at least " + std::to_string(os::kDirectAlignment) +
                            ", got " + std::to_string(given.max_host_bytes));
  }
  const std::size_t chunks = std::min(options.max_host_bytes / options.chunk_bytes, max_chunks);
  options.max_idle_bytes = given.max_host_bytes;
  // Writes run on the stagers' pool until everything is staged.
  const std::size_t writers = writer_threads(options, is_in_store);
  for (const auto& [spec, needed] : {std::pair(options.stagers, options.parallel_stagers + writers),
                                     std::pair(options.writers, writers)}) {
    auto ensured = context.executor.ensure_threads(spec, needed);
    if (!ensured) return ensured.error();
  }
  std::shared_ptr<SaveSession> session(
      new SaveSession(context, std::move(folder), std::move(files), options, chunks));
  session->begin_work();
  return session;
}

SaveSession::SaveSession(Context& context, Folder folder, std::vector<FileJob> jobs,
                         const SaveOptions& options, std::size_t buffers)
    : context_(context),
      folder_(std::move(folder)),
      options_(options),
      files_(files_of(std::move(jobs), folder_)),
      stagers_(context.executor.pool(options.stagers)),
      writers_(context.executor.pool(options.writers)),
      parallel_files_(std::min(options.parallel_files, files_.size())),
      buffers_(context, buffers, options.chunk_bytes, device_of(files_), options.parallel_stagers),
      stager_tasks_(options.parallel_stagers),
      writer_tasks_(parallel_files_),
      allocator_tasks_(std::min(parallel_files_, buffers)),
      files_to_stage_(files_.size()),
      running_(files_.size()),
      throttle_(options.max_bytes_per_second),
      submitted_(files_.size()),
      staged_(files_.size()),
      results_(files_.size()) {
  const os::MutexLock lock(claims_mutex_);
  being_staged_.reserve(parallel_files_);
  for (std::size_t i = 0; i < parallel_files_; ++i) stage_next_file();
}

std::vector<std::unique_ptr<FileSave>> SaveSession::files_of(std::vector<FileJob> jobs,
                                                             const Folder& folder) {
  std::vector<std::unique_ptr<FileSave>> files;
  files.reserve(jobs.size());
  for (FileJob& job : jobs) {
    files.push_back(std::make_unique<FileSave>(std::move(job), files.size(), folder));
  }
  return files;
}

void SaveSession::begin_work() noexcept {
  // If there are files, the last one ends the session.
  if (files_.empty()) return end();
  stagers_guard_.emplace(stagers_.get_executor());
  writers_guard_.emplace(writers_.get_executor());
  buffers_.take_idle_chunks();
  // There is nothing to stage for an empty file, and possibly no buffer.
  for (const auto& file : files_) {
    if (file->job.image.bytes() > 0) continue;
    submitted_.send({});
    const os::MutexLock lock(file->mutex);
    count_staged(*file, 0);
  }
  const std::size_t allocators = std::min(allocator_tasks_.size(), buffers_.unallocated_count());
  for (Task& task : std::span(allocator_tasks_).first(allocators)) {
    post(task, stagers_, [this, &task] { allocate_buffers(task, false); });
  }
  for (Stager& stager : stager_tasks_) {
    stager.session = this;
    stager.resume();
  }
  for (FileWriter& writer : writer_tasks_) {
    post(writer.task, stagers_, [this, &writer] { open_next(writer); });
  }
}

void SaveSession::end_file(FileSave& file, Result<> status) noexcept {
  // Create the result before end(): if memory runs out, the save fails and end() deletes the files.
  Result<format::FileResult> message = status ? file.result() : status.error();
  if (!message) failure_.set(message.error());
  ++files_done_;
  if (--running_ == 0) end();
  // A file that stopped because another file failed sends the first error. So does the last file,
  // because the save may also fail in end(), which syncs the directory.
  const bool was_stopped = !message && message.error().code == Errc::cancelled;
  if (auto first = failure_.get(); first && (was_stopped || failure_.is_closed())) {
    message = *std::move(first);
  }
  file.is_done = true;
  if (options_.children != nullptr) options_.children->send(message, files_.size());
  if (message) {
    results_.send(NumberedResult{file.number, std::move(*message)});
  } else {
    results_.send(std::move(message).error());
  }
}

// Ends the session after the last file, when no stagers or writes remain.
void SaveSession::end() noexcept {
  try {
    if (!failure_.is_set() && options_.sync && !files_.empty()) {
      const ScopedTimer timed(timing_, Activity::fsync);
      if (auto synced = folder_.sync(); !synced) failure_.set(synced.error());
    }
  } catch (...) {
    failure_.set(exception_error(std::current_exception(), "save"));
  }
  // From here on it is too late to cancel: either all files exist or all are deleted.
  if (failure_.close()) {
    for (const auto& file : files_) file->output.remove();
  }
  // Close the folder here, because threads may keep the session alive a little longer.
  folder_.close();
  timing_.ended_ns = timing_.now_ns();
  buffers_.close(options_.max_idle_bytes);
  stagers_guard_.reset();
  writers_guard_.reset();
  if (options_.max_idle_bytes != 0) {
    context_.chunks.trim_to_budget(options_.max_idle_bytes);
  }
  if (failure_.is_set()) {
    context_.chunks.cancel_refill();
  } else {
    refill_pool(context_);
  }
}

bool SaveSession::wait_staged(std::chrono::milliseconds timeout) {
  return staged_.wait_for(timeout);
}

bool SaveSession::wait_submitted(std::chrono::milliseconds timeout) {
  return submitted_.wait_for(timeout);
}

bool SaveSession::wait_for(std::chrono::milliseconds timeout) { return results_.wait_for(timeout); }

Result<> SaveSession::outcome() const {
  if (results_.inherited()) {
    return format_error(
        Errc::cancelled,
        "the save belongs to the process that forked this one; wait for it in that process");
  }
  if (auto failure = failure_.get()) return *std::move(failure);
  return {};
}

Result<std::vector<format::FileResult>> SaveSession::results() const {
  TC_TRY(outcome());
  std::vector<format::FileResult> results(files_.size());
  for (const auto& message : results_.messages()) results[message->file] = message->result;
  return results;
}

SaveProgress SaveSession::progress() const {
  SaveProgress progress;
  progress.files_planned = files_.size();
  progress.files_done = files_done_;
  for (const auto& file : files_) {
    progress.bytes_planned += file->job.image.bytes();
    progress.bytes_staged += file->bytes_staged;
    progress.bytes_written += file->bytes_written;
  }
  return progress;
}

std::vector<FileProgress> SaveSession::unfinished() const {
  std::vector<FileProgress> files;
  // A forked child has none of the threads that write the files.
  if (results_.inherited()) return files;
  for (const auto& file : files_) {
    if (file->is_done) continue;
    const FilePhase phase = file->phase();
    files.push_back({file->number, phase, file->bytes_written, file->job.image.bytes()});
  }
  return files;
}

void SaveSession::cancel() {
  if (results_.inherited()) return;
  failure_.set(format_error(Errc::cancelled, "the save was cancelled"));
}

Result<format::FileResult> FileSave::result() const try {
  const std::vector<ImageItem>& items = job.image.items();
  format::FileResult result;
  result.name = job.name;
  std::vector<format::ItemLocation> locations;
  locations.reserve(items.size());
  std::vector<format::RecordSums> records;
  records.reserve(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::size_t item = job.items.empty() ? i : job.items[i];
    locations.push_back({item, items[i].offset, items[i].bytes});
    // An empty item has the same offset as the next item, and would hide that item's table entry.
    if (items[i].bytes > 0) records.push_back(stream.sums()[i]);
  }
  result.locations = format::ItemLocations(locations);
  if (job.image.is_of_parts()) {
    const std::vector<format::PartSums> parts = stream.part_sums();
    for (const format::PartSums& part : parts) {
      result.crcs.push_back(format::crc32(0, std::as_bytes(std::span(part.shares))));
    }
    result.checksum_table = format::encode_part_sums(parts);
    return result;
  }
  result.crcs = stream.checksums();
  result.checksum_table = format::encode_checksum_table(records);
  return result;
} catch (...) {
  return exception_error(std::current_exception(), "save");
}

FilePhase FileSave::phase() const {
  // The order of these reads guarantees written <= ready, since bytes are staged before they are
  // written.
  const std::uint64_t written = bytes_written;
  const std::uint64_t ready = bytes_ready;
  if (has_writer && ready > written) return FilePhase::writing;
  if (has_writer && ready == job.image.bytes()) return FilePhase::fsync;
  if (has_stager && ready < job.image.bytes()) return FilePhase::staging;
  return FilePhase::waiting;
}

}  // namespace torch_ckpt::engine
