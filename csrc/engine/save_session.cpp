#include "engine/save_session.h"

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cstring>
#include <exception>
#include <utility>

#include "checked_math.h"
#include "engine/executor.h"
#include "engine/image_stream.h"
#include "os/directory.h"

namespace torch_ckpt::engine {
namespace {

namespace asio = boost::asio;

// Writes in flight per file: one on the device while the next one is queued behind it.
constexpr std::size_t kDepth = 2;
// Below this a file is a handful of blocks, and the page cache is as fast as going around it.
constexpr std::uint64_t kDirectMinBytes = std::uint64_t{1} << 20;

Error from_exception(const std::exception_ptr& exception) {
  Error error;
  error.operation = "save";
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception& caught) {
    error.detail = caught.what();
  } catch (...) {
    error.detail = "an unknown exception";
  }
  return error;
}

Error cancelled_error() { return format_error(Errc::cancelled, "the save was cancelled"); }

}  // namespace

Result<std::shared_ptr<SaveSession>> SaveSession::start(std::string directory,
                                                        std::vector<FileJob> files,
                                                        const SaveOptions& given) {
  SaveOptions options = given;
  if (options.chunk_bytes == 0 || options.chunk_bytes % os::kDirectAlignment != 0) {
    return format_error(Errc::invalid_argument, "chunk_bytes must be a multiple of " +
                                                    std::to_string(os::kDirectAlignment));
  }
  const std::size_t count = std::max<std::size_t>(files.size(), 1);
  if (options.parallel_files == 0 || options.parallel_files > count) options.parallel_files = count;
  std::uint64_t largest = 1;
  for (const FileJob& job : files) largest = std::max(largest, job.image.bytes());
  options.chunk_bytes = static_cast<std::size_t>(
      std::min<std::uint64_t>(options.chunk_bytes, align_up(largest, os::kDirectAlignment)));
  // More a save cannot use: of each file one is filled while kDepth are written.
  const std::size_t most_chunks = (kDepth + 1) * options.parallel_files;
  if (options.max_host_bytes == 0) options.max_host_bytes = options.chunk_bytes * most_chunks;
  // A budget below one chunk gets one smaller chunk.
  options.chunk_bytes =
      std::min(options.chunk_bytes,
               static_cast<std::size_t>(align_down(options.max_host_bytes, os::kDirectAlignment)));
  if (options.chunk_bytes == 0) {
    return format_error(Errc::invalid_argument,
                        "max_host_bytes must be at least " + std::to_string(os::kDirectAlignment) +
                            ", got " + std::to_string(given.max_host_bytes));
  }
  const std::size_t chunks = std::min(options.max_host_bytes / options.chunk_bytes, most_chunks);
  // What an earlier save with a larger budget left must not come on top of this one's.
  staging::ChunkPool::instance().trim(options.max_host_bytes);
  std::shared_ptr<SaveSession> session(
      new SaveSession(std::move(directory), std::move(files), options, chunks));
  session->spawn_runners();
  return session;
}

SaveSession::SaveSession(std::string directory, std::vector<FileJob> files,
                         const SaveOptions& options, std::size_t chunks)
    : directory_(std::move(directory)),
      options_(options),
      chunks_(chunks),
      free_slots_(executor(), chunks),
      results_(files.size()) {
  for (FileJob& job : files) {
    bytes_planned_ += job.image.bytes();
    files_.push_back({std::move(job), false, {}});
  }
  for (std::size_t slot = 0; slot < chunks; ++slot) {
    free_slots_.try_send(boost::system::error_code(), slot);
  }
}

void SaveSession::spawn_runners() {
  running_ = files_.size();
  const std::size_t runners = std::min(options_.parallel_files, files_.size());
  for (std::size_t i = 0; i < runners; ++i) {
    // The handler keeps the session alive until its last file has ended.
    asio::co_spawn(asio::make_strand(executor()), run_files(),
                   [self = shared_from_this()](const std::exception_ptr&) {});
  }
}

asio::awaitable<void> SaveSession::run_files() {
  for (std::size_t number = next_file_++; number < files_.size(); number = next_file_++) {
    Result<> status;
    try {
      status = co_await write_file(files_[number]);
    } catch (...) {
      status = from_exception(std::current_exception());
    }
    finish_file(std::move(status));
  }
}

Result<std::span<std::byte>> SaveSession::chunk_memory(std::size_t slot, const FileImage& image) {
  auto& chunk = chunks_[slot];
  if (chunk == nullptr) {
    auto taken = staging::ChunkPool::instance().take(options_.chunk_bytes);
    if (!taken) return taken.error();
    chunk = std::move(*taken);
  }
  if (image.device() != staging::Source::kHost) {
    if (auto pinned = chunk->pin(image.device()); !pinned) return pinned.error();
  }
  return chunk->bytes();
}

Result<std::span<std::byte>> SaveSession::fill_chunk(std::size_t slot, ImageStream& stream,
                                                     const FileImage& image, std::uint64_t offset) {
  // An exception becomes a value here: unwinding pump() would take its frame from under the writes
  // in flight, and the slot with it.
  try {
    if (cancelled_) return cancelled_error();
    auto memory = chunk_memory(slot, image);
    if (!memory) return memory;
    const auto fresh =
        memory->first(std::min<std::uint64_t>(memory->size(), image.bytes() - offset));
    if (auto filled = stream.fill(fresh); !filled) return filled.error();
    return fresh;
  } catch (...) {
    return from_exception(std::current_exception());
  }
}

asio::awaitable<Result<>> SaveSession::pump(FileState& state, os::File& file) {
  const FileImage& image = state.job.image;
  ImageStream stream(image);
  auto strand = co_await asio::this_coro::executor;
  // What each write in flight ends with; no error where it is null.
  Channel<std::shared_ptr<const Error>> written(strand, kDepth);
  std::size_t in_flight = 0;
  std::optional<Error> error;

  for (std::uint64_t offset = 0; offset < image.bytes() && !error;) {
    const std::size_t slot = co_await free_slots_.async_receive(asio::use_awaitable);
    const auto filled = fill_chunk(slot, stream, image, offset);
    if (!filled) {
      error = filled.error();
      free_slots_.try_send(boost::system::error_code(), slot);
      break;
    }
    const std::size_t fresh = filled->size();
    bytes_staged_ += fresh;
    std::span<std::byte> data = *filled;
    if (file.is_direct()) {
      // Direct writes move whole blocks; the padding is cut off once the file is complete.
      data = chunks_[slot]->bytes().first(align_up(fresh, os::kDirectAlignment));
      std::memset(data.data() + fresh, 0, data.size() - fresh);
    }
    asio::post(executor(),
               [this, self = shared_from_this(), &file, &written, slot, offset, fresh, data] {
                 std::shared_ptr<const Error> failure;
                 if (auto done = file.write_at(data, offset); !done) {
                   failure = std::make_shared<const Error>(done.error());
                   fail(done.error());
                 } else {
                   bytes_written_ += fresh;
                   if (!file.is_direct()) file.start_writeback(offset, fresh);
                 }
                 free_slots_.try_send(boost::system::error_code(), slot);
                 written.try_send(boost::system::error_code(), std::move(failure));
               });
    ++in_flight;
    offset += fresh;
    if (in_flight == kDepth) {
      const auto failure = co_await written.async_receive(asio::use_awaitable);
      --in_flight;
      if (failure) error = *failure;
    }
  }
  // Also after an error: the writes use `file` and `written`.
  for (; in_flight > 0; --in_flight) {
    const auto failure = co_await written.async_receive(asio::use_awaitable);
    if (failure && !error) error = *failure;
  }
  if (error) co_return *error;
  state.checksums = stream.checksums();
  co_return Result<>();
}

asio::awaitable<Result<>> SaveSession::write_file(FileState& state) {
  if (cancelled_) co_return cancelled_error();
  const std::uint64_t bytes = state.job.image.bytes();
  const bool direct = options_.direct_io == DirectIo::on ||
                      (options_.direct_io == DirectIo::automatic && bytes >= kDirectMinBytes);
  auto file = os::File::create(state.job.path, direct ? os::IoMode::direct : os::IoMode::buffered);
  if (!file) co_return file.error();
  state.created = true;
  if (options_.direct_io == DirectIo::on && !file->is_direct()) {
    Error error = format_error(Errc::invalid_argument,
                               "direct_io=True, but this file system has no direct I/O");
    error.operation = "open";
    error.path = state.job.path;
    co_return error;
  }
  if (auto reserved = file->reserve(bytes); !reserved) co_return reserved;
  if (auto pumped = co_await pump(state, *file); !pumped) co_return pumped;
  if (file->is_direct()) {
    if (auto cut = file->truncate(bytes); !cut) co_return cut;
  }
  if (options_.sync) {
    if (auto synced = file->sync(); !synced) co_return synced;
  }
  co_return std::move(*file).close();
}

void SaveSession::fail(const Error& error) {
  {
    std::lock_guard lock(mutex_);
    // Too late: the files are all there, or all removed.
    if (ended_) return;
    if (!first_error_) first_error_ = error;
  }
  cancelled_ = true;
}

void SaveSession::finish_file(Result<> status) {
  if (!status) fail(status.error());
  ++files_done_;
  if (--running_ == 0) {
    if (!cancelled_ && options_.sync) {
      if (auto synced = os::sync_directory(directory_); !synced) fail(synced.error());
    }
    bool failed = false;
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
      failed = first_error_.has_value();
    }
    if (failed) {
      for (const FileState& state : files_) {
        // A file that cannot be removed is named by no metadata; the first cause is what matters.
        if (state.created) static_cast<void>(os::remove_file(state.job.path));
      }
    }
    for (auto& chunk : chunks_) {
      if (chunk != nullptr) staging::ChunkPool::instance().give_back(std::move(chunk));
    }
    staging::ChunkPool::instance().trim(options_.max_host_bytes);
  }
  results_.send(status);
}

bool SaveSession::wait_for(std::chrono::milliseconds timeout) { return results_.wait_for(timeout); }

Result<> SaveSession::outcome() const {
  if (results_.inherited()) {
    return format_error(Errc::cancelled, "the save is that of the process that forked this one");
  }
  std::lock_guard lock(mutex_);
  if (first_error_) return *first_error_;
  return {};
}

const std::vector<std::uint32_t>& SaveSession::checksums(std::size_t file) const {
  return files_[file].checksums;
}

SaveProgress SaveSession::progress() const {
  return {bytes_planned_, bytes_staged_, bytes_written_, files_.size(), files_done_};
}

void SaveSession::cancel() {
  if (!results_.inherited()) fail(cancelled_error());
}

}  // namespace torch_ckpt::engine
